"""Plans and predictions as tables on the terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hethub.predictor import Prediction
from hethub.predictor.calibration.validation.goals import THIS_TABLE, FamilyOut
from hethub.report.explanation import print_alone, print_explanation
from hethub.runtime.console import make_console, make_table
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.base import show_gib
from hethub.spec.cluster import ClusterSpec
from hethub.spec.model import TRAINED, ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec
from hethub.spec.ranges import show_ranks

if TYPE_CHECKING:  # the planner's search takes a while to load, and most tables are not its
    from hethub.planner import HomogeneousPart, PlanResult
    from hethub.runtime.doctor.ranks import RanksExamined

GIB = 2**30
CLOSE_PERCENT = 10  # of the memory of the fullest rank, left free by the prediction
MOST_NAMES = 10  # of rows skipped for one reason


def print_plan(
    result: "PlanResult", model: ModelSpec, cluster: ClusterSpec, assumed: Sequence[str], written: Sequence[Path]
) -> None:
    """The planner's result: its stages, then what is predicted of them, and the files written."""
    console = make_console()
    console.print(f"{model.name} ({parameter_count(model)} parameters) on {cluster.name} ({cluster.size} accelerators)")
    console.print(stage_table(result.plan, cluster))
    print_prediction(result.strategy, result.plan, result.prediction, assumed, console)
    for reason in not_trained(result.plan, model, cluster):
        console.print(f"{reason}: this plan is a figure and cannot be run")
    if result.homogeneous_parts or not result.out_of_time:
        print_alone(result.homogeneous_parts, console)
    else:
        console.print(
            "not compared with the device types alone: time was up before each was planned; `predict --bounds` does it"
        )
    print_explanation(result, console)
    if result.space_bound_seconds is not None:
        console.print(
            f"proved: but for what is not searched (--explain lists it) and for more microbatches in flight, no plan takes less than "
            f"{result.space_bound_seconds:.4g} s"
        )
    console.print(f"searched {result.candidates} candidates in {result.search_seconds:.2f} s")
    _print_written(written, console)


TRAINS_ON = ("nvidia", "amd", "cpu")


def not_trained(plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> list[str]:
    """Why the plan cannot be trained, though it can be predicted: makers that hethub does not run on, and its model."""
    found = []
    strange, idle = (makers_not_started(cluster, ranks) for ranks in (plan.ranks, plan.unused))
    if strange:
        found.append(f"hethub trains on {', '.join(TRAINS_ON)} alone, not on {', '.join(strange)}")
    if started := [maker for maker in idle if maker not in strange]:
        found.append(
            f"hethub starts unused ranks too, and none on {', '.join(started)} (leave these nodes out of the cluster file)"
        )
    other = model.family if model.family != TRAINED else "gated: false"
    return found + ([] if model.is_trained else [f"hethub trains family {TRAINED} alone, not {other}"])


def makers_not_started(cluster: ClusterSpec, ranks: Iterable[int]) -> list[str]:
    """The makers among the accelerators of `ranks` on which no rank can be started; none where they are emulated."""
    makers = {cluster.places[rank].node.device.vendor for rank in ranks}
    return [] if cluster.emulated else sorted(makers - {*TRAINS_ON})


def print_predicted(
    strategy: str,
    plan: PlanSpec,
    prediction: Prediction,
    alone: "Sequence[HomogeneousPart] | None",
    assumed: Sequence[str],
    written: Sequence[Path],
    short: str | None,
) -> None:
    """What `hethub predict` says of a plan; every device type alone where that was asked for."""
    console = make_console()
    print_prediction(strategy, plan, prediction, assumed, console, short)
    if alone is not None:
        print_alone(alone, console)
    _print_written(written, console)


def _print_written(paths: Sequence[Path], console: Console) -> None:
    if paths:
        console.print(f"written to {', '.join(map(str, paths))}")


def parameter_count(model: ModelSpec) -> str:
    """140.9 B, or 2.98 M where it is less than a billion."""
    number = model.parameters
    return f"{number / 1e9:.4g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


STAGE_COLUMNS = ("stage", "layers", "replicas", "ranks", "accelerator", "micro batch", "samples", "ZeRO", "recompute")
_SETTINGS = (5, 6, 7, 8)  # of them, what stages may have alike


def stage_table(plan: PlanSpec, cluster: ClusterSpec) -> Table:
    """One row per run of equal replicas; of several stages, what is the same in all stands below once."""
    rows = stage_rows(plan, cluster)
    values = [{row[index] for row in rows} - {""} for index in range(len(STAGE_COLUMNS))]
    same = [index for index in _SETTINGS if len(rows) > 1 and len(values[index]) == 1]
    shown = [index for index in range(len(STAGE_COLUMNS)) if index not in same]
    table = make_table(*(STAGE_COLUMNS[index].replace(" ", "\n") for index in shown))
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    alike = ", ".join(f"{STAGE_COLUMNS[index]} {min(values[index])}" for index in same)
    table.caption, table.caption_justify = f"in every stage: {alike}" if alike else None, "left"
    return table


def stage_rows(plan: PlanSpec, cluster: ClusterSpec) -> list[list[str]]:
    """The cells of STAGE_COLUMNS, a row per run of equal replicas; samples are each replica's. What is unused comes
    last, a row per accelerator."""
    rows = []
    for index, stage in enumerate(plan.stages):
        ends = ["", "", "", ""]
        whole = [str(index), stage.layers_text, str(stage.zero), stage.recompute]
        alike = groupby(stage.replicas, key=lambda r: (r.tp, r.micro_batch, r.samples, _accelerator(r, cluster)))
        for position, ((tp, micro_batch, samples, name), group) in enumerate(alike):
            replicas = list(group)
            ranks = show_ranks([rank for replica in replicas for rank in replica.ranks])
            first, last = (whole[:2], whole[2:]) if position == 0 else (ends[:2], ends[2:])
            rows.append([*first, f"{len(replicas)} x TP {tp}", ranks, name, str(micro_batch), str(samples), *last])
    for name, left in groupby(plan.unused, key=lambda rank: cluster.places[rank].accelerator.name):
        rows.append(["", "", "unused", show_ranks(list(left)), name, "", "", "", ""])
    return rows


def _accelerator(replica: ReplicaSpec, cluster: ClusterSpec) -> str:
    return cluster.places[replica.ranks[0]].accelerator.name


def print_prediction(
    strategy: str,
    plan: PlanSpec,
    prediction: Prediction,
    assumed: Sequence[str],
    console: Console,
    short: str | None = None,
) -> None:
    """Step time with its parts and bounds, and the memory of every rank; `assumed`: accelerators of unknown speed,
    `short`: why the plan does not fit."""
    mfu = "" if prediction.mfu is None else f", MFU {prediction.mfu:.1f} %"
    console.print(
        f"{strategy}, schedule {plan.schedule}: predicted {show_step(prediction, assumed, ' a step')}, "
        f"{prediction.tokens_per_second:,.0f} tokens/s{mfu}"
    )
    bounds = [f"{prediction.percent_of_ceiling:.1f} % of the ceiling"]
    if prediction.percent_of_makers_alone is not None:
        bounds.insert(0, f"{prediction.percent_of_makers_alone:.1f} % of the device types alone")
    console.print(", ".join(bounds))
    console.print(f"of which {_parts(prediction)}")
    console.print(prediction.bottleneck)
    if assumed:
        console.print(f"{assumed_sentence(assumed)}; `hethub profile` measures it")
    if prediction.staging is not None:
        console.print(prediction.staging.sentence())
    for host in prediction.assumed_hosts:
        console.print(host.sentence())
    if prediction.extrapolated:
        console.print("the profile was asked beyond the sizes it measured: there the nearest ratio counts")
    console.print(memory_table(prediction))
    console.print(whether_it_fits(prediction, short))


def show_step(prediction: Prediction, assumed: Sequence[str], of: str = "") -> str:
    """`1.234 s (80 %: 1.1 to 1.4)`; without the interval, which would mean nothing, where a speed is assumed."""
    low, high = prediction.step_seconds_interval
    return f"{prediction.step_seconds:.4g} s{of}" + ("" if assumed else f" (80 %: {low:.4g} to {high:.4g})")


def whether_it_fits(prediction: Prediction, short: str | None = None) -> str:
    """What is `short`, if anything is, and what to do where that is close: published peaks are 11 % off their predictions
    in the mean."""
    if short is not None:
        return f"does not fit: {short}"
    fullest = max(prediction.memory, key=lambda entry: entry.bytes / entry.limit)
    free = 100 * (1 - fullest.bytes / fullest.limit)
    if free > CLOSE_PERCENT:
        return "fits"
    return (
        f"fits, by a prediction that leaves rank {fullest.rank} {free:.1f} % of its memory. Raise constraints.reserve (to 0.15, say) until "
        "a run or `hethub doctor --acceptance` has measured the peak."
    )


def assumed_sentence(assumed: Sequence[str]) -> str:
    """What is to be said beside every time that rests on accelerators of unknown speed."""
    return f"the speed of {', '.join(assumed)} is assumed, not measured: times may be several times off"


def _parts(prediction: Prediction) -> str:
    """The breakdown with percents; what is less than a millionth of the step counts as nothing."""
    step = prediction.step_seconds
    parts = ((name, seconds if seconds > 1e-6 * step else 0.0) for name, seconds in prediction.breakdown.items())
    return ", ".join(f"{name} {seconds:.4g} s ({100 * seconds / step:.1f} %)" for name, seconds in parts)


def memory_table(prediction: Prediction) -> Table:
    """Peak memory by rank, part by part, and what lies in host memory; ranks that need the same, as it is
    shown, are one row."""
    table = make_table("ranks", "accelerator", "needs GiB", "of GiB", "which is", "in host memory")
    rows: dict[tuple[str, ...], list[int]] = {}
    for entry in prediction.memory:
        parts, host = _lines(entry.parts), _lines(entry.host_parts)
        shown = (entry.accelerator, show_gib(entry.bytes), show_gib(entry.limit), parts, host)
        rows.setdefault(shown, []).append(entry.rank)
    for row, ranks in rows.items():
        table.add_row(show_ranks(ranks), *row, end_section=True)
    return table


def _lines(parts: Mapping[str, int]) -> str:
    """A line for each part that takes anything, largest first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return "\n".join(f"{name} {size / GIB:.3g}" for name, size in ordered if size)


def print_findings(findings: Sequence[Any]) -> None:
    """What `hethub doctor` found, a line each, remedies below what is missing."""
    _print_lines([row for f in findings for row in ((f.state, f.what, f.found), ("", "", f.remedy)) if row[2]])


def print_ranks(examined: "RanksExamined") -> None:
    """What each rank has, under a launcher; ranks that have the same in one paragraph."""
    for ranks, lines in examined.paragraphs().items():
        make_console().print(ranks)
        _print_lines([("", what, found) for what, found in lines])


def _print_lines(rows: Sequence[tuple[str, str, str]]) -> None:
    """Sentences beside what they are about; on a terminal they go on below themselves."""
    console, indent = make_console(), " " * 24
    for state, what, text in rows:
        line = f"{state:8}{what:16}{text}"
        if not console.soft_wrap:
            line = textwrap.fill(line, console.width, subsequent_indent=indent, break_long_words=False)
        console.print(line, soft_wrap=True)


def print_accelerators(accelerators: Sequence[AcceleratorSpec]) -> None:
    """The catalogue: of every accelerator the figures that people choose by."""
    table = make_table(
        "name", "vendor", "GiB", "memory\nGB/s", "bf16\nTFLOP/s", "fp32\nTFLOP/s", "link\nGB/s", "figures"
    )
    for each in accelerators:
        figures = (each.memory_gb, each.memory_gbytes_per_second, each.bf16_tflops, each.fp32_tflops)
        shown = ["" if figure is None else f"{figure:g}" for figure in (*figures, each.link_gbytes_per_second)]
        table.add_row(each.name, each.vendor, *shown, each.source)
    table.columns[0].no_wrap = True  # a name is what people copy
    console = make_console()
    console.print(table)
    console.print(
        "peaks are dense; links are to the neighbours in a node, each direction; a name alone shows all figures"
    )


def print_accelerator(accelerator: AcceleratorSpec) -> None:
    """Every figure of one accelerator, as a cluster file would describe it in place."""
    console = make_console()
    for key, value in accelerator.to_dict().items():
        console.print(f"{key}: {value}")


def print_validation(result: Mapping[str, Any]) -> None:
    """Errors by group, and over all."""
    console = make_console()
    table = make_table("group", "rows", "mean %", "max %")
    for name, group in result["by"].items():
        table.add_row(name, *(_figure(group.get(key)) for key in ("rows", "mape", "max_error")))
    console.print(table)
    left_out = f"{len(result['skipped'])} skipped, {len(result['suspects'])} suspect"
    if counted := sum(group["rows"] for group in result["by"].values()):
        console.print(
            f"{counted} rows: MAPE {result['mape']:.1f} %, macro mean {result['macro_mape']:.1f} %, median "
            f"{result['median_error']:.1f} %, largest {result['max_error']:.1f} %; {left_out}"
        )
    else:
        console.print(f"no row counts: {left_out}")
    if memory := result.get("memory", {}).get("by"):
        means = ", ".join(f"{name} {group['mape']:.1f} % ({group['rows']})" for name, group in memory.items())
        console.print(f"peak memory, mean |error| (rows): {means}")
    for sentence in (
        *result.get("notes", []),
        *_chosen(result["rows"]),
        *_inferred(result["rows"]),
        *_skipped(result["skipped"]),
    ):
        console.print(sentence)
    for names in result.get("contradictory", []):
        console.print(
            f"rows {', '.join(names)} contradict each other: alike but for their times, which differ by more than a half"
        )
    if unseen := result.get("family_out"):
        console.print(FamilyOut(**unseen).sentence())
    if own := [goal for goal in result.get("goals", []) if goal["basis"] == THIS_TABLE]:
        _print_goals(own)  # those of the last fit are the same beside every table: docs/predictions.md has them


def _chosen(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was taken for rows that leave it open."""
    chosen = [(row["id"], row["chosen"]) for row in rows if "chosen" in row]
    taken = ", ".join(f"{name}: {open['micro_batch']} x {open['virtual_stages']}" for name, open in chosen)
    return [f"chosen micro-batch x virtual stages, where the table leaves them open: {taken}"] if chosen else []


def _inferred(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was taken for columns that rows leave open, as the makers of their machine and program would have set it."""
    counts = Counter((column, value) for row in rows for column, value in row.get("inferred", {}).items())
    taken = ", ".join(f"{column} {value} ({count} rows)" for (column, value), count in sorted(counts.items()))
    return [f"inferred, where the table leaves it open: {taken}"] if taken else []


def _skipped(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence for each reason, with the rows it holds for."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["why"], []).append(row["id"])
    more = [f" and {len(ids) - MOST_NAMES} more" if len(ids) > MOST_NAMES else "" for ids in names.values()]
    return [
        f"skipped {', '.join(ids[:MOST_NAMES])}{rest}: {why}"
        for (why, ids), rest in zip(names.items(), more, strict=True)
    ]


def _print_goals(goals: Sequence[Mapping[str, Any]]) -> None:
    """Each figure beside what is asked of it."""
    table = make_table("of this table", "value", "goal", "met")
    for goal in goals:
        digits = 1 if goal["unit"] else 2
        asked = " to ".join(f"{bound:g}" for bound in goal["bound"])
        asked = asked if goal["sense"] == "within" else f"{goal['sense']} {asked}"
        value = f"{goal['value']:.{digits}f} {goal['unit']}".rstrip()
        table.add_row(goal["what"], value, asked, "yes" if goal["met"] else "no")
    make_console().print(table)


def _figure(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.1f}"


def print_communication(rows: Sequence[Mapping[str, Any]], relays: Mapping[str, Any]) -> None:
    """What `hethub bench comm` timed, a row per operation, path and size, and the relays it went over."""
    table = make_table("operation", "path", "ranks", "bytes", "ms", "GB/s", "over\nbound", "bytes\nalone ms")
    table.columns[0].no_wrap = True
    legs = []
    for row in rows:
        bound, alone = row["bridge_bytes_over_bound"], row["bound_seconds"]
        table.add_row(
            row["operation"], row["path"], str(row["ranks"]), f"{row['bytes']:,}", f"{row['seconds'] * 1e3:.3f}",
            f"{row['bytes_per_second'] / 1e9:.2f}", "" if bound is None else f"{bound:.2f}",
            "" if alone is None else f"{alone * 1e3:.3f}",
        )  # fmt: skip
        if row["legs"]:
            parts = ", ".join(f"{leg} {seconds * 1e3:.2f}" for leg, seconds in row["legs"].items())
            legs.append(f"{row['operation']} of {row['bytes']:,} bytes, ms in each leg: {parts}")
    console = make_console()
    console.print(table)
    console.print(
        "path: world is the job's group (bridged where it spans islands), island one island's own library, flat one Gloo group; "
        "over bound: bytes over the bridge, over the least that must pass; bytes alone: what that least takes over the same relays, "
        "sent at once and whole (pieces that overlap may be faster)"
    )
    for line in legs:
        console.print(line)
    console.print(f"relays between ranks of one host: {_by_size(relays['near'])}; ranks by host: {relays['hosts']}")
    if len(relays["hosts"]) > 1:
        console.print(f"relays between ranks of two hosts: {_by_size(relays['far'])}")


def _by_size(thresholds: Sequence[Sequence[Any]]) -> str:
    """`gloo, from 4,194,304 bytes mpi`."""
    (_, first), *later = thresholds
    return ", ".join([first, *(f"from {start:,} bytes {name}" for start, name in later)])
