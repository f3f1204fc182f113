"""A program as people see it: by module, in a table."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from hethub.spec.base import Spec
from hethub.spec.cluster import NonNegative
from hethub.spec.program.plan_file import OperatorSpec, ProgramSpec


class ModuleRow(Spec):
    """What the operators of a module do in one direction."""

    module: str
    direction: Literal["forward", "backward"]
    cuts: tuple[str, ...]  # the axes, and `whole` for what every rank computes
    ratios: tuple[str, ...]  # of those axes
    collectives: dict[str, int]
    seconds: NonNegative  # computing, the slowest rank's
    collective_seconds: NonNegative
    bytes: int  # moved, of whole tensors


def module_rows(program: ProgramSpec) -> list[ModuleRow]:
    """The program by module and direction, in the order in which they run first."""
    groups: dict[tuple[str, str], list[OperatorSpec]] = {}
    for operator in program.operators:
        groups.setdefault((operator.module, operator.direction), []).append(operator)
    return [_row(program, own) for own in groups.values()]


def _row(program: ProgramSpec, operators: Sequence[OperatorSpec]) -> ModuleRow:
    axes = dict.fromkeys(operator.axis for operator in operators if operator.seconds)
    kinds = [kind for operator in operators for kind in operator.collectives]
    return ModuleRow(
        module=operators[0].module,
        direction=operators[0].direction,
        cuts=tuple(axis or "whole" for axis in axes),
        ratios=tuple(show_ratios(program.ratios[axis]) for axis in axes if axis),
        collectives={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        seconds=sum(operator.seconds for operator in operators),
        collective_seconds=sum(operator.collective_seconds for operator in operators),
        bytes=sum(operator.bytes for operator in operators),
    )


def show_ratios(parts: Sequence[float]) -> str:
    """`0.4 : 0.4 : 0.2`, equal neighbours counted where there are many ranks: `16 x 0.031 : 48 x 0.0105`."""
    shown = [f"{part:.3g}" for part in parts]
    if len(parts) > 8:
        runs = [(text, len(list(same))) for text, same in groupby(shown)]
        shown = [f"{count} x {text}" if count > 1 else text for text, count in runs]
    return " : ".join(shown)


def program_table(program: ProgramSpec) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table that people see: per module how it is cut, what it communicates, seconds and bytes."""
    head = ["module", "pass", "cut by", "ratios", "collectives", "computing ms", "communicating ms", "MB moved"]
    rows: list[list[str]] = []
    for row in module_rows(program):
        told = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items())
        rows.append(
            [
                row.module or "(the model itself)", row.direction, ", ".join(row.cuts), "; ".join(row.ratios), told,
                f"{row.seconds * 1e3:.3f}", f"{row.collective_seconds * 1e3:.3f}", f"{row.bytes / 1e6:.3f}",
            ]
        )  # fmt: skip
    return head, rows


def program_notes(program: ProgramSpec) -> list[str]:
    """What is to be said beside the table."""
    notes = [
        f"{key} (first in '{module}') has no rule; every rank computes it whole."
        for key, module in program.computed_whole_without_a_rule.items()
    ]
    proof = "proved least for these ratios" if program.proved_optimal else "the best found in the time given"
    optimizer = f", {program.optimizer_seconds * 1e3:.3f} ms of it the optimizer" if program.optimizer_seconds else ""
    beside = (
        "Not in it: launches of the optimizer, the ranks' exchange of loss and norm behind every step, and on CPU ranks the "
        "cores that collectives' own threads take."
    )
    return [*notes, f"{program.predicted_seconds * 1e3:.3f} ms a step{optimizer}, {proof}.", beside]


def modules_json(program: ProgramSpec) -> list[dict[str, Any]]:
    """`module_rows` as JSON-able data."""
    return [row.model_dump(mode="json") for row in module_rows(program)]
