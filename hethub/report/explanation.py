"""Why a plan and not another: runners-up, what each named system would have chosen, what binds, what was not
searched."""

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hethub.spec.plan import PlanSpec, StageSpec

if TYPE_CHECKING:
    from hethub.planner import PlanResult

MOST_KINDS = 4  # of stages, shown of a runner-up


def print_explanation(result: "PlanResult", console: Console) -> None:
    """The planner's notes, as far as it was asked for them."""
    if result.out_of_time:
        console.print("the time limit ended the search: this is the best plan found so far")
    for what, stages in _offloaded(result.plan).items():
        console.print(
            f"{what} in host memory: {'every stage' if len(stages) == len(result.plan.stages) else f'stages {stages}'}"
        )
    if result.runners_up:
        console.print(_runners_up(result))
    if result.families:
        console.print(_families(result))
    for reason in result.reasons:
        console.print(reason.sentence())
    if result.worst_step_seconds is not None:
        console.print(f"at worst {result.worst_step_seconds:.4g} s a step over links 20 % slower and compute 10 % off")
    if result.families:
        console.print(f"not searched: {'; '.join(entry.text for entry in result.not_searched)}")


def _offloaded(plan: PlanSpec) -> dict[str, list[int]]:
    """By what is offloaded, the stages whose it is."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for what in stage.offload:
            found.setdefault(what, []).append(index)
    return found


def _runners_up(result: "PlanResult") -> Table:
    table = Table("runner-up", "schedule", "stages", "step s", "slower %", "within the interval")
    for index, runner in enumerate(result.runners_up):
        table.add_row(
            str(index + 1), runner.plan.schedule, shape(runner.plan), f"{runner.step_seconds:.4g}", f"{runner.slower_percent:.1f}",
            "yes" if runner.within_interval else "no",
        )  # fmt: skip
    return table


def shape(plan: PlanSpec) -> str:
    """A plan in a line: of its stages the layers, replicas by TP degree, ZeRO and recompute, equal ones counted."""
    kinds = [
        f"{stage.num_layers} layers on {_replicas(stage)}, ZeRO {stage.zero}, recompute {stage.recompute}"
        for stage in plan.stages
    ]
    runs = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    shown = [f"{count} x ({kind})" if count > 1 else kind for kind, count in runs[:MOST_KINDS]]
    return " | ".join(shown) + (f" | {len(runs) - MOST_KINDS} more kinds" if len(runs) > MOST_KINDS else "")


def _replicas(stage: StageSpec) -> str:
    """8 x TP 4 of micro-batch 2, in the order of the replicas."""
    kinds = [f"TP {replica.tp} of micro-batch {replica.micro_batch}" for replica in stage.replicas]
    return " and ".join(f"{len(list(same))} x {kind}" for kind, same in groupby(kinds))


def _families(result: "PlanResult") -> Table:
    table = Table("system", "step s", "slower than this plan %")
    for row in result.families:
        fits = row.step_seconds is not None
        table.add_row(row.strategy, f"{row.step_seconds:.4g}" if fits else "no plan that fits",
                      f"{row.slower_percent:.1f}" if fits else "")  # fmt: skip
    return table
