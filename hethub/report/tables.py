"""Plans and predictions as tables on the terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hethub.predictor import Prediction
from hethub.report.alone import print_alone
from hethub.report.explanation import print_explanation
from hethub.runtime.console import make_console
from hethub.spec.cluster import ClusterSpec
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec

if TYPE_CHECKING:  # the planner's search takes a while to load, and most tables are not its
    from hethub.planner import HomogeneousPart, PlanDiff, PlanResult
    from hethub.runtime.doctor.ranks import RanksExamined

GIB = 2**30
MOST_NAMES = 10  # of rows skipped for one reason


def print_plan(result: "PlanResult", model: ModelSpec, cluster: ClusterSpec, written: Sequence[Path]) -> None:
    """The planner's result: its stages, then what is predicted of them, and the files written."""
    console = make_console()
    console.print(f"{model.name} ({parameter_count(model)} parameters) on {cluster.name} ({cluster.size} accelerators)")
    console.print(stage_table(result.plan, cluster))
    print_prediction(result.strategy, result.plan, result.prediction, console)
    print_alone(result.homogeneous_parts, console)
    print_explanation(result, console)
    if result.space_bound_seconds is not None:
        console.print(
            f"proved: but for what is not searched and for more microbatches in flight, no plan takes less than "
            f"{result.space_bound_seconds:.4g} s"
        )
    console.print(f"searched {result.candidates} candidates in {result.search_seconds:.2f} s")
    _print_written(written, console)


def print_predicted(
    strategy: str,
    plan: PlanSpec,
    prediction: Prediction,
    alone: "Sequence[HomogeneousPart] | None",
    written: Sequence[Path],
) -> None:
    """What `hethub predict` says of a plan; the parts of the upper bound where they were asked for."""
    console = make_console()
    print_prediction(strategy, plan, prediction, console)
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


STAGE_COLUMNS = ("stage", "layers", "replicas", "ranks", "accelerator", "micro-batch", "samples", "ZeRO", "recompute")


def stage_table(plan: PlanSpec, cluster: ClusterSpec) -> Table:
    """One row per run of equal replicas."""
    table = Table(*STAGE_COLUMNS)
    for row in stage_rows(plan, cluster):
        table.add_row(*row)
    return table


def stage_rows(plan: PlanSpec, cluster: ClusterSpec) -> list[list[str]]:
    """The cells of STAGE_COLUMNS, a row per run of equal replicas; samples are each replica's."""
    rows = []
    for index, stage in enumerate(plan.stages):
        layers = ", ".join(f"[{start}, {stop})" for start, stop in stage.layers)
        ends = ["", "", "", ""]
        whole = [str(index), layers, str(stage.zero), stage.recompute]
        alike = groupby(stage.replicas, key=lambda r: (r.tp, r.micro_batch, r.samples, _accelerator(r, cluster)))
        for position, ((tp, micro_batch, samples, name), group) in enumerate(alike):
            replicas = list(group)
            ranks = compact(tuple(rank for replica in replicas for rank in replica.ranks))
            first, last = (whole[:2], whole[2:]) if position == 0 else (ends[:2], ends[2:])
            rows.append([*first, f"{len(replicas)} x TP {tp}", ranks, name, str(micro_batch), str(samples), *last])
    return rows


def _accelerator(replica: ReplicaSpec, cluster: ClusterSpec) -> str:
    return cluster.places[replica.ranks[0]].accelerator.name


def compact(ranks: tuple[int, ...]) -> str:
    """0, 1, 2, 3 as 0-3."""
    consecutive = all(b == a + 1 for a, b in pairwise(ranks))
    return f"{ranks[0]}-{ranks[-1]}" if consecutive and len(ranks) > 2 else ", ".join(map(str, ranks))


def print_prediction(strategy: str, plan: PlanSpec, prediction: Prediction, console: Console) -> None:
    """Step time with its parts and bounds, and the memory of every rank."""
    low, high = prediction.step_seconds_interval
    console.print(
        f"{strategy}, schedule {plan.schedule}: predicted {prediction.step_seconds:.4g} s a step (80 %: {low:.4g} to {high:.4g}), "
        f"{prediction.tokens_per_second:,.0f} tokens/s, MFU {prediction.mfu:.1f} %"
    )
    bounds = [f"{prediction.percent_of_ceiling:.1f} % of the ceiling"]
    if prediction.percent_of_upper_bound is not None:
        bounds.insert(0, f"{prediction.percent_of_upper_bound:.1f} % of the upper bound")
    console.print(", ".join(bounds))
    console.print(f"of which {_parts(prediction)}")
    console.print(prediction.bottleneck)
    if prediction.staging is not None:
        console.print(prediction.staging.sentence())
    if prediction.extrapolated:
        console.print("the profile was asked beyond the sizes it measured: there the nearest ratio counts")
    console.print(memory_table(prediction))
    console.print("fits" if prediction.fits else "does not fit: a rank needs more than its accelerator has")


def _parts(prediction: Prediction) -> str:
    """The breakdown with percents; what is less than a millionth of the step counts as nothing."""
    step = prediction.step_seconds
    parts = ((name, seconds if seconds > 1e-6 * step else 0.0) for name, seconds in prediction.breakdown.items())
    return ", ".join(f"{name} {seconds:.4g} s ({100 * seconds / step:.1f} %)" for name, seconds in parts)


def memory_table(prediction: Prediction) -> Table:
    """Peak memory by rank; ranks that need the same are one row."""
    table = Table("ranks", "accelerator", "needs GiB", "of GiB", "largest part")
    rows: dict[tuple[str, int, int, str], list[int]] = {}
    for entry in prediction.memory:
        largest = max(entry.parts, key=lambda part: entry.parts[part])
        rows.setdefault((entry.accelerator, entry.bytes, entry.limit, largest), []).append(entry.rank)
    for (accelerator, needed, limit, largest), ranks in rows.items():
        table.add_row(compact(tuple(ranks)), accelerator, f"{needed / GIB:.2f}", f"{limit / GIB:.2f}", largest)
    return table


def print_findings(findings: Sequence[Any]) -> None:
    """What `hethub doctor` found, a line each, remedies below what is missing."""
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(f"{finding.state:8}{finding.what:16}{finding.found}", markup=False)
        if finding.remedy:
            console.print(f"{'':24}{finding.remedy}", markup=False)


def print_ranks(examined: "RanksExamined") -> None:
    """What each rank has, under a launcher; ranks that have the same in one paragraph."""
    console = Console(highlight=False, soft_wrap=True)
    for ranks, lines in examined.paragraphs().items():
        console.print(ranks, markup=False)
        for what, found in lines:
            console.print(f"{'':8}{what:16}{found}", markup=False)


def print_diff(result: "PlanDiff") -> None:
    """What differs between two plans, and the seconds that it costs."""
    console = make_console()
    table = Table("key", "first", "second")
    for difference in result.differences:
        table.add_row(difference.key, difference.first or "", difference.second or "")
    console.print(table if result.differences else "the plans are equal")
    first, second = result.first.step_seconds, result.second.step_seconds
    slower = result.slower_percent
    console.print(
        f"step {first:.4g} s and {second:.4g} s: the second is {abs(slower):.1f} % {'slower' if slower > 0 else 'faster'}"
    )
    parts = ", ".join(f"{part} {seconds:+.4g} s" for part, seconds in result.parts().items() if seconds)
    if parts:
        console.print(f"of which {parts}")


def print_validation(result: Mapping[str, Any]) -> None:
    """Errors by group, and over all."""
    console = make_console()
    table = Table("group", "rows", "mean %", "max %")
    for name, group in result["by"].items():
        table.add_row(name, *(_figure(group.get(key)) for key in ("rows", "mape", "max_error")))
    console.print(table)
    console.print(
        f"{len(result['rows'])} rows: MAPE {result['mape']:.1f} %, macro mean {result['macro_mape']:.1f} %, median "
        f"{result['median_error']:.1f} %, largest {result['max_error']:.1f} %; {len(result['skipped'])} skipped"
    )
    if memory := result.get("memory", {}).get("by"):
        means = ", ".join(f"{name} {group['mape']:.1f} % ({group['rows']})" for name, group in memory.items())
        console.print(f"peak memory, mean |error| (rows): {means}")
    for sentence in (*_chosen(result["rows"]), *_corrected(result["rows"]), *_skipped(result["skipped"])):
        console.print(sentence)
    if result.get("goals"):
        _print_goals(result["goals"])


def _chosen(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was taken for rows that leave it open."""
    chosen = [(row["id"], row["chosen"]) for row in rows if "chosen" in row]
    taken = ", ".join(f"{name}: {open['micro_batch']} x {open['virtual_stages']}" for name, open in chosen)
    return [f"chosen micro-batch x virtual stages, where the table leaves them open: {taken}"] if chosen else []


def _corrected(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was taken for rows whose source is known to have run another precision than the table names."""
    counts = Counter(row["computed_in"] for row in rows if "computed_in" in row)
    return [
        f"{count} rows predicted in {ran}, as their source ran them; the table names another"
        for ran, count in counts.items()
    ]


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
    """Each figure beside what is asked of it, and on which rows it was taken."""
    table = Table("figure", "value", "asked", "met", "taken on")
    for goal in goals:
        digits = 1 if goal["unit"] else 2
        asked = " to ".join(f"{bound:g}" for bound in goal["bound"])
        asked = asked if goal["sense"] == "within" else f"{goal['sense']} {asked}"
        value = f"{goal['value']:.{digits}f} {goal['unit']}".rstrip()
        table.add_row(goal["what"], value, asked, "yes" if goal["met"] else "no", goal["basis"])
    make_console().print(table)


def _figure(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.1f}"


def print_communication(rows: Sequence[Mapping[str, Any]], relays: Mapping[str, Any]) -> None:
    """What `hethub bench comm` timed, a row per operation, path and size, and the relays it went over."""
    table = Table(
        "operation", "path", "ranks", "bytes", "ms", "GB/s", "bridge bytes / lower bound", "bridge alone, ms", "share of it",
        "ms in each leg",
    )  # fmt: skip
    for row in rows:
        bound, alone = row["bridge_bytes_over_bound"], row["bound_seconds"]
        table.add_row(
            row["operation"], row["path"], str(row["ranks"]), f"{row['bytes']:,}", f"{row['seconds'] * 1e3:.3f}",
            f"{row['bytes_per_second'] / 1e9:.2f}", "" if bound is None else f"{bound:.2f}",
            "" if alone is None else f"{alone * 1e3:.3f}", "" if alone is None else f"{alone / row['seconds']:.2f}",
            ", ".join(f"{leg} {seconds * 1e3:.2f}" for leg, seconds in row["legs"].items()),
        )  # fmt: skip
    console = make_console()
    console.print(table)
    console.print(f"relays between ranks of one host: {_by_size(relays['near'])}; ranks by host: {relays['hosts']}")
    if len(relays["hosts"]) > 1:
        console.print(f"relays between ranks of two hosts: {_by_size(relays['far'])}")


def _by_size(thresholds: Sequence[Sequence[Any]]) -> str:
    """`gloo, from 4,194,304 bytes mpi`."""
    (_, first), *later = thresholds
    return ", ".join([first, *(f"from {start:,} bytes {name}" for start, name in later)])
