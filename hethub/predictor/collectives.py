"""What collectives over replicas add to a programme: gathers and reductions beside compute, steps, and waits for both."""

from collections.abc import Iterable

from hethub.predictor.costs import PlanCosts
from hethub.predictor.lean import LeanCosts
from hethub.predictor.programme import Compute, Place
from hethub.predictor.replay import Programme
from hethub.predictor.state_costs import Portion
from hethub.spec.layout import Layout
from hethub.spec.schedule import Kind

Pass = tuple[Kind, int]  # all tiles one way through one part


class Stage:
    """The passes of one stage's replicas: their first and last nodes."""

    def __init__(self, compute: Compute, stage: int) -> None:
        replicas = range(len(compute.layout.stages[stage].replicas))
        self.index, self.places = stage, [(stage, replica) for replica in replicas]
        self.first: dict[Pass, list[int]] = {}
        self.last: dict[Pass, list[int]] = {}
        for place in self.places:
            seen: dict[Pass, tuple[int, int]] = {}
            for entry in compute.entries[place]:
                if entry.action.is_compute:
                    key = (entry.action.kind, entry.action.part)
                    seen[key] = (seen[key][0] if key in seen else entry.node, entry.node)
            for key, (first, last) in seen.items():
                self.first.setdefault(key, []).append(first)
                self.last.setdefault(key, []).append(last)

    def completing(self, part: int) -> list[int]:
        """The last nodes that add to the part's gradients, on every replica."""
        return self.last.get((Kind.WEIGHT, part), self.last[Kind.BACKWARD, part])


class Collectives:
    """Wires the REDUCE, STEP and GATHER actions of a programme, and adds the streams they wait for.

    `shown[n]` are the seconds of communication that an actor waiting for node n sees at most; `optimizer_seconds` what
    each replica spends on its own steps.
    """

    def __init__(self, layout: Layout, costs: PlanCosts | LeanCosts, compute: Compute) -> None:
        self.layout, self.costs, self.compute = layout, costs, compute
        self.programme: Programme = compute.programme
        self.shown: dict[int, float] = {}
        self.optimizer_seconds: dict[Place, float] = dict.fromkeys(compute.entries, 0.0)
        stages = [Stage(compute, stage) for stage in range(layout.num_stages)]
        for stage in stages:
            if costs.state.in_rounds(stage.index):
                self._wait_after_rounds(stage)
                continue
            by_pass, sharded = costs.state.in_passes(stage.index), costs.state.level(stage.index) >= 2
            if by_pass:
                self._collect_by_pass(stage, sharded)
            if not (by_pass and sharded):
                self._reduce_beside(stage)
        self.norm = self._meet([node for place in compute.entries for _, node in self._actions(place, Kind.REDUCE)])
        for stage in stages:
            self._step_and_gather(stage)

    @property
    def steps_by_part(self) -> bool:
        """Whether some replica steps before all its tiles are through."""
        steps = (list(self._actions(place, Kind.STEP)) for place in self.compute.entries)
        return any(len(own) > 1 for own in steps)

    def _actions(self, place: Place, kind: Kind) -> Iterable[tuple[int, int]]:
        """Part and node of a replica's actions of a kind."""
        for entry in self.compute.entries[place]:
            if entry.action.kind is kind:
                yield entry.action.part, entry.node

    def _portion(self, stage: Stage, part: int) -> Portion | None:
        portions = self.costs.state.portions[stage.index]
        return portions[part] if len(portions) > 1 else None

    @staticmethod
    def _parts(stage: Stage) -> list[int]:
        """The stage's parts in the order in which their gradients are complete."""
        parts = [part for kind, part in stage.last if kind is Kind.BACKWARD]
        return sorted(parts, key=lambda part: stage.completing(part)[0])

    def _reduces(self, stage: Stage, part: int) -> list[int]:
        """The REDUCE nodes that wait for a part: its own, or the one that is for all parts."""
        found = {node: which for place in stage.places for which, node in self._actions(place, Kind.REDUCE)}
        alone = len(set(found.values())) == 1
        return [node for node, which in found.items() if alone or which == part]

    def _meet(self, nodes: list[int], seconds: float = 0.0) -> int:
        """A node that ends `seconds` after the last of `nodes`."""
        node = self.programme.add(self.programme.add_actor(), 0.0, [(source, seconds) for source in nodes])
        self.shown[node] = seconds
        return node

    def _beside(self, stream: int, seconds: float, after: list[int], ahead: float = 1.0) -> int:
        """A node on a stream, begun while the last `ahead` of each of the nodes `after` still runs."""
        needs = [(source, -ahead * self.programme.seconds[source]) for source in after]
        node = self.programme.add(stream, seconds, needs)
        self.shown[node] = seconds
        return node

    def _wait(self, waiting: Iterable[int], *sources: int) -> None:
        for node in waiting:
            self.programme.needs[node] += [(source, 0.0) for source in sources]

    def _wait_after_rounds(self, stage: Stage) -> None:
        """In rounds only the last layer's reduction is still under way when compute ends."""
        for part in self._parts(stage):
            tail = self.costs.state.reduction(stage.index, self._portion(stage, part)).tail_seconds
            self._wait(self._reduces(stage, part), self._meet(stage.completing(part), tail))

    def _reduce_beside(self, stage: Stage) -> None:
        """A part's gradients are summed from its last tile's backward on; the last bucket cannot start before its end."""
        stream = self.programme.add_actor()
        for part in self._parts(stage):
            reduction = self.costs.state.reduction(stage.index, self._portion(stage, part))
            if reduction.seconds:
                node = self._beside(stream, reduction.seconds, stage.completing(part))
                tail = self._meet(stage.completing(part), reduction.tail_seconds)
                self._wait(self._reduces(stage, part), node, tail)

    def _collect_by_pass(self, stage: Stage, sharded: bool) -> None:
        """Weights brought once per part and pass while the pass before runs; where gradients are `sharded`, one reduction per
        part while the next pass runs.

        Two slots of memory: the pass after the next waits for a reduction.
        """
        stream = self.programme.add_actor()
        passes = sorted((key for key in stage.first if key[0] is not Kind.WEIGHT), key=lambda key: stage.first[key][0])
        reduced: list[int] = []
        for index, (kind, part) in enumerate(passes):
            portion = self.costs.state.portions[stage.index][part]
            gather = sum(self.costs.state.gather_seconds(stage.index, portion))
            if gather:
                started = stage.last[passes[index - 2]] if index > 1 else []
                self._wait(stage.first[kind, part], self._beside(stream, gather, started, ahead=0.0))
            if sharded and index and passes[index - 1][0] is Kind.BACKWARD:
                self._wait(stage.first[kind, part], *reduced[-1:])
                reduced.append(self._reduce_pass(stage, stream, passes[index - 1][1]))
        if sharded:
            self._reduce_pass(stage, stream, passes[-1][1])

    def _reduce_pass(self, stage: Stage, stream: int, part: int) -> int:
        """Adds the reduction of a part, layer by layer while the last tile passes it."""
        layers = self.costs.state.reduce_seconds(stage.index, self.costs.state.portions[stage.index][part])
        last = stage.completing(part)
        node = self._beside(stream, sum(layers), last, ahead=1.0 - 1.0 / len(layers))
        self._wait(self._reduces(stage, part), node, self._meet(last, layers[0]))
        return node

    def _step_and_gather(self, stage: Stage) -> None:
        """Steps behind all compute wait for the norm of all stages' gradients; gathers wait for all owners."""
        steps = [
            entry for place in stage.places for entry in self.compute.entries[place] if entry.action.kind is Kind.STEP
        ]
        by_part = len({entry.action.part for entry in steps}) > 1
        stepped = {
            part: self._meet([entry.node for entry in steps if entry.action.part == part])
            for part in {entry.action.part for entry in steps}
        }
        for place in stage.places:
            entries = self.compute.entries[place]
            computing = max(i for i, entry in enumerate(entries) if entry.action.is_compute)
            for index, (action, node, _) in enumerate(entries):
                portion = self._portion(stage, action.part) if by_part else None
                if action.kind is Kind.STEP:
                    own = self.costs.optimizer(*place, portion)
                    self.optimizer_seconds[place] += own
                    self.programme.seconds[node] = max(self.programme.seconds[node], own)
                    if index > computing and not by_part:
                        self._wait([node], self.norm)
                elif action.kind is Kind.GATHER:
                    seconds = self.costs.state.reduction(stage.index, portion).gather_seconds
                    self.programme.seconds[node] = seconds
                    if seconds:  # else nobody steps for others
                        self._wait([node], stepped[action.part])
