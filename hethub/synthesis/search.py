"""The program of least cost for given shares, by an integer programme over forward and backward together.

One variable chooses each operator's rule and each parameter's state, one pays for each move of a tensor between
states. HiGHS proves the optimum. Sufficient factors (gathering the operands of a weight gradient instead of summing
it), ZeRO's sharded parameters and tensor parallelism are points of this space and come out where they cost least.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from hethub.spec.errors import BadInput
from hethub.synthesis.program import (
    TRAINING_COPIES,
    Execution,
    Living,
    Model,
    Shares,
    fractions,
    is_all_to_all,
    is_view,
    move_cost,
    rule_seconds,
)
from hethub.synthesis.rules import PARTIAL, WHOLE, Rule, State

Terms = dict[int, float]  # a linear expression: coefficients by variable


class Found(NamedTuple):
    """The best program for some shares."""

    execution: Execution
    rules: tuple[int, ...]
    kept: dict[str, State]
    seconds: float
    is_optimal: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """What the search is allowed."""

    time_limit_seconds: float = 60.0
    gap: float = 1e-3  # the proved distance to the least cost at which the search may end, as a fraction of it
    memory_rounds: int = 12


def search(model: Model, shares: Shares, limits: Sequence[float] | None = None, options: Search | None = None) -> Found:
    """The program of least predicted seconds whose every rank stays within `limits` bytes.

    A round without memory limits comes first; where a rank exceeds its own, the moment of its peak becomes a constraint
    and the programme is solved again. Raises BadInput where nothing fits.
    """
    options = options or Search()
    problem = _Problem(model, shares)
    for _ in range(options.memory_rounds):
        found = problem.solve(options)
        living = Living(found.execution)
        over = [] if limits is None else [rank for rank, most in enumerate(limits) if living.peak[rank] > most]
        if not over:
            return found
        assert limits is not None
        for rank in over:
            problem.limit_memory(rank, int(living.peak_at[rank]), limits[rank], living.peak[rank])
    raise BadInput(
        f"no program was found whose ranks all keep within their memory; rank {over[0]} needs more. {_REMEDY}"
    )


_REMEDY = "Use a smaller batch, a smaller model, or accelerators with more memory."


class _Problem:
    """Variables, constraints and costs for one list of shares."""

    def __init__(self, model: Model, shares: Shares) -> None:
        self._model, self._shares = model, shares
        self._cost: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[tuple[Terms, float]] = []  # terms <= bound
        self._equal: list[tuple[Terms, float]] = []
        self._choices: list[dict[int, int]] = []  # per operator: rule number -> variable
        self._made: list[dict[State, Terms]] = [{} for _ in model.graph.tensors]
        self._needs: list[dict[State, list[Terms]]] = [{} for _ in model.graph.tensors]
        self._kept: dict[str, dict[State, int]] = {}
        self._moves: dict[tuple[int, State, State], int] = {}
        self._memory: dict[tuple[int, int], tuple[Terms, float, float]] = {}
        self._parameters()
        self._operators()
        for tensor in range(len(model.graph.tensors)):
            self._connect(tensor)

    def _variable(self, cost: float, integral: bool) -> int:
        self._cost.append(cost)
        self._integral.append(integral)
        return len(self._cost) - 1

    def _parameters(self) -> None:
        graph = self._model.graph
        for tensor in (*graph.inputs, *graph.buffers.values()):
            constant = self._variable(0.0, False)
            self._equal.append(({constant: 1.0}, 1.0))
            self._made[tensor] = {WHOLE: {constant: 1.0}}
        for name, tensor in graph.parameters.items():
            states: list[State] = [WHOLE, *self._model.rules.cuts(tensor)]
            own = {state: self._variable(0.0, True) for state in states}
            self._kept[name] = own
            self._equal.append((dict.fromkeys(own.values(), 1.0), 1.0))
            self._made[tensor] = {state: {variable: 1.0} for state, variable in own.items()}
            gradient = graph.gradients[name]
            if gradient is not None:
                for state, variable in own.items():
                    self._needs[gradient].setdefault(state, []).append({variable: 1.0})
        one = self._variable(0.0, False)
        self._equal.append(({one: 1.0}, 1.0))
        self._needs[graph.loss].setdefault(WHOLE, []).append({one: 1.0})

    def _operators(self) -> None:
        for number, operator in enumerate(self._model.graph.operators):
            rules = self._model.rules.of[number]
            usable = [n for n, rule in enumerate(rules) if self._is_usable(number, rule)]
            own = {n: self._variable(rule_seconds(self._model, self._shares, number, rules[n]), True) for n in usable}
            self._choices.append(own)
            self._equal.append((dict.fromkeys(own.values(), 1.0), 1.0))
            needed: list[dict[State, Terms]] = [{} for _ in operator.inputs]
            for n, variable in own.items():
                for place, state in enumerate(rules[n].inputs):
                    needed[place].setdefault(state, {})[variable] = 1.0
                for tensor, state in zip(operator.made, rules[n].outputs, strict=True):
                    self._made[tensor].setdefault(state, {})[variable] = 1.0
            for tensor, states in zip(operator.inputs, needed, strict=True):
                for state, terms in states.items():
                    self._needs[tensor].setdefault(state, []).append(terms)

    def _is_usable(self, number: int, rule: Rule) -> bool:
        axis = self._model.rules.axis_of(number, rule)
        return axis is None or axis in self._model.rules.worth_cutting

    def _connect(self, tensor: int) -> None:
        """Whoever needs a tensor in a state finds it made so, or pays for a move."""
        needs, made = self._needs[tensor], self._made[tensor]
        if not needs:
            return
        whole = dict(made.get(WHOLE, {}))
        for source, terms in made.items():
            if source != WHOLE:
                whole[self._move(tensor, source, WHOLE, terms)] = 1.0
        for target, wanted in needs.items():
            found = dict(whole) if target == WHOLE else dict(made.get(target, {}))
            if target != WHOLE:
                found[self._move(tensor, WHOLE, target, whole)] = 1.0
                for source, terms in made.items():
                    if (source == PARTIAL or is_all_to_all(source, target)) and source != target:
                        found[self._move(tensor, source, target, terms)] = 1.0
            for terms in wanted:
                self._rows.append((_minus(terms, found), 0.0))

    def _move(self, tensor: int, source: State, target: State, held: Terms) -> int:
        """A variable that is 1 where the tensor is brought into `target`; `held` says whether it is in `source`."""
        seconds = move_cost(self._model, self._shares, tensor, source, target)[0]
        variable = self._moves[tensor, source, target] = self._variable(seconds, False)
        self._rows.append((_minus({variable: 1.0}, held), 0.0))
        return variable

    def solve(self, options: Search) -> Found:
        """The optimum of the programme as it stands. Raises BadInput where there is none."""
        rows = [*self._rows, *((terms, bound) for terms, bound, _ in self._memory.values())]
        count = len(self._cost)
        scale = 1.0 / max(max(self._cost), 1e-12)
        answer = milp(
            np.array(self._cost) * scale,
            integrality=np.array(self._integral, dtype=int),
            bounds=Bounds(0.0, 1.0),
            constraints=[
                LinearConstraint(_matrix([t for t, _ in rows], count), ub=[bound for _, bound in rows]),
                LinearConstraint(_matrix([t for t, _ in self._equal], count), *[[b for _, b in self._equal]] * 2),
            ],
            options={"mip_rel_gap": options.gap, "time_limit": options.time_limit_seconds},
        )
        if answer.x is None:
            raise BadInput(f"no program fits the ranks' memory ({answer.message.strip()}). {_REMEDY}")
        rules = tuple(max(own, key=lambda n: answer.x[own[n]]) for own in self._choices)
        kept = {name: max(own, key=lambda s: answer.x[own[s]]) for name, own in self._kept.items()}
        execution = Execution(self._model, rules, kept, self._shares)
        return Found(execution, rules, kept, execution.seconds, answer.status == 0)

    def limit_memory(self, rank: int, moment: int, limit: float, found: float) -> None:
        """What lives on `rank` while operator `moment` runs is at most `limit` bytes from now on.

        Where that was asked before and did not suffice (what is counted exactly is a little more than the sum of
        living tensors), the bound is lowered by what was missing.
        """
        before = self._memory.get((rank, moment))
        slack = before[2] + (found - limit) if before else 0.0
        terms = self._living(rank, moment)
        bound = limit - slack
        scale = max(limit, 1.0)
        self._memory[rank, moment] = {v: c / scale for v, c in terms.items()}, bound / scale, slack

    def _living(self, rank: int, moment: int) -> Terms:
        graph, terms = self._model.graph, Terms()

        def add(found: Terms, tensor: int, state: State, times: float = 1.0) -> None:
            size = graph.tensors[tensor].num_bytes * times
            part = size * fractions(self._model, self._shares, tensor, state)[rank]
            for variable, factor in found.items():
                terms[variable] = terms.get(variable, 0.0) + part * factor

        for name, own in self._kept.items():
            for state, variable in own.items():
                add({variable: 1.0}, graph.parameters[name], state, TRAINING_COPIES)
        for tensor in (*graph.inputs, *graph.buffers.values()):
            add(self._made[tensor][WHOLE], tensor, WHOLE)
        ends = self._ends
        for tensor, until in ends.items():
            born = graph.producers.get(tensor, -1)
            if born <= moment <= until:
                if born >= 0 and not is_view(graph.operators[born]):
                    for state, found in self._made[tensor].items():
                        add(found, tensor, state)
                for (moved, _, target), variable in self._moves.items():
                    if moved == tensor:
                        add({variable: 1.0}, tensor, target)
        return terms

    @property
    def _ends(self) -> dict[int, int]:
        """By tensor, the last operator that reads it, or a view of it; gradients live to the end."""
        graph = self._model.graph
        ends: dict[int, int] = {}
        keeps = set(graph.parameter_of_gradient)
        for number in range(len(graph.operators) - 1, -1, -1):
            operator = graph.operators[number]
            for tensor in operator.made:
                ends.setdefault(tensor, number)
                if tensor in keeps:
                    ends[tensor] = len(graph.operators)
            until = max([number, *(ends[t] for t in operator.made)]) if is_view(operator) else number
            for tensor in operator.inputs:
                ends[tensor] = max(ends.get(tensor, 0), until)
        return ends


def _minus(terms: Terms, others: Terms) -> Terms:
    result = dict(terms)
    for variable, factor in others.items():
        result[variable] = result.get(variable, 0.0) - factor
    return result


def _matrix(rows: Sequence[Terms], columns: int) -> csr_matrix:
    counts = np.cumsum([0, *(len(row) for row in rows)])
    indices = [variable for row in rows for variable in row]
    return csr_matrix(([f for row in rows for f in row.values()], indices, counts), shape=(len(rows), columns))
