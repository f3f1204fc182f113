"""The program of least cost for given shares, by an integer programme over forward and backward together.

One variable chooses each operator's rule and each parameter's state, one pays for each move of a tensor between
states. HiGHS proves the optimum. Sufficient factors (gathering the operands of a weight gradient instead of summing
it), ZeRO's sharded parameters and tensor parallelism are points of this space and come out where they cost least.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix, vstack

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
    update_seconds,
)
from hethub.synthesis.rules import PARTIAL, WHOLE, Rule, State

Terms = dict[int, float]  # a linear expression: coefficients by variable
Price = Callable[[Shares], float]  # seconds, for given shares
Allows = Callable[[int, Rule], bool]


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
    """As `Problem.search`, of a problem that is asked about once."""
    return Problem(model).search(shares, limits, options)


_REMEDY = "Use a smaller batch, a smaller model, or accelerators with more memory."


class Problem:
    """Variables and constraints of a model's programs; their costs, which shares decide, come with every question."""

    def __init__(self, model: Model, allows: Allows | None = None, *, cuts_parameters: bool = True) -> None:
        """Of the rules that `allows` takes, given an operator's number; all ranks keep all parameters unless these may
        be cut."""
        self._model, self._allows, self._cuts_parameters = model, allows, cuts_parameters
        self._shares: Shares = ()
        self._cost: list[float] = []
        self._prices: list[tuple[float, Price] | None] = []  # by variable: how many times what is paid for; None: free
        self._integral: list[bool] = []
        self._rows: list[tuple[Terms, float]] = []  # terms <= bound
        self._equal: list[tuple[Terms, float]] = []
        self._choices: list[dict[int, int]] = []  # per operator: rule number -> variable
        self._made: list[dict[State, Terms]] = [{} for _ in model.graph.tensors]
        self._needs: list[list[dict[State, Terms]]] = [[] for _ in model.graph.tensors]  # by who needs it
        self._kept: dict[str, dict[State, int]] = {}
        self._moves: dict[tuple[int, State, State], int] = {}
        self._connected: dict[object, dict[tuple[State, State], int]] = {}  # moves, by how a tensor is made and needed
        self._memory: dict[tuple[int, int], tuple[Terms, float, float]] = {}
        self._parameters()
        self._operators()
        for tensor in range(len(model.graph.tensors)):
            self._connect(tensor)
        self._constant = _matrix([t for t, _ in self._rows], len(self._prices))
        self._sums = _matrix([t for t, _ in self._equal], len(self._prices))

    def search(self, shares: Shares, limits: Sequence[float] | None = None, options: Search | None = None) -> Found:
        """The program of least predicted seconds whose every rank stays within `limits` bytes.

        A round without memory limits comes first; where a rank exceeds its own, the moment of its peak becomes a
        constraint and the programme is solved again. Raises BadInput where nothing fits.
        """
        options = options or Search()
        self._price(shares)
        for _ in range(options.memory_rounds):
            found = self.solve(options)
            living = Living(found.execution)
            over = [] if limits is None else [rank for rank, most in enumerate(limits) if living.peak[rank] > most]
            if not over:
                return found
            assert limits is not None
            for rank in over:
                self._limit_memory(rank, int(living.peak_at[rank]), limits[rank], living.peak[rank])
        raise BadInput(
            f"no program was found whose ranks all keep within their memory; rank {over[0]} needs more. {_REMEDY}"
        )

    def _price(self, shares: Shares) -> None:
        self._shares, self._memory = shares, {}
        self._cost = [0.0 if price is None else price[0] * price[1](shares) for price in self._prices]

    def _variable(self, price: Price | None = None, times: float = 1.0, *, integral: bool = False) -> int:
        self._prices.append(None if price is None else (times, price))
        self._integral.append(integral)
        return len(self._prices) - 1

    def _parameters(self) -> None:
        graph = self._model.graph
        for tensor in (*graph.inputs, *graph.buffers.values()):
            constant = self._variable()
            self._equal.append(({constant: 1.0}, 1.0))
            self._made[tensor] = {WHOLE: {constant: 1.0}}
        alike = self._model.rules.first_parameter
        times = Counter(alike.values())
        for name, tensor in graph.parameters.items():
            if alike[name] == name:
                cuts = self._model.rules.cuts(tensor) if self._cuts_parameters else []
                states: list[State] = [WHOLE, *cuts]
                self._kept[name] = {
                    state: self._variable(self._update(tensor, state), times[name], integral=True) for state in states
                }
                self._equal.append((dict.fromkeys(self._kept[name].values(), 1.0), 1.0))
            else:
                self._kept[name] = self._kept[alike[name]]
            own = self._kept[name]
            self._made[tensor] = {state: {variable: 1.0} for state, variable in own.items()}
            gradient = graph.gradients[name]
            if gradient is not None:
                self._needs[gradient].append({state: {variable: 1.0} for state, variable in own.items()})
        one = self._variable()
        self._equal.append(({one: 1.0}, 1.0))
        self._needs[graph.loss].append({WHOLE: {one: 1.0}})

    def _operators(self) -> None:
        alike = self._model.rules.first
        times = Counter(alike)
        for number, operator in enumerate(self._model.graph.operators):
            rules = self._model.rules.of[number]
            if alike[number] == number:
                own = self._choose(number, times[number])
            else:
                own = self._choices[alike[number]]
            self._choices.append(own)
            needed: list[dict[State, Terms]] = [{} for _ in operator.inputs]
            for n, variable in own.items():
                for place, state in enumerate(rules[n].inputs):
                    needed[place].setdefault(state, {})[variable] = 1.0
                for tensor, state in zip(operator.made, rules[n].outputs, strict=True):
                    self._made[tensor].setdefault(state, {})[variable] = 1.0
            for tensor, states in zip(operator.inputs, needed, strict=True):
                self._needs[tensor].append(states)

    def _choose(self, number: int, times: int) -> dict[int, int]:
        """By usable rule of an operator that occurs so many times, the variable that is 1 where it is chosen."""
        rules = self._model.rules.of[number]
        own = {
            n: self._variable(self._compute(number, rule), times, integral=True)
            for n, rule in enumerate(rules)
            if self._is_usable(number, rule)
        }
        self._equal.append((dict.fromkeys(own.values(), 1.0), 1.0))
        return own

    def _update(self, tensor: int, state: State) -> Price:
        return lambda shares: update_seconds(self._model, shares, tensor, state)

    def _compute(self, number: int, rule: Rule) -> Price:
        return lambda shares: rule_seconds(self._model, shares, number, rule)

    def _transport(self, tensor: int, source: State, target: State) -> Price:
        return lambda shares: move_cost(self._model, shares, tensor, source, target)[0]

    def _is_usable(self, number: int, rule: Rule) -> bool:
        axis = self._model.rules.axis_of(number, rule)
        if axis is not None and axis not in self._model.rules.worth_cutting:
            return False
        return self._allows is None or self._allows(number, rule)

    def _connect(self, tensor: int) -> None:
        """Whoever needs a tensor in a state finds it made so, or pays for a move.

        A tensor that is made and needed as one before it, in an equal layer, is moved alike: that move costs once more.
        """
        needs, made = self._needs[tensor], self._made[tensor]
        if not needs:
            return
        unlike = {_states_key(states): states for states in needs}
        key = self._model.graph.tensors[tensor].num_bytes, _states_key(made), frozenset(unlike)
        if key in self._connected:
            for (source, target), variable in self._connected[key].items():
                self._moves[tensor, source, target] = variable
                price = self._prices[variable]
                assert price is not None
                self._prices[variable] = price[0] + 1.0, price[1]
            return
        own: dict[tuple[State, State], int] = {}

        def move(source: State, target: State, held: Terms) -> int:
            """A variable that is 1 where the tensor is brought into `target`; `held`: whether it is in `source`."""
            variable = self._variable(self._transport(tensor, source, target))
            own[source, target] = self._moves[tensor, source, target] = variable
            self._rows.append((_minus({variable: 1.0}, held), 0.0))
            return variable

        whole = dict(made.get(WHOLE, {}))
        for source, terms in made.items():
            if source != WHOLE:
                whole[move(source, WHOLE, terms)] = 1.0
        for target in dict.fromkeys(state for states in unlike.values() for state in states):
            found = dict(whole) if target == WHOLE else dict(made.get(target, {}))
            if target != WHOLE:
                found[move(WHOLE, target, whole)] = 1.0
                for source, terms in made.items():
                    if (source == PARTIAL or is_all_to_all(source, target)) and source != target:
                        found[move(source, target, terms)] = 1.0
            wanted = {_key(states[target]): states[target] for states in unlike.values() if target in states}
            self._rows += [(_minus(terms, found), 0.0) for terms in wanted.values()]
        for states in unlike.values():
            self._leave(made, states, own)
        self._connected[key] = own

    def _leave(self, made: dict[State, Terms], states: dict[State, Terms], own: dict[tuple[State, State], int]) -> None:
        """What is made in one state and needed in another leaves that state by some move.

        This follows for whole numbers; said, it keeps the relaxation from serving many states by a part of one gather.
        """
        for source, terms in made.items():
            if source != WHOLE:
                row = dict(terms)
                for state, needed in states.items():
                    if state != source:
                        row.update(needed)
                for (start, _), variable in own.items():
                    if start == source:
                        row[variable] = -1.0
                self._rows.append((row, 1.0))

    def solve(self, options: Search) -> Found:
        """The optimum of the programme as it stands. Raises BadInput where there is none."""
        extra = [terms for terms, _, _ in self._memory.values()]
        rows = self._constant if not extra else vstack([self._constant, _matrix(extra, len(self._cost))])
        bounds = [bound for _, bound in self._rows] + [bound for _, bound, _ in self._memory.values()]
        scale = 1.0 / max(max(self._cost), 1e-12)
        answer = milp(
            np.array(self._cost) * scale,
            integrality=np.array(self._integral, dtype=int),
            bounds=Bounds(0.0, 1.0),
            constraints=[
                LinearConstraint(rows, ub=bounds),
                LinearConstraint(self._sums, *[[b for _, b in self._equal]] * 2),
            ],
            options={"mip_rel_gap": options.gap, "time_limit": options.time_limit_seconds},
        )
        if answer.x is None:
            raise BadInput(f"no program fits the ranks' memory ({answer.message.strip()}). {_REMEDY}")
        rules = tuple(max(own, key=lambda n: answer.x[own[n]]) for own in self._choices)
        kept = {name: max(own, key=lambda s: answer.x[own[s]]) for name, own in self._kept.items()}
        execution = Execution(self._model, rules, kept, self._shares)
        return Found(execution, rules, kept, execution.seconds, answer.status == 0)

    def _limit_memory(self, rank: int, moment: int, limit: float, found: float) -> None:
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


def _key(terms: Terms) -> frozenset[tuple[int, float]]:
    return frozenset(terms.items())


def _states_key(states: dict[State, Terms]) -> frozenset[tuple[State, frozenset[tuple[int, float]]]]:
    return frozenset((state, _key(terms)) for state, terms in states.items())


def _minus(terms: Terms, others: Terms) -> Terms:
    result = dict(terms)
    for variable, factor in others.items():
        result[variable] = result.get(variable, 0.0) - factor
    return result


def _matrix(rows: Sequence[Terms], columns: int) -> csr_matrix:
    counts = np.cumsum([0, *(len(row) for row in rows)])
    indices = [variable for row in rows for variable in row]
    return csr_matrix(([f for row in rows for f in row.values()], indices, counts), shape=(len(rows), columns))
