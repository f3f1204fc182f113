"""The program of least cost for given shares, by an integer programme over forward and backward together.

One variable chooses each operator's rule and each parameter's state, one pays for each move of a tensor between
states. HiGHS proves the optimum. Sufficient factors (gathering the operands of a weight gradient instead of summing
it), ZeRO's sharded parameters and tensor parallelism are points of this space and come out where they cost least.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix, vstack

from hethub.spec.errors import BadInput
from hethub.synthesis.costs import (
    Model,
    Move,
    Shares,
    held_bytes,
    is_all_to_all,
    is_view,
    move_cost,
    rule_seconds,
    update_seconds,
)
from hethub.synthesis.program import (
    TRAINING_COPIES,
    Execution,
    Living,
    move_buffers,
    runs_beside,
    takes_memory,
)
from hethub.synthesis.rules import PARTIAL, WHOLE, Rule, State

WHOLE_NUMBER = 1e-6  # HiGHS's own tolerance of what is one
Terms = dict[int, float]  # a linear expression: coefficients by variable
Price = Callable[[Shares], float]  # seconds, for given shares
Allows = Callable[[int, Rule], bool]


class Found(NamedTuple):
    """The best program for some shares."""

    execution: Execution
    is_optimal: bool


@dataclass(frozen=True, kw_only=True)
class Search:
    """What the search is allowed."""

    time_limit_seconds: float = 60.0
    gap: float = 1e-3  # the proved distance to the least cost at which the search may end, as a fraction of it
    gap_in_memory: float = 0.05  # the same where memory limits the program: bounds are loose there, and proofs long
    memory_rounds: int = 12
    moments: int = 32  # of each rank, in which what lives is limited after a round


USUAL = Search()
_OUT_OF_TIME = 1  # scipy's status of a programme that HiGHS left at its time limit
_REMEDY = "Use a smaller batch, a smaller model, or accelerators with more memory."


class NoRoom(BadInput):
    """No program keeps every rank within its memory."""


class Problem:
    """Variables and constraints of a model's programs; their costs, which shares decide, come with every question."""

    def __init__(self, model: Model, allows: Allows | None = None, *, cuts_parameters: bool = True) -> None:
        """`allows` says which rules may be used, given an operator's number. Parameters stay whole unless `cuts_parameters`."""
        if model.costs.size == 1:  # its pieces would be copies of the whole, which the costs do not know
            allows, cuts_parameters = (lambda number, rule: rule == model.rules.of[number][0]), False
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
        # Per tensor: from, to, and its variable.
        self._moves: list[list[tuple[State, State, int]]] = [[] for _ in model.graph.tensors]
        self._beside: list[int] = []  # of moves that run beside what is computed
        self._connected: dict[object, dict[tuple[State, State], int]] = {}  # moves, by how a tensor is made and needed
        self._memory: dict[tuple[int, int], tuple[csr_matrix, float, float]] = {}  # row, bound, slack
        self._parameters()
        self._operators()
        for tensor in range(len(model.graph.tensors)):
            self._connect(tensor)
        self._constant = _matrix([t for t, _ in self._rows], len(self._prices))
        self._sums = _matrix([t for t, _ in self._equal], len(self._prices))

    def search(
        self,
        shares: Shares,
        limits: Sequence[float] | None = None,
        options: Search = USUAL,
        visible: float = 1.0,
    ) -> Found:
        """Return the program with the least sum of seconds within `limits` bytes on each rank. Of the sums of gradients only the
        fraction `visible` counts.

        A round without memory limits comes first; the moments in which a rank exceeds its own become constraints, and
        the programme is solved again. Raises BadInput where nothing fits.
        """
        self._price(shares, visible)
        for _ in range(options.memory_rounds):
            found = self.solve(options)
            living = Living(found.execution)
            over = [] if limits is None else [rank for rank, most in enumerate(limits) if living.peak[rank] > most]
            if not over:
                return found
            assert limits is not None
            for rank in over:
                highest = np.argsort(-living.most[:, rank], kind="stable")[: options.moments]
                for moment in highest[living.most[highest, rank] > limits[rank]].tolist():
                    self._limit_memory(rank, moment, limits[rank], living.most[moment, rank])
        raise NoRoom(
            f"no program was found whose ranks all keep within their memory; rank {over[0]} needs more. {_REMEDY}"
        )

    def _price(self, shares: Shares, visible: float) -> None:
        self._shares, self._memory = shares, {}
        self.__dict__.pop("_lives", None)
        self._cost = [0.0 if price is None else price[0] * price[1](shares) for price in self._prices]
        for variable in self._beside:
            self._cost[variable] *= visible

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
        times = Counter(alike[name] for name in graph.stepped)
        for name, tensor in graph.parameters.items():
            first = alike[name]
            if first == name:
                cuts = self._model.rules.cuts(tensor) if self._cuts_parameters else []
                states: list[State] = [WHOLE, *cuts]
                own = {
                    state: self._variable(self._update(tensor, state), times[name], integral=True) for state in states
                }
                self._equal.append((dict.fromkeys(own.values(), 1.0), 1.0))
                self._kept[name], self._made[tensor] = own, {state: {var: 1.0} for state, var in own.items()}
            else:
                self._kept[name], self._made[tensor] = self._kept[first], self._made[graph.parameters[first]]
            gradient = graph.gradients[name]
            if gradient is not None:
                self._needs[gradient].append(self._made[tensor])
        one = self._variable()
        self._equal.append(({one: 1.0}, 1.0))
        for tensor in graph.results:
            self._needs[tensor].append({WHOLE: {one: 1.0}})

    def _operators(self) -> None:
        alike = self._model.rules.first
        times = Counter(alike)
        needs: list[list[dict[State, Terms]]] = []  # per operator, what it needs of each input
        for number, operator in enumerate(self._model.graph.operators):
            earlier = alike[number]
            if earlier == number:
                own = self._choose(number, times[number])
                needed: list[dict[State, Terms]] = [{} for _ in operator.inputs]
                for n, variable in own.items():
                    rule = self._model.rules.of[number][n]
                    for place, state in enumerate(rule.inputs):
                        needed[place].setdefault(state, {})[variable] = 1.0
                    for tensor, state in zip(operator.made, rule.outputs, strict=True):
                        self._made[tensor].setdefault(state, {})[variable] = 1.0
            else:
                own, needed = self._choices[earlier], needs[earlier]
                for tensor, other in zip(operator.made, self._model.graph.operators[earlier].made, strict=True):
                    self._made[tensor] = self._made[other]
            self._choices.append(own)
            needs.append(needed)
            for tensor, states in zip(operator.inputs, needed, strict=True):
                self._needs[tensor].append(states)

    def _choose(self, number: int, times: int) -> dict[int, int]:
        """Add a variable for each usable rule of an operator, which is 1 if the rule is chosen, and return them by rule. The
        operator occurs `times` times."""
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
        Equal layers share what they make and need, the objects themselves.
        """
        needs, made = self._needs[tensor], self._made[tensor]
        if not needs:
            return
        unlike = {id(states): states for states in needs}
        key = self._model.graph.tensors[tensor].num_bytes, id(made), frozenset(unlike)
        if key in self._connected:
            for (source, target), variable in self._connected[key].items():
                self._moves[tensor].append((source, target, variable))
                price = self._prices[variable]
                assert price is not None
                self._prices[variable] = price[0] + 1.0, price[1]
            return
        own: dict[tuple[State, State], int] = {}

        def move(source: State, target: State, held: Terms) -> int:
            """Add a variable that is 1 if the tensor is brought into `target`. `held` says whether it is in `source`."""
            variable = self._variable(self._transport(tensor, source, target))
            own[source, target] = variable
            if runs_beside(self._model.graph, Move(tensor, source, target, None)):
                self._beside.append(variable)
            self._moves[tensor].append((source, target, variable))
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
            wanted = [states[target] for states in unlike.values() if target in states]
            self._rows += [(_minus(terms, found), 0.0) for terms in wanted]
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
        """The optimum of the programme as it stands. Raises BadInput where there is none.

        Its linear relaxation is solved first: an optimum of that in whole numbers is the programme's own.
        """
        extra = [row for row, _, _ in self._memory.values()]
        rows = vstack([self._constant, *extra]) if extra else self._constant
        bounds = [bound for _, bound in self._rows] + [bound for _, bound, _ in self._memory.values()]
        cost = np.array(self._cost) / max(max(self._cost), 1e-12)
        whole, gap = np.array(self._integral, dtype=int), options.gap_in_memory if extra else options.gap
        for integrality in (np.zeros_like(whole), whole):
            answer = milp(
                cost,
                integrality=integrality,
                bounds=Bounds(0.0, 1.0),
                constraints=[
                    LinearConstraint(rows, ub=bounds),
                    LinearConstraint(self._sums, *[[b for _, b in self._equal]] * 2),
                ],
                options={"mip_rel_gap": gap, "time_limit": options.time_limit_seconds},
            )
            if answer.x is not None and (np.abs(answer.x - np.round(answer.x)) * whole).max() < WHOLE_NUMBER:
                break
        if answer.x is None:
            if answer.status != _OUT_OF_TIME:
                raise NoRoom(f"no program fits the ranks' memory. {_REMEDY}")
            raise BadInput(f"no program was found in time_limit_seconds ({options.time_limit_seconds:g}); allow more.")
        rules = [max(own, key=lambda n: answer.x[own[n]]) for own in self._choices]
        kept = {name: max(own, key=lambda s: answer.x[own[s]]) for name, own in self._kept.items()}
        return Found(Execution(self._model, rules, kept, self._shares), answer.status == 0 and not extra)

    def _limit_memory(self, rank: int, moment: int, limit: float, found: float) -> None:
        """What lives on `rank` while operator `moment` runs is at most `limit` bytes from now on.

        Where that was asked before and did not suffice (what is counted is a little more), the bound is lowered by that.
        """
        before = self._memory.get((rank, moment))
        slack = before[2] + (found - limit) if before else 0.0
        variables, first, last, held = self._lives
        living = (first <= moment) & (moment <= last)
        row = np.bincount(variables[living], held[living, rank], len(self._cost))
        self._memory[rank, moment] = csr_matrix(row / limit), (limit - slack) / limit, slack

    @cached_property
    def _lives(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What may live: the variable that says whether it does, its first and last operator, its bytes on each rank."""
        graph, model, shares = self._model.graph, self._model, self._shares
        end = len(graph.operators)
        found: list[tuple[int, int, int, np.ndarray]] = []
        moved: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by variable, what is held after and during a move

        def add(terms: Sequence[int] | Terms, tensor: int, state: State, first: int, last: int, times: int = 1) -> None:
            held = times * held_bytes(model, shares, tensor, state)
            found.extend((variable, first, last, held) for variable in terms)

        for name, own in self._kept.items():
            for state, variable in own.items():
                add([variable], graph.parameters[name], state, 0, end, TRAINING_COPIES)
        for tensor in (*graph.inputs, *graph.buffers.values()):
            add(self._made[tensor][WHOLE], tensor, WHOLE, 0, end)
        for tensor, names in graph.parameter_of_gradient.items():
            for state, variable in self._kept[names[0]].items():
                add([variable], tensor, state, graph.producers[tensor] + 1, end)
        for tensor, until in self._ends.items():
            born = graph.producers.get(tensor, -1)
            if born >= 0 and takes_memory(graph, graph.operators[born]):
                for state, terms in self._made[tensor].items():
                    add(terms, tensor, state, born, until)
            # It moves when it is first needed, a gradient once it is made.
            used = graph.consumers.get(tensor, [born])[0]
            for source, target, variable in self._moves[tensor]:
                if variable not in moved:  # equal layers share it
                    kind = move_cost(model, shares, tensor, source, target)[1]
                    buffers = move_buffers(model, shares, Move(tensor, source, target, kind))
                    moved[variable] = held_bytes(model, shares, tensor, target), buffers
                held, buffers = moved[variable]
                found.append((variable, used, until, held))
                for moment in {used, born} if tensor in graph.parameter_of_gradient else {used}:
                    found.append((variable, moment, moment, buffers))
        variables, firsts, lasts, sizes = zip(*found, strict=True)
        return np.array(variables), np.array(firsts), np.array(lasts), np.array(sizes)

    @cached_property
    def _ends(self) -> dict[int, int]:
        """Return for each tensor the last operator that reads it or a view of it. What is kept of gradients lives longer."""
        graph = self._model.graph
        ends: dict[int, int] = {}
        keeps = set(graph.results)
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
