"""A program bound to its graph for one number of samples: what every rank's part follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hethub.spec.errors import BadInput
from hethub.synthesis.costs import Move, Shares
from hethub.synthesis.graph import Graph
from hethub.synthesis.program import Program
from hethub.synthesis.ratios import rounded
from hethub.synthesis.rules import WHOLE, Cut, Rule, Rules, State


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A program for one number of samples: every operator's rule, how tensors get where they are needed, and shares."""

    graph: Graph
    rules: Rules
    chosen: list[Rule]
    moves: dict[tuple[int, State], Move]  # by tensor and the state that it is brought into
    shares: Shares

    @classmethod
    def planned(cls, graph: Graph, program: Program) -> "Layout":
        """Return the layout of a program on the graph for which it was made. Raises BadInput if the program cannot be run as it
        is, which no search produces."""
        rules = Rules(graph)
        moves = {(move.tensor, move.target): move for move in program.moves}
        try:
            chosen = [own[rule] for own, rule in zip(rules.of, program.rules, strict=True)]
            layout = cls(graph=graph, rules=rules, chosen=chosen, moves=moves, shares=program.shares)
            layout._check(program)
        except (LookupError, RecursionError, ValueError):
            raise BadInput(
                "the program does not fit together: shares that are not all of an axis, or a rule, a cut or a move that there is not, as"
                " where its file was changed by hand. Plan again."
            ) from None
        return layout

    def _check(self, program: Program) -> None:
        """Raises ValueError or LookupError where ranks' shares are not all of an axis, or a tensor never gets into a state
        in which it is needed."""
        for axis, own in zip(self.rules.axes, self.shares, strict=True):
            if len(own) != program.size or sum(own) != axis.atoms:
                raise ValueError
        graph = self.graph
        there = {(graph.parameters[name], state) for name, state in program.kept.items()}
        there |= {(tensor, WHOLE) for tensor in (*graph.inputs, *graph.buffers.values())}

        def bring(tensor: int, state: State) -> None:
            self.of(tensor, state)
            if (tensor, state) not in there:
                bring(tensor, self.moves[tensor, state].source)
                there.add((tensor, state))

        for tensor, state in tuple(there):
            self.of(tensor, state)
        for operator, rule in zip(graph.operators, self.chosen, strict=True):
            for tensor, state in zip(operator.inputs, rule.inputs, strict=True):
                bring(tensor, state)
            there.update(zip(operator.made, rule.outputs, strict=True))
        for name, gradient in graph.gradients.items():
            if gradient is not None:
                bring(gradient, program.kept[name])
        for tensor in graph.results:
            bring(tensor, WHOLE)

    @cached_property
    def shared(self) -> list[Sequence[int]]:
        """The ranks' shares of the work of each operator; empty where every rank does all of it."""
        axes = (self.rules.axis_of(number, rule) for number, rule in enumerate(self.chosen))
        return [() if axis is None else self.shares[axis] for axis in axes]

    def of(self, tensor: int, state: State) -> tuple[int, ...]:
        """Return the ranks' shares of the axis along which a tensor is cut in `state`."""
        return self.shares[self.rules.axis(tensor, state)] if isinstance(state, Cut) else ()

    def at(self, samples: int, program: Program) -> "Layout":
        """Return the layout for another number of samples, which ranks share in nearly the same ratios.

        Tensors are cut along the same dimensions; merged ones may consist of another number of blocks. Raises BadInput
        where the module's operators can no longer be cut so.
        """
        graph = self.graph.at(samples)
        rules = Rules(graph)
        cuts = [
            dict(zip(old, new, strict=True)) if [c.dim for c in old] == [c.dim for c in new] else {}
            for old, new in zip(self.rules.all_cuts, rules.all_cuts, strict=True)
        ]

        def image(tensor: int, state: State) -> State:
            return cuts[tensor][state] if isinstance(state, Cut) else state

        axes: dict[int, int] = {}
        try:
            for tensor, own in enumerate(cuts):
                for old, new in own.items():
                    if axes.setdefault(self.rules.axis(tensor, old), rules.axis(tensor, new)) != rules.axis(
                        tensor, new
                    ):
                        raise LookupError
            chosen = [rules.of[number][rule] for number, rule in enumerate(program.rules)]
            for operator, before, after in zip(graph.operators, self.chosen, chosen, strict=True):
                tensors = (*operator.inputs, *operator.made)
                states = map(image, tensors, (*before.inputs, *before.outputs))
                if tuple(states) != (*after.inputs, *after.outputs):
                    raise LookupError
            shares = [(0,) * program.size] * len(rules.axes)
            for old_axis, axis in axes.items():
                own_shares, atoms = self.shares[old_axis], rules.axes[axis].atoms
                kept = sum(own_shares) == atoms
                shares[axis] = own_shares if kept else rounded([n / sum(own_shares) for n in own_shares], atoms)
            moves = {
                (t, image(t, target)): move._replace(source=image(t, move.source), target=image(t, target))
                for (t, target), move in self.moves.items()
            }
            layout = Layout(graph=graph, rules=rules, chosen=chosen, moves=moves, shares=tuple(shares))
            for name, state in program.kept.items():
                tensor = graph.parameters[name]
                if layout.of(tensor, image(tensor, state)) != self.of(tensor, state):
                    raise LookupError
        except LookupError:
            raise BadInput(
                f"the program for {self.graph.samples} samples cannot be run with {samples}; plan again with so many, or give"
                " every step batches of one size."
            ) from None
        return layout
