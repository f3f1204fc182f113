"""A program: which rule each operator follows and how each parameter is kept; what that moves and what it holds."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from hethub.spec.documents import dump_yaml
from hethub.spec.program import AxisSpec, OperatorSpec, ProgramSpec, program_notes, program_table
from hethub.synthesis.costs import VIEWS, Collective, Costs
from hethub.synthesis.graph import Graph, Operator
from hethub.synthesis.rules import PARTIAL, WHOLE, Cut, Rule, Rules, State, read_state
from hethub.synthesis.table import RESHAPES, short

Shares = tuple[tuple[int, ...], ...]  # per axis, the atoms of each rank
TRAINING_COPIES = 3  # of a parameter: itself and two moments; its gradient is one of the graph's tensors


class Move(NamedTuple):
    """A tensor brought from one state into another; no collective where every rank has what it needs."""

    tensor: int
    source: State
    target: State
    collective: Collective | None


class Model(NamedTuple):
    """What programs are about: the traced step, its rules, and what everything costs."""

    graph: Graph
    rules: Rules
    costs: Costs


def fractions(model: Model, shares: Shares, tensor: int, state: State) -> np.ndarray:
    """Which part of a tensor each rank holds in `state`."""
    if not isinstance(state, Cut):
        return np.ones(model.costs.size)
    own = np.array(shares[model.rules.axis(tensor, state)], dtype=float)
    return own / own.sum()


def rule_seconds(model: Model, shares: Shares, number: int, rule: Rule) -> float:
    """Seconds of an operator under a rule: the slowest rank's."""
    start, rest = model.costs.operator(model.graph, model.graph.operators[number])
    axis = model.rules.axis_of(number, rule)
    if axis is None:
        return float((start + rest).max())
    part = np.array(shares[axis], dtype=float) / sum(shares[axis])
    return float(np.where(part > 0, start + rest * part, 0.0).max())


def update_seconds(model: Model, shares: Shares, tensor: int, state: State) -> float:
    """Seconds of the optimizer's update of a parameter kept in `state`: the slowest rank's."""
    whole = model.costs.update(model.graph.tensors[tensor])
    return float((whole * fractions(model, shares, tensor, state)).max())


def move_cost(
    model: Model, shares: Shares, tensor: int, source: State, target: State
) -> tuple[float, Collective | None]:
    """Seconds and the best collective of bringing a tensor from one state into another."""
    if source in (target, WHOLE):
        return 0.0, None
    size = model.graph.tensors[tensor].num_bytes
    costs = model.costs

    def seconds(kind: Collective, state: State) -> tuple[float, Collective]:
        return costs.collective(kind, size, fractions(model, shares, tensor, state).tolist()), kind

    if source == PARTIAL:
        return seconds("all-reduce", WHOLE) if target == WHOLE else seconds("reduce-scatter", target)
    if target == WHOLE:
        return min(seconds("all-gather", source), seconds("padded all-gather", source))
    if target == PARTIAL:
        return 0.0, None  # every rank puts its piece among zeros
    if not is_all_to_all(source, target):
        return float("inf"), None
    either = [fractions(model, shares, tensor, state) for state in (source, target)]
    return costs.collective("all-to-all", size, [float(f) for f in np.maximum(*either)]), "all-to-all"


def is_all_to_all(source: State, target: State) -> bool:
    """Whether pieces of one cut can be exchanged for pieces of the other: they are cut along unlike dimensions."""
    return isinstance(source, Cut) and isinstance(target, Cut) and source.dim != target.dim


def moves_to(
    model: Model, shares: Shares, tensor: int, source: State, targets: Sequence[State]
) -> tuple[float, list[Move]]:
    """The cheapest moves that bring a tensor from the state it is made in into all of `targets`."""

    def direct(to: Sequence[State]) -> tuple[float, list[Move]]:
        priced = [(move_cost(model, shares, tensor, source, target), target) for target in to if target != source]
        return sum(cost for (cost, _), _ in priced), [Move(tensor, source, to, kind) for (_, kind), to in priced]

    others = [target for target in targets if target != WHOLE]
    through, gathered = direct([WHOLE])
    if source == WHOLE or WHOLE in targets:
        return through, gathered + [Move(tensor, WHOLE, to, None) for to in others if to != source]
    alone, moves = direct(others)
    if alone <= through:
        return alone, moves
    return through, gathered + [Move(tensor, WHOLE, to, None) for to in others if to != source]


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a step runs on a cluster: plain data, which every rank lowers to its own part.

    `rules` has each operator's rule by number in the list of `Rules.of`, `kept` each parameter's state.
    """

    size: int
    rules: tuple[int, ...]
    kept: dict[str, State]
    moves: tuple[Move, ...]  # in the order in which a tensor's own come after each other
    shares: Shares
    axis_names: tuple[str, ...]
    fingerprint: str  # of the traced graph
    predicted_seconds: float
    optimizer_seconds: float  # contained in them
    memory_bytes: tuple[int, ...]
    is_optimal: bool  # proved least under the cost, to the search's gap, for these shares
    rounds: int
    unknown: dict[str, str] = field(default_factory=dict)  # operators computed whole for want of a rule: first module
    table: tuple[dict[str, Any], ...] = ()

    @property
    def digest(self) -> int:
        """A number that two programs share only if they do the same."""
        told = repr((self.rules, sorted(self.kept.items()), self.moves, self.shares, self.fingerprint))
        return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")

    @property
    def ratios(self) -> dict[str, tuple[float, ...]]:
        """The ranks' fractions of every axis that the program cuts."""
        used = {row["axis"] for row in self.table if row["axis"]}
        pairs = zip(self.axis_names, self.shares, strict=True)
        return {name: tuple(n / sum(own) for n in own) for name, own in pairs if name in used}

    def to_spec(self) -> ProgramSpec:
        """The program as files have it."""
        return ProgramSpec(
            ranks=self.size,
            predicted_seconds=self.predicted_seconds,
            optimizer_seconds=self.optimizer_seconds,
            memory_bytes=self.memory_bytes,
            proved_optimal=self.is_optimal,
            rounds=self.rounds,
            fingerprint=self.fingerprint,
            ratios=self.ratios,
            axes=tuple(AxisSpec(name=name, shares=own) for name, own in zip(self.axis_names, self.shares, strict=True)),
            parameters={name: str(state) for name, state in self.kept.items()},
            moves=tuple((m.tensor, str(m.source), str(m.target), m.collective) for m in self.moves),
            computed_whole_without_a_rule=dict(self.unknown),
            operators=tuple(
                OperatorSpec.model_validate({**row, "number": number})
                for row, number in zip(self.table, self.rules, strict=True)
            ),
        )

    @classmethod
    def from_spec(cls, spec: ProgramSpec) -> "Program":
        """The program in a file."""
        return cls(
            size=spec.ranks,
            rules=tuple(operator.number for operator in spec.operators),
            kept={name: read_state(text) for name, text in spec.parameters.items()},
            moves=tuple(Move(t, read_state(a), read_state(b), cast(Any, kind)) for t, a, b, kind in spec.moves),
            shares=tuple(axis.shares for axis in spec.axes),
            axis_names=tuple(axis.name for axis in spec.axes),
            fingerprint=spec.fingerprint,
            predicted_seconds=spec.predicted_seconds,
            optimizer_seconds=spec.optimizer_seconds,
            memory_bytes=spec.memory_bytes,
            is_optimal=spec.proved_optimal,
            rounds=spec.rounds,
            unknown=dict(spec.computed_whole_without_a_rule),
            table=tuple(
                operator.model_dump(mode="json", by_alias=True, exclude={"number"}) for operator in spec.operators
            ),
        )

    def to_yaml(self) -> str:
        """The program as text that a person can read, and `from_spec` of it gives back."""
        return dump_yaml({"strategy": "hap", **self.to_spec().model_dump(mode="json", by_alias=True)})

    def explain(self) -> str:
        """A table: per module and direction how it is cut, in which ratios, what is communicated, seconds, bytes."""
        head, rows = program_table(spec := self.to_spec())
        widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
        lines = [
            "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
        ]
        return "\n".join([*lines, *program_notes(spec)])


class Execution:
    """A program over its model: the order of what happens on every rank, and what it costs."""

    def __init__(self, model: Model, rules: Sequence[int], kept: dict[str, State], shares: Shares) -> None:
        self.model, self.shares, self.kept = model, shares, kept
        self.rules = [model.rules.of[number][chosen] for number, chosen in enumerate(rules)]

    def source(self, tensor: int) -> State:
        """The state in which a tensor comes to be."""
        return self._sources.get(tensor, WHOLE)

    @cached_property
    def _sources(self) -> dict[int, State]:
        graph = self.model.graph
        found: dict[int, State] = {graph.parameters[name]: state for name, state in self.kept.items()}
        for operator, rule in zip(graph.operators, self.rules, strict=True):
            found.update(zip(operator.made, rule.outputs, strict=True))
        return found

    @cached_property
    def targets(self) -> dict[int, list[State]]:
        """The states in which each tensor is needed."""
        graph = self.model.graph
        found: dict[int, dict[State, None]] = {graph.loss: {WHOLE: None}}
        for name, tensor in graph.gradients.items():
            if tensor is not None:
                found.setdefault(tensor, {})[self.kept[name]] = None
        for operator, rule in zip(graph.operators, self.rules, strict=True):
            for tensor, state in zip(operator.inputs, rule.inputs, strict=True):
                found.setdefault(tensor, {})[state] = None
        return {tensor: list(states) for tensor, states in found.items()}

    @cached_property
    def moves(self) -> dict[int, list[Move]]:
        """By tensor, how it gets into the states that are needed, in order."""
        return {
            t: moves_to(self.model, self.shares, t, self.source(t), states)[1] for t, states in self.targets.items()
        }

    @cached_property
    def seconds(self) -> float:
        """The step's seconds: operators one after the other, collectives between them, and the optimizer."""
        computed = sum(rule_seconds(self.model, self.shares, n, rule) for n, rule in enumerate(self.rules))
        return (
            self.optimizer_seconds
            + computed
            + sum(self._move_seconds(move) for moves in self.moves.values() for move in moves)
        )

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer's update, parameter by parameter."""
        tensors = self.model.graph.parameters
        return sum(update_seconds(self.model, self.shares, tensors[name], state) for name, state in self.kept.items())

    def _move_seconds(self, move: Move) -> float:
        return move_cost(self.model, self.shares, move.tensor, move.source, move.target)[0] if move.collective else 0.0

    def last_uses(self) -> dict[int, int]:
        """By tensor, the operator after which no rank needs it any more."""
        uses = {tensor: numbers[-1] for tensor, numbers in self.model.graph.consumers.items()}
        keeps = {self.model.graph.loss, *(t for t in self.model.graph.gradients.values() if t is not None)}
        return {tensor: number for tensor, number in uses.items() if tensor not in keeps}

    def rows(self) -> Iterator[dict[str, Any]]:
        """One line of the program's table per operator."""
        graph, rules = self.model.graph, self.model.rules
        for number, (operator, rule) in enumerate(zip(graph.operators, self.rules, strict=True)):
            axis = rules.axis_of(number, rule)
            moves = [m for t in operator.made for m in self.moves.get(t, []) if m.collective]
            yield {
                "operator": operator.name,
                "module": operator.module,
                "pass": "forward" if operator.is_forward else "backward",
                "rule": str(rule),
                "axis": None if axis is None else rules.axes[axis].name,
                "seconds": rule_seconds(self.model, self.shares, number, rule),
                "collectives": [str(move.collective) for move in moves],
                "collective_seconds": sum(self._move_seconds(move) for move in moves),
                "bytes": sum(graph.tensors[move.tensor].num_bytes for move in moves),
            }


def is_view(operator: Operator) -> bool:
    """Whether its output lives in its input's memory."""
    return short(operator) in VIEWS


class Living:
    """Plays a program through and counts what lives, storage by storage, on every rank at once.

    `peak` is each rank's largest sum of parameters, optimizer state, batch and living tensors, in bytes.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution, self._model = execution, execution.model
        graph = self._model.graph
        self._storages: dict[int, np.ndarray] = {}
        self._users: dict[int, int] = {}
        self._held: dict[tuple[int, State], tuple[int, ...]] = {}
        self._what: dict[int, tuple[int, State]] = {}
        self.now = self._resident()
        self.peak = self.now.copy()
        self.at_peak: list[list[tuple[int, State]]] = [[] for _ in self.peak]  # per rank, what lives then
        self.peak_at = np.zeros(len(self.now), dtype=int)
        self._last = execution.last_uses()
        for number, operator in enumerate(graph.operators):
            self._play(number, operator)

    def _bytes(self, tensor: int, state: State) -> np.ndarray:
        whole = self._model.graph.tensors[tensor].num_bytes
        return whole * fractions(self._model, self._execution.shares, tensor, state)

    def _resident(self) -> np.ndarray:
        graph = self._model.graph
        total = np.zeros(self._model.costs.size)
        for name, tensor in graph.parameters.items():
            state = self._execution.kept[name]
            total = total + self._bytes(tensor, state) * TRAINING_COPIES
            self._held[tensor, state] = ()
        for tensor in (*graph.buffers.values(), *graph.inputs):
            total = total + self._bytes(tensor, WHOLE)
            self._held[tensor, WHOLE] = ()
        return total

    def _play(self, number: int, operator: Operator) -> None:
        rule = self._execution.rules[number]
        for tensor, state in zip(operator.inputs, rule.inputs, strict=True):
            self._bring(tensor, state)
        shared = self._held[operator.inputs[0], rule.inputs[0]] if is_view(operator) else None
        for tensor, state in zip(operator.made, rule.outputs, strict=True):
            self._add(tensor, state, shared, copies=shared is None or self._may_copy(operator))
        self._note(number)
        for tensor in operator.made:
            for name in self._model.graph.parameter_of_gradient.get(tensor, ()):
                self._bring(tensor, self._execution.kept[name])
                self._note(number)
        self._free(number, operator)

    def _note(self, number: int) -> None:
        for rank in np.flatnonzero(self.now > self.peak):
            self.peak_at[rank] = number
            self.at_peak[rank] = [self._what[storage] for storage in self._storages]
        self.peak = np.maximum(self.peak, self.now)

    def _bring(self, tensor: int, state: State) -> None:
        if (tensor, state) in self._held:
            return
        move = next(move for move in self._execution.moves[tensor] if move.target == state)
        self._bring(tensor, move.source)
        self._add(tensor, state, None, copies=True)

    def _may_copy(self, operator: Operator) -> bool:
        """Whether a reshape copies where its input lies in memory in another order: that of a view by dimensions."""
        made_by = self._model.graph.producers.get(operator.inputs[0])
        before = None if made_by is None else self._model.graph.operators[made_by]
        return short(operator) in RESHAPES and before is not None and is_view(before) and short(before) not in RESHAPES

    def _add(self, tensor: int, state: State, shared: tuple[int, ...] | None, *, copies: bool) -> None:
        storages = shared or ()
        if copies:
            new = len(self._users)
            self._storages[new], self._users[new] = self._bytes(tensor, state), 0
            self._what[new] = tensor, state
            self.now = self.now + self._storages[new]
            storages = (*storages, new)
        self._held[tensor, state] = storages
        for storage in storages:
            self._users[storage] += 1

    def _free(self, number: int, operator: Operator) -> None:
        graph, last = self._model.graph, self._last
        for tensor in dict.fromkeys((*operator.inputs, *operator.made)):
            if tensor in graph.parameter_of_gradient or tensor == graph.loss:
                continue
            if last.get(tensor, -1) <= number:
                for key in [key for key in self._held if key[0] == tensor]:
                    for storage in self._held.pop(key):
                        self._drop(storage)

    def _drop(self, storage: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            self.now = self.now - self._storages.pop(storage)
