"""A plan of HAP as a file: which rule every operator of a traced model follows, in which ratios, and what that costs."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hethub.spec.accelerator import Precision
from hethub.spec.base import Spec, dump_yaml, load, read_yaml
from hethub.spec.cluster import NonNegative
from hethub.spec.errors import BadInput
from hethub.spec.model import Count

Atoms = Annotated[int, Field(ge=0)]


class AxisSpec(Spec):
    """Dimensions that are cut alike, and how many of its atoms (samples, heads, …) each rank gets."""

    name: str
    shares: tuple[Atoms, ...]


class OperatorSpec(Spec):
    """One operator: its rule by number and in words, and what its outputs are moved by."""

    operator: str
    module: str
    direction: Literal["forward", "backward"] = Field(alias="pass")
    number: Annotated[int, Field(ge=0)]  # of its rule
    rule: str
    axis: str | None = None  # None: computed whole on every rank
    seconds: NonNegative
    collectives: tuple[str, ...] = ()
    collective_seconds: NonNegative = 0.0
    bytes: Annotated[int, Field(ge=0)] = 0


class ProgramSpec(Spec):
    """A program as `Program.to_yaml()` writes it."""

    ranks: Count
    predicted_seconds: NonNegative
    optimizer_seconds: NonNegative = 0.0  # contained in them
    memory_bytes: tuple[int, ...]
    proved_optimal: bool
    rounds: int
    fingerprint: str  # of the traced model: a program fits no other
    ratios: dict[str, tuple[float, ...]]  # of the axes that it cuts
    axes: tuple[AxisSpec, ...]
    parameters: dict[str, str]  # the state in which each is kept
    moves: tuple[tuple[int, str, str, str | None], ...]  # tensor, from, to, collective
    computed_whole_without_a_rule: dict[str, str] = {}  # noqa: RUF012
    operators: tuple[OperatorSpec, ...]


class ProgramPlanSpec(Spec):
    """A plan file of strategy `hap`: a program and what it was made for."""

    strategy: Literal["hap"]
    model: str
    cluster: str
    global_batch: Count
    seq_len: Count
    precision: Precision
    program: ProgramSpec


def is_program_plan(path: Path) -> bool:
    """Whether the file at `path` is a plan of HAP's; False where there is none that can be read."""
    try:
        data, _ = read_yaml(path, "plan file")
    except BadInput:
        return False
    return isinstance(data, dict) and data.get("strategy") == "hap"


def load_program_plan(path: Path) -> ProgramPlanSpec:
    """The plan in a YAML file. Raises BadInput."""
    return load(ProgramPlanSpec, path, "plan file of strategy hap")


def save_program_plan(plan: ProgramPlanSpec, path: Path) -> None:
    path.write_text(dump_yaml(plan.model_dump(mode="json", by_alias=True)), encoding="utf-8")


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
    return [*notes, f"{program.predicted_seconds * 1e3:.3f} ms a step{optimizer}, {proof}."]


def modules_json(program: ProgramSpec) -> list[dict[str, Any]]:
    """`module_rows` as JSON-able data."""
    return [row.model_dump(mode="json") for row in module_rows(program)]
