"""Why a plan and not another: runners-up, what each named system would have chosen, every device type alone, what binds,
what was not searched."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hethub.runtime.console import make_table
from hethub.spec.documents import write_yaml
from hethub.spec.plan import PlannedFor, PlanSpec, StageSpec, save_plan

if TYPE_CHECKING:
    from hethub.planner import HomogeneousPart, PlanResult

MOST_KINDS = 4  # of stages, shown of a runner-up


def print_explanation(result: "PlanResult", console: Console) -> None:
    """The planner's notes, as far as it was asked for them."""
    if result.out_of_time:
        console.print("the time limit ended the search: this is the best plan found so far")
    for what, stages in _offloaded(result.plan).items():
        console.print(
            f"{what} in host memory: {'every stage' if len(stages) == len(result.plan.stages) else f'stages {stages}'}"
        )
    outlook, other = result.outlook, result.best_on_point
    console.print(
        "over 16 scenarios (links at 60 to 100 % of their rate, each device type faster or slower beside the others, another "
        f"cost of overlap) a step takes {outlook.objective_seconds:.4g} s in the mean, by which plans are chosen, and "
        f"{outlook.p10_seconds:.4g} to {outlook.p90_seconds:.4g} s in eight of ten; with all links at 60 % "
        f"{outlook.links_at_60_percent_seconds:.4g} s"
    )
    if other is not None and f"{other.step_seconds:.4g}" != f"{result.prediction.step_seconds:.4g}":
        mean = "" if other.objective_seconds is None else f", {other.objective_seconds:.4g} s in the mean"
        console.print(f"the shortest step as predicted: {other.step_seconds:.4g} s{mean}: {shape(other.plan)}")
    if result.runners_up:
        console.print(_runners_up(result))
    if result.families:
        console.print(_families(result))
    for reason in result.reasons:
        console.print(reason.sentence())
    if result.families:
        console.print("not searched:")
        for entry in result.not_searched:
            console.print(f"- {entry.text}")


def print_alone(alone: Sequence["HomogeneousPart"], console: Console) -> None:
    """A line for every device type, with its part of the batch, its throughput and its plan."""
    for each in alone:
        lifted = ", its memory limit lifted since it cannot hold the model" if each.memory_lifted else ""
        console.print(
            f"alone: {each.count} x {each.accelerator} ({each.island}), {each.global_batch} samples: "
            f"{each.tokens_per_second:,.0f} tokens/s{lifted}, {each.plan.schedule}, {shape(each.plan)}"
        )
    if not alone:
        console.print(
            "not compared with the device types alone: one device type alone has no plan, for want of a sample or of accelerators for "
            "the constraints"
        )


def save_alone(alone: Sequence["HomogeneousPart"], job: PlannedFor, folder: Path) -> list[Path]:
    """Writes a folder per device type; `hethub report` and `diff` read its plan.yaml, cluster.yaml and model.yaml. `job`:
    what the whole plan is for."""
    written = []
    for index, each in enumerate(alone):
        own = folder / f"{index}-{each.accelerator.replace('/', '-')}-{each.island}"
        own.mkdir(parents=True, exist_ok=True)
        save_plan(each.plan, own / "plan.yaml", job.replace(cluster=each.cluster))
        write_yaml(each.cluster.to_dict(), own / "cluster.yaml")
        write_yaml(job.model.to_dict(), own / "model.yaml")
        written.append(own)
    return written


def _offloaded(plan: PlanSpec) -> dict[str, list[int]]:
    """Return for each thing that is offloaded the stages that offload it."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for what in stage.offload:
            found.setdefault(what, []).append(index)
    return found


def _runners_up(result: "PlanResult") -> Table:
    unlike = {(own.plan.schedule, shape(own.plan)): own for own in reversed(result.runners_up)}  # the fastest of each
    compared = any(own.objective_seconds for own in unlike.values())
    mean_column = ["mean s"] if compared else []
    table = make_table("runner-up", "schedule", "stages", "step s", "slower %", *mean_column, "within the plan's 80 %")
    for (schedule, stages), own in reversed(unlike.items()):
        mean = f"{own.objective_seconds:.4g}" if own.objective_seconds else "not compared"  # not likely to be the least
        table.add_row(
            str(table.row_count + 1), schedule, stages, f"{own.step_seconds:.4g}", f"{own.slower_percent:.1f}",
            *([mean] if compared else []), "yes" if own.within_interval else "no",
        )  # fmt: skip
    return table


def shape(plan: PlanSpec) -> str:
    """A plan in a line: of its stages the layers, replicas by TP degree, ZeRO and recompute, equal ones counted."""
    kinds = [
        f"{stage.num_layers} layer{'s' * (stage.num_layers > 1)} on {_replicas(stage)}, "
        f"ZeRO {stage.zero}, recompute {stage.recompute}"
        for stage in plan.stages
    ]
    runs = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    shown = [f"{count} x ({kind})" if count > 1 else kind for kind, count in runs[:MOST_KINDS]]
    more = len(runs) - MOST_KINDS
    return " | ".join(shown) + (f" | {more} more" if more > 0 else "")


def _replicas(stage: StageSpec) -> str:
    """8 x TP 4 of micro-batch 2, in the order of the replicas."""
    kinds = [f"TP {replica.tp} of micro-batch {replica.micro_batch}" for replica in stage.replicas]
    return " and ".join(f"{len(list(same))} x {kind}" for kind, same in groupby(kinds))


def _families(result: "PlanResult") -> Table:
    table = make_table("system", "step s", "slower than this plan %")
    for row in result.families:
        fits = row.step_seconds is not None
        table.add_row(row.strategy, f"{row.step_seconds:.4g}" if fits else "no plan that fits",
                      f"{row.slower_percent:.1f}" if fits else "")  # fmt: skip
    return table
