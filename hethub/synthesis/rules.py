"""The sharding rules of every operator of a graph: from the states of its inputs to the states of its outputs.

A tensor's state is whole (the same on every rank), a cut along one dimension, or partial sums. A rule is a triple
{states before} operator {states after}; replacing is always one. Cuts that rules tie together form an axis: samples,
heads, features, experts. Every cut of an axis uses the same shares, so no rule ever moves data.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Literal, NamedTuple

import torch

from hethub.spec.errors import BadInput
from hethub.synthesis.graph import Graph, Operator, repeated, repeated_parameters
from hethub.synthesis.table import HEAVY, RESHAPES, SUM, Label, Shape, Shapes, labels_of, linear_in, short

WHOLE: Literal["whole"] = "whole"
PARTIAL: Literal["partial"] = "partial"
# Types that torch's Gloo does not carry, as others of their width.
CARRIED_AS = {torch.bool: torch.uint8, torch.int16: torch.float16, torch.uint16: torch.float16}
SAMPLES = "samples"  # begins the name of an axis of inputs' first dimension; a module may have several


class Cut(NamedTuple):
    """Dimension `dim` consists of `blocks` equal blocks, and every rank has its piece of each block.

    Merged dimensions need it: [tokens, samples] flattened to one dimension is cut by samples inside every token.
    """

    dim: int
    blocks: int

    def __str__(self) -> str:
        return f"cut {self.dim}" if self.blocks == 1 else f"cut {self.dim} in {self.blocks} blocks"


State = Cut | Literal["whole", "partial"]
_CUT = re.compile(r"cut (\d+)(?: in (\d+) blocks)?")


def read_state(text: str) -> State:
    """The state that `str` shows so. Raises BadInput."""
    for name in (WHOLE, PARTIAL):
        if text == name:
            return name
    found = _CUT.fullmatch(text)
    if found is None:
        raise BadInput(f"'{text}' is no state of a tensor; write whole, partial, `cut 0` or `cut 0 in 2 blocks`.")
    return Cut(int(found[1]), int(found[2] or 1))


@dataclass(frozen=True)
class Rule:
    """The states of an operator's inputs and, given those, of its outputs."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]  # of the tensors it makes

    @cached_property
    def is_cut(self) -> bool:
        """Whether ranks share the work out; where not, every rank does all of it."""
        return any(isinstance(state, Cut) for state in (*self.inputs, *self.outputs))

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Cuts that share their shares: ranks get numbers of `atoms`, which no cut of the axis divides."""

    atoms: int
    name: str


class Rules:
    """The rules of each operator of a graph, and the axes that they make."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.unknown: dict[str, str] = {}  # operators without a rule of their own, and the module of the first
        self._cuts: list[dict[Cut, None]] = [
            {Cut(d, 1): None for d, size in enumerate(tensor.shape) if size > 1} for tensor in graph.tensors
        ]
        self._labels = [self._find_labels(operator) for operator in graph.operators]
        self._links = _Links()
        self._fresh = set(range(len(graph.tensors)))  # tensors whose cuts their operators have not all heard of
        while self._fresh:
            self._spread_all()
        self.of = [self._rules(number) for number in range(len(graph.operators))]
        for parameter, gradient in self._trained():
            for cut in self._cuts[parameter]:
                self._links.join([(parameter, cut), (gradient, cut)])
        self.first = self._fold(repeated(graph))
        self._axis_of: dict[tuple[int, Rule], int | None] = {}

    def _fold(self, first: list[int]) -> list[int]:
        """Return for each operator the earlier one that is decided together with it. Layers that are cut alike have the same
        shares."""
        graph = self.graph
        alike = [earlier if self.of[n] == self.of[earlier] else n for n, earlier in enumerate(first)]
        for number, earlier in enumerate(alike):
            if number != earlier:
                own, other = graph.operators[number], graph.operators[earlier]
                pairs = [*zip(own.inputs, other.inputs, strict=True), *zip(own.made, other.made, strict=True)]
                for rule in self.of[number]:
                    for (tensor, before), state in zip(pairs, (*rule.inputs, *rule.outputs), strict=True):
                        if isinstance(state, Cut) and tensor != before:
                            self._links.join([(before, state), (tensor, state)])
        return alike

    @cached_property
    def first_parameter(self) -> dict[str, str]:
        """The parameter of an earlier layer that is kept in the same way, for each parameter."""
        tensors, found = self.graph.parameters, repeated_parameters(self.graph, self.first)
        return {n: o if self.cuts(tensors[n]) == self.cuts(tensors[o]) else n for n, o in found.items()}

    @property
    def all_cuts(self) -> list[list[Cut]]:
        """All cuts of each tensor that occur in rules."""
        return [list(own) for own in self._cuts]

    def cuts(self, tensor: int) -> list[Cut]:
        """Return all cuts of a tensor that the search considers."""
        return [cut for cut in self._cuts[tensor] if self.axis(tensor, cut) in self.worth_cutting]

    def axis(self, tensor: int, cut: Cut) -> int:
        """Return the number of the axis to which a cut belongs."""
        return self._axes[tensor, cut]

    @cached_property
    def worth_cutting(self) -> frozenset[int]:
        """Axes of more than one atom along which matrix products can be cut; the search looks at no others."""
        found: set[int | None] = set()
        for number, operator in enumerate(self.graph.operators):
            if short(operator) in HEAVY:
                found.update(self.axis_of(number, rule) for rule in self.of[number])
        return frozenset(axis for axis in found if axis is not None and self.axes[axis].atoms > 1)

    def axis_of(self, operator: int, rule: Rule) -> int | None:
        """Return the axis along which a rule divides the work, or None if every rank does all of it."""
        key = operator, rule
        if key not in self._axis_of:
            self._axis_of[key] = self._find_axis(operator, rule)
        return self._axis_of[key]

    def _find_axis(self, operator: int, rule: Rule) -> int | None:
        owner = self.graph.operators[operator]
        pairs = [*zip(owner.inputs, rule.inputs, strict=True), *zip(owner.made, rule.outputs, strict=True)]
        return next((self.axis(tensor, state) for tensor, state in pairs if isinstance(state, Cut)), None)

    @cached_property
    def axes(self) -> list[Axis]:
        roots, members = list(self._numbers), self._links.members()  # a cut that is joined to none is met in _numbers
        return [self._axis(members[root]) for root in roots]

    @cached_property
    def _axes(self) -> dict[tuple[int, Cut], int]:
        return {
            (t, cut): self._numbers[self._links.root((t, cut))] for t, cuts in enumerate(self._cuts) for cut in cuts
        }

    @cached_property
    def _numbers(self) -> dict[tuple[int, Cut], int]:
        roots = [self._links.root((t, cut)) for t, cuts in enumerate(self._cuts) for cut in cuts]
        return {root: number for number, root in enumerate(dict.fromkeys(roots))}

    def _axis(self, members: Sequence[tuple[int, Cut]]) -> Axis:
        sizes = [self.graph.tensors[tensor].shape[cut.dim] // cut.blocks for tensor, cut in members]
        return Axis(atoms=gcd(*sizes), name=self._name(members))

    def _name(self, members: Sequence[tuple[int, Cut]]) -> str:
        cut_inputs = [n for n, tensor in enumerate(self.graph.inputs) if Cut(0, 1) in self._cuts[tensor]]
        own = [n for n in cut_inputs if (self.graph.inputs[n], Cut(0, 1)) in members]
        if own:
            return SAMPLES if own[0] == cut_inputs[0] else f"{SAMPLES} of input {own[0]}"
        owned = {tensor: name for name, tensor in self.graph.parameters.items()}
        of_parameters = [(tensor, cut) for tensor, cut in members if tensor in owned]
        tensor, cut = (of_parameters or members)[0]
        blocks = f", in {cut.blocks} blocks" if cut.blocks > 1 else ""
        return f"dimension {cut.dim} of {owned.get(tensor, self.graph.tensors[tensor].name)}{blocks}"

    def _find_labels(self, operator: Operator) -> list[Label] | None:
        if short(operator) in RESHAPES:
            return None
        found = labels_of(self._shapes(operator))
        if found is None:
            self.unknown.setdefault(operator.key, operator.module)
        return found or []

    def _shapes(self, operator: Operator) -> Shapes:
        return Shapes(operator, self.graph.shapes_in(operator), self.graph.shapes_out(operator))

    def _trained(self) -> list[tuple[int, int]]:
        """Parameters and their gradients, which end in the same state."""
        gradients = self.graph.gradients
        return [(self.graph.parameters[name], found) for name, found in gradients.items() if found is not None]

    def _spread_all(self) -> None:
        fresh, self._fresh = self._fresh, set()
        for number, operator in enumerate(self.graph.operators):
            if any(t in fresh or t in self._fresh for t in (*operator.inputs, *operator.made)):
                self._spread(number)
        for parameter, gradient in self._trained():
            for cut in list(self._cuts[gradient]):
                self._learn(parameter, cut)
            for cut in list(self._cuts[parameter]):
                self._learn(gradient, cut)

    def _spread(self, number: int) -> None:
        """Carry cuts of each of an operator's tensors over to its other tensors."""
        operator, labels = self.graph.operators[number], self._labels[number]
        if labels is None:
            source, target = operator.inputs[0], operator.made[0]
            self._through(source, target)
            self._through(target, source)
        for label in labels or ():
            places = _places(operator, label)
            for blocks in {cut.blocks for tensor, dim in places for cut in self._cuts[tensor] if cut.dim == dim}:
                for tensor, dim in places:
                    self._learn(tensor, Cut(dim, blocks))

    def _through(self, source: int, target: int) -> None:
        shapes = self.graph.tensors[source].shape, self.graph.tensors[target].shape
        for cut in list(self._cuts[source]):
            image = reshaped(*shapes, cut)
            if image is not None:
                self._learn(target, image)

    def _learn(self, tensor: int, cut: Cut) -> None:
        if cut not in self._cuts[tensor]:
            self._cuts[tensor][cut] = None
            self._fresh.add(tensor)

    def _rules(self, number: int) -> list[Rule]:
        operator, labels = self.graph.operators[number], self._labels[number]
        wholes = (WHOLE,) * len(operator.inputs)
        rules = [Rule(wholes, (WHOLE,) * len(operator.made))]
        if labels is None:
            rules += self._reshape_rules(operator)
        narrow = any(self.graph.tensors[tensor].dtype in CARRIED_AS for tensor in operator.made)
        for label in labels or ():
            if narrow and SUM in label.outputs:  # whose sums torch's Gloo does not carry
                continue
            places = _places(operator, label)
            blocks = dict.fromkeys(c.blocks for tensor, dim in places for c in self._cuts[tensor] if c.dim == dim)
            for count in blocks:
                rules.append(_rule(label, count))
                self._links.join([(tensor, Cut(dim, count)) for tensor, dim in places])
        for positions in linear_in(self._shapes(operator)) if self._adds(operator) else ():
            before = tuple(PARTIAL if position in positions else WHOLE for position in range(len(operator.inputs)))
            rules.append(Rule(before, (PARTIAL,) * len(operator.made)))
        return rules

    def _adds(self, operator: Operator) -> bool:
        """Whether what it makes of parts adds up to what it makes of their sum: not of truth values, of what torch's Gloo has
        no sums of, nor where each part is cut off to a whole number."""
        before, after = ([self.graph.tensors[t].dtype for t in own] for own in (operator.inputs, operator.made))
        cuts_off = any(d.is_floating_point for d in before) and not all(
            d.is_floating_point or d.is_complex for d in after
        )
        return not cuts_off and not any(dtype in CARRIED_AS for dtype in (*before, *after))

    def _reshape_rules(self, operator: Operator) -> list[Rule]:
        source, target = operator.inputs[0], operator.made[0]
        rules = []
        for cut in self._cuts[source]:
            image = reshaped(self.graph.tensors[source].shape, self.graph.tensors[target].shape, cut)
            if image is not None:
                rules.append(Rule((cut,), (image,)))
                self._links.join([(source, cut), (target, image)])
        return rules


def reshaped(source: Shape, target: Shape, cut: Cut) -> Cut | None:
    """The cut of the reshaped tensor that has every rank's elements where `cut` of the tensor has them."""
    before = cut.blocks * prod(source[: cut.dim])  # blocks of the flat tensor, each shared out among the ranks
    passed = 1
    for dim, size in enumerate(target):
        if passed <= before < passed * size:
            blocks = before // passed
            return Cut(dim, blocks) if before % passed == 0 and size % blocks == 0 else None
        passed *= size
    return None


def _places(operator: Operator, label: Label) -> list[tuple[int, int]]:
    pairs = [*zip(operator.inputs, label.inputs, strict=True), *zip(operator.made, label.outputs, strict=True)]
    return [(tensor, dim) for tensor, dim in pairs if isinstance(dim, int)]


def _rule(label: Label, blocks: int) -> Rule:
    def state(dim: int | str | None) -> State:
        return WHOLE if dim is None else PARTIAL if dim == SUM else Cut(int(dim), blocks)

    return Rule(tuple(map(state, label.inputs)), tuple(map(state, label.outputs)))


class _Links:
    """Which cuts must be shared out alike (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[tuple[int, Cut], tuple[int, Cut]] = {}

    def root(self, member: tuple[int, Cut]) -> tuple[int, Cut]:
        parent = self._parents.setdefault(member, member)
        while parent != member:
            self._parents[member] = self._parents[parent]
            member, parent = parent, self._parents[parent]
        return member

    def join(self, members: Sequence[tuple[int, Cut]]) -> None:
        roots = [self.root(member) for member in members]
        for root in roots[1:]:
            self._parents[self.root(root)] = self.root(roots[0])

    def members(self) -> dict[tuple[int, Cut], list[tuple[int, Cut]]]:
        """Return the cuts that must be divided alike, by root."""
        found: dict[tuple[int, Cut], list[tuple[int, Cut]]] = {}
        for member in list(self._parents):
            found.setdefault(self.root(member), []).append(member)
        return found
