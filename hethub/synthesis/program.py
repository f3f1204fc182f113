"""A program: which rule each operator follows and how each parameter is kept; what that moves and what it holds."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from hethub.spec.documents import dump_yaml
from hethub.spec.program import AxisSpec, OperatorSpec, ProgramSpec, program_notes, program_table
from hethub.synthesis.costs import (
    Model,
    Move,
    Shares,
    fractions,
    held_bytes,
    is_view,
    move_cost,
    moves_to,
    rank_seconds,
    rule_seconds,
    update_seconds,
)
from hethub.synthesis.graph import Graph, Operator
from hethub.synthesis.rules import PARTIAL, WHOLE, Cut, State, read_state
from hethub.synthesis.table import RESHAPES, short

TRAINING_COPIES = 3  # of a parameter: itself and two moments; its gradient is one of the graph's tensors
POOLED_BYTES = 1 << 20  # below that, blocks lie in a pool of their own: of torch's on a device, malloc's heap on a CPU


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
        self.numbers = tuple(rules)  # by operator, of its rule in the list of `Rules.of`
        self.rules = [own[chosen] for own, chosen in zip(model.rules.of, rules, strict=True)]

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
        found: dict[int, dict[State, None]] = {tensor: {WHOLE: None} for tensor in graph.results}
        for name, tensor in graph.gradients.items():
            if tensor is not None:
                found.setdefault(tensor, {})[self.kept[name]] = None
        for operator, rule in zip(graph.operators, self.rules, strict=True):
            for tensor, state in zip(operator.inputs, rule.inputs, strict=True):
                found.setdefault(tensor, {})[state] = None
        return {tensor: list(states) for tensor, states in found.items()}

    @cached_property
    def moves(self) -> dict[int, list[Move]]:
        """The moves that bring each tensor into the states in which it is needed, in order."""
        return {
            t: moves_to(self.model, self.shares, t, self.source(t), states)[1] for t, states in self.targets.items()
        }

    @cached_property
    def seconds(self) -> float:
        """The step's seconds: operators one after the other, collectives between them, and the optimizer."""
        computed = sum(rule_seconds(self.model, self.shares, n, rule) for n, rule in enumerate(self.rules))
        moved = sum(self._move_seconds(move) for moves in self.moves.values() for move in moves)
        return self.optimizer_seconds + computed + moved

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer's update, parameter by parameter."""
        stepped = self.model.graph.stepped
        return sum(update_seconds(self.model, self.shares, tensor, self.kept[name]) for name, tensor in stepped.items())

    @cached_property
    def step_seconds(self) -> float:
        """The step's seconds as ranks run it: each goes on by itself until a collective needs them all, and sums of
        gradients run one after the other beside what is computed."""
        model, graph = self.model, self.model.graph
        clock, network = np.zeros(model.costs.size), 0.0
        there: set[tuple[int, State]] = set()

        def bring(tensor: int, state: State) -> None:
            nonlocal clock, network
            if state == self.source(tensor) or (tensor, state) in there:
                return
            there.add((tensor, state))
            move = next(move for move in self.moves[tensor] if move.target == state)
            bring(tensor, move.source)
            if move.collective:
                network = max(network, float(clock.max())) + self._move_seconds(move)
                if not runs_beside(graph, move):
                    clock = np.full_like(clock, network)

        for number, operator in enumerate(graph.operators):
            rule = self.rules[number]
            for tensor, state in zip(operator.inputs, rule.inputs, strict=True):
                bring(tensor, state)
            clock = clock + rank_seconds(model, self.shares, number, rule)
            for tensor in operator.made:
                for name in graph.parameter_of_gradient.get(tensor, ()):
                    bring(tensor, self.kept[name])
        for tensor in graph.results:
            bring(tensor, WHOLE)
        updates = sum(
            model.costs.update(graph.tensors[tensor]) * fractions(model, self.shares, tensor, self.kept[name])
            for name, tensor in graph.stepped.items()
        )
        return float((np.maximum(clock, network) + updates).max())

    @cached_property
    def visible(self) -> float:
        """Which part of the seconds of gradients' sums the step takes beside what is computed meanwhile."""
        moves = (move for moves in self.moves.values() for move in moves)
        summed = sum(self._move_seconds(move) for move in moves if runs_beside(self.model.graph, move))
        return min(max(1.0 - (self.seconds - self.step_seconds) / summed, 0.0), 1.0) if summed else 1.0

    def _move_seconds(self, move: Move) -> float:
        return move_cost(self.model, self.shares, move.tensor, move.source, move.target)[0] if move.collective else 0.0

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


def runs_beside(graph: Graph, move: Move) -> bool:
    """Whether a collective runs beside what is computed: it sums up a gradient, which no operator waits for."""
    return (
        move.source == PARTIAL and move.tensor in graph.parameter_of_gradient and not graph.consumers.get(move.tensor)
    )


def move_buffers(model: Model, shares: Shares, move: Move) -> np.ndarray:
    """At most what every rank's end of a move holds beside its source and target while it runs, in bytes."""
    whole = np.full(model.costs.size, float(model.graph.tensors[move.tensor].num_bytes))
    before, after = (held_bytes(model, shares, move.tensor, state) for state in (move.source, move.target))
    if move.collective == "padded all-gather":
        return (len(whole) + 1) * np.full_like(whole, before.max())
    if move.collective == "reduce-scatter" or (move.collective == "all-gather" and move.source != Cut(0, 1)):
        return whole
    return before + after if move.collective == "all-to-all" else np.zeros_like(whole)


def takes_memory(graph: Graph, operator: Operator) -> bool:
    """Whether its output has memory of its own: a reshape copies where its input lies in memory in another order, that
    of a view by dimensions."""
    if not is_view(operator):
        return True
    made_by = graph.producers.get(operator.inputs[0])
    before = None if made_by is None else graph.operators[made_by]
    return short(operator) in RESHAPES and before is not None and is_view(before) and short(before) not in RESHAPES


class Living:
    """Plays a program through and counts what lives, storage by storage, on every rank at once.

    `peak` is each rank's largest sum of parameters, optimizer state, batch, living tensors and collectives' buffers, in
    bytes. What small tensors once took stays taken: their pool gives nothing back to larger ones.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution, self._model = execution, execution.model
        graph = self._model.graph
        self._storages: dict[int, np.ndarray] = {}
        self._users: dict[int, int] = {}
        self._held: dict[int, dict[State, tuple[int, ...]]] = {}
        self._what: dict[int, tuple[int, State]] = {}
        self.now = self._resident()
        self._small = self._pool = np.zeros_like(self.now)  # living storages below POOLED_BYTES, and their most so far
        self.peak = self.now.copy()
        self._at_peak: list[list[int]] = [[] for _ in self.peak]  # per rank, the storages that live then
        self.most = np.zeros((len(graph.operators), len(self.now)))  # per operator and rank, while it runs
        self._under_way = np.zeros_like(self.now)  # buffers of the scattered gradient that is
        for self._number, operator in enumerate(graph.operators):
            self._play(self._number, operator)
        for tensor in graph.results:
            self._bring(tensor, WHOLE)

    def at_peak(self, rank: int) -> list[tuple[int, State]]:
        """The tensors that live when most does on a rank, with their states."""
        return [self._what[storage] for storage in self._at_peak[rank]]

    def _bytes(self, tensor: int, state: State) -> np.ndarray:
        return held_bytes(self._model, self._execution.shares, tensor, state)

    def _resident(self) -> np.ndarray:
        graph = self._model.graph
        total = np.zeros(self._model.costs.size)
        for name, tensor in graph.parameters.items():
            state = self._execution.kept[name]
            total = total + self._bytes(tensor, state) * TRAINING_COPIES
            self._held.setdefault(tensor, {})[state] = ()
        for tensor in (*graph.buffers.values(), *graph.inputs):
            total = total + self._bytes(tensor, WHOLE)
            self._held.setdefault(tensor, {})[WHOLE] = ()
        return total

    def _play(self, number: int, operator: Operator) -> None:
        rule = self._execution.rules[number]
        for tensor, state in zip(operator.inputs, rule.inputs, strict=True):
            self._bring(tensor, state)
        shared = self._held[operator.inputs[0]][rule.inputs[0]] if is_view(operator) else None
        for tensor, state in zip(operator.made, rule.outputs, strict=True):
            self._add(tensor, state, shared, copies=takes_memory(self._model.graph, operator))
        self._note(number, self.now)
        for tensor in operator.made:
            for name in self._model.graph.parameter_of_gradient.get(tensor, ()):
                self._bring(tensor, self._execution.kept[name])
        self._free(number, operator)

    def _note(self, number: int, now: np.ndarray) -> None:
        self._pool = np.maximum(self._pool, self._small)
        now = now + self._pool - self._small
        self.most[number] = np.maximum(self.most[number], now)
        higher = np.flatnonzero(now > self.peak)
        living = list(self._storages) if len(higher) else []
        for rank in higher:
            self._at_peak[rank] = living
        self.peak = np.maximum(self.peak, now)

    def _bring(self, tensor: int, state: State) -> None:
        if state in self._held.get(tensor, ()):
            return
        move = next(move for move in self._execution.moves[tensor] if move.target == state)
        self._bring(tensor, move.source)
        self._add(tensor, state, None, copies=True)
        buffers = move_buffers(self._model, self._execution.shares, move)
        if move.collective == "reduce-scatter" and runs_beside(self._model.graph, move):
            self.now = self.now + buffers - self._under_way  # until the next one is under way
            self._under_way, buffers = buffers, np.zeros_like(self.now)
        self._note(self._number, self.now + buffers)

    def _add(self, tensor: int, state: State, shared: tuple[int, ...] | None, *, copies: bool) -> None:
        storages = shared or ()
        if copies:
            new = len(self._users)
            self._storages[new], self._users[new] = self._bytes(tensor, state), 0
            self._what[new] = tensor, state
            self._count(self._storages[new])
            storages = (*storages, new)
        self._held.setdefault(tensor, {})[state] = storages
        for storage in storages:
            self._users[storage] += 1

    def _free(self, number: int, operator: Operator) -> None:
        graph = self._model.graph
        for tensor in dict.fromkeys((*operator.inputs, *operator.made)):
            if graph.consumers.get(tensor, [-1])[-1] <= number and tensor not in graph.results:
                stay = {self._execution.kept[name] for name in graph.parameter_of_gradient.get(tensor, ())}
                held = self._held.get(tensor, {})
                for state in [state for state in held if state not in stay]:
                    for storage in held.pop(state):
                        self._drop(storage)

    def _drop(self, storage: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            self._count(-self._storages.pop(storage))

    def _count(self, held: np.ndarray) -> None:
        self.now = self.now + held
        self._small = self._small + np.where(abs(held) < POOLED_BYTES, held, 0.0)
