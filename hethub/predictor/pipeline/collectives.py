"""Add collectives over replicas to a task graph: gathers and reductions that overlap with compute, optimizer steps, and the
waits for them."""

from collections.abc import Iterable

from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.replay import TaskGraph
from hethub.predictor.pipeline.state.costs import Portion
from hethub.predictor.pipeline.symmetry import FoldedCosts
from hethub.predictor.pipeline.task_graph import Compute
from hethub.predictor.pipeline.wiring import Place, StageNodes
from hethub.spec.layout.execution import Kind

ROUNDING = 1e-12


class Collectives:
    """Connects the REDUCE, STEP and GATHER actions of a task graph, and adds the streams for which they wait.

    `optimizer_seconds` and `gather_seconds` are the seconds that each replica spends on its own steps and on new weights.
    """

    def __init__(self, costs: PlanCosts | FoldedCosts, compute: Compute) -> None:
        self.layout, self.costs = compute.layout, costs
        self.graph: TaskGraph = compute.graph
        self._through = compute.through
        self._seconds: dict[int, float] = {}  # by node, of its communication
        self._before: dict[int, int] = {}  # by node of a stream, the one before it
        self.optimizer_seconds: dict[Place, float] = dict.fromkeys(compute.runs, 0.0)
        self.gather_seconds = self.optimizer_seconds.copy()
        self.update_seconds: dict[int, float] = {}  # of each actor, from the norm to the end of its last update
        stages = compute.wiring.stages
        for stage in stages:
            if costs.state.in_rounds(stage.index):
                self._wait_after_rounds(stage)
                continue
            by_pass, sharded = costs.state.in_passes(stage.index), costs.state.level(stage.index) >= 2
            if by_pass:
                self._collect_by_pass(stage, sharded)
            if not (by_pass and sharded):
                self._reduce_beside(stage)
        self.norm = self._meet([n for stage in stages for nodes in stage.updates[Kind.REDUCE].values() for n in nodes])
        for stage in stages:
            self._step_and_gather(stage)

    def under_way(self, node: int, ends: list[float]) -> float | None:
        """Return for how many seconds up to the end of a node its stream had been communicating without a pause. A wait for
        the node is communication for that long, and before that a wait for compute. Return None for a node that is no
        communication. `ends` are the ends of all nodes."""
        if node not in self._seconds:
            return None
        found = self._seconds[node]
        while (before := self._before.get(node)) is not None:
            if ends[node] - self._seconds[node] > (1 + ROUNDING) * ends[before]:
                break
            node = before
            found += self._seconds[node]
        return found

    def _portion(self, stage: StageNodes, chunk: int) -> Portion | None:
        """Return the portion of the stage that a chunk runs, or None where it is all of it."""
        portions = self.costs.state.portions[stage.index]
        return portions[chunk] if len(portions) > 1 else None

    def _meet(self, nodes: list[int], seconds: float = 0.0) -> int:
        """Add a node that ends `seconds` after the last of `nodes`."""
        node = self.graph.add(self.graph.add_actor(), 0.0, [(source, seconds) for source in nodes])
        self._seconds[node] = seconds
        return node

    def _beside(self, stream: int, seconds: float, after: list[int], ahead: float = 1.0) -> int:
        """Add a node to a stream. It begins when each of the nodes `after` has only its last part `ahead` left to run."""
        needs = [(source, -ahead * self.graph.seconds[source]) for source in after]
        before = self.graph.orders[stream][-1:]
        node = self.graph.add(stream, seconds, needs)
        self._seconds[node] = seconds
        if before:
            self._before[node] = before[0]
        return node

    def _wait_for_all_to_begin(self, stage: StageNodes, nodes: list[int], ahead: float) -> None:
        """Make each replica's node wait, with the part `ahead` of its work left, until the nodes of all replicas have begun,
        since they share collectives while they run."""
        if len(nodes) < 2:
            return
        begin, graph = {run.nodes[0] for run in stage.apart}, self.graph
        needs = [need for node in nodes for need in graph.needs_of(node)]
        needs += [(node - 1, 0.0) for node in nodes if node not in begin]
        all_begun = graph.add(graph.add_actor(), 0.0, needs)
        for node in nodes:
            graph.needs[node].append((all_begun, -ahead * graph.seconds[node]))

    def _wait(self, waiting: Iterable[int], *sources: int) -> None:
        for node in waiting:
            self.graph.needs[node] += [(source, 0.0) for source in sources]

    def _wait_after_rounds(self, stage: StageNodes) -> None:
        """Let steps wait for what is still under way after the last round: the last layer's reduction and what is left of
        others."""
        apart = self.costs.state.steps_apart
        for chunk in stage.chunks if apart else stage.chunks[-1:]:
            portion = self._portion(stage, chunk) if apart else None
            # A replica's sums wait for the slowest, behind which least is left.
            sizes = ((place, self.layout.replica(*place).micro_batch) for place in stage.runs)
            rest = min(self.costs.microbatch(*place, size, portion).rest.total for place, size in sizes)
            tail = self.costs.state.reduction(stage.index, portion).tail_seconds + rest
            through = [self._through.get(node, node) for node in stage.completing(chunk)]
            if layered := self.graph.layered.keys() & stage.reduces(chunk):  # which begin with the last sum
                for node in layered:
                    self.graph.seconds[node] = tail
                tail = 0.0
            self._wait(stage.reduces(chunk), self._meet(through, tail))

    def _reduce_beside(self, stage: StageNodes) -> None:
        """Add the reduction of each chunk's gradients. It overlaps with the backward of the chunk's last microbatch, except for
        its last bucket. Under `layered` the layers of a stage share buckets."""
        stream, state, before = self.graph.add_actor(), self.costs.state, 0.0
        for chunk in stage.chunks:
            reduction = state.reduction(stage.index, self._portion(stage, chunk))
            if reduction.seconds:
                node = self._beside(stream, reduction.seconds, stage.completing(chunk))
                own = slowed = reduction.slowed_seconds
                if before:  # sums of chunks that the backwards behind them have hidden
                    hidden = before + reduction.seconds - reduction.tail_seconds
                    slowed = state.slowed_seconds(stage.index, state.whole[stage.index], hidden)
                tail = self._meet(stage.completing(chunk), reduction.tail_seconds - own + slowed)
                self._wait(stage.reduces(chunk), node, tail)
                if not state.steps_apart:
                    before += reduction.seconds - own
        if self.layout.plan.schedule == "layered":
            last, seconds = stage.chunks[-1], self.costs.state.reduction(stage.index).tail_seconds
            if seconds:
                self._wait(stage.reduces(last), self._meet(stage.completing(last), seconds))

    def _collect_by_pass(self, stage: StageNodes, sharded: bool) -> None:
        """Add the gathers of weights, once for each chunk and pass, and where gradients are `sharded` one reduction for each
        chunk, which overlaps with the next pass.

        There is memory for two layers. So a pass's first layer is gathered while the first microbatch is in the layer before,
        the others during the pass itself, and a reduction must end before the pass after the next begins. CPUs communicate
        with the cores that compute, so they do one after the other.
        """
        stream, seconds, reduced = self.graph.add_actor(), self.graph.seconds, list[int]()
        passes = sorted((key for key in stage.first if key[0] is not Kind.WEIGHT), key=lambda key: stage.first[key][0])
        by_turns = self.costs.state.by_turns[stage.index]
        slots = 1 if by_turns else self.costs.state.sums_under_way(stage.index)
        gathers = {key: self._gathers(stage, *key) for key in passes}
        each = {own: [seconds[node] / len(gathers[own]) for node in stage.first[own]] for own in passes}
        layer = {
            kind: list(map(min, zip(*(each[own] for own in passes if own[0] is kind), strict=True)))
            for kind, _ in passes
        }  # by replica, of the chunk that has neither embedding nor head, if one has not
        for index, (kind, chunk) in enumerate(passes):
            before, first = passes[index - 1] if index else None, stage.first[kind, chunk]
            own, *others = gathers[kind, chunk]
            if own and by_turns:
                brought = self._beside(stream, own + sum(others), stage.last[before] if before else [], ahead=0.0)
                self._wait(first, brought)
            elif own:
                layers = len(gathers[before]) if before else 1
                brought = self._beside(stream, own, stage.first[before] if before else [], ahead=1 / layers)
                self._wait(first, brought)
            if sharded and before and before[0] is Kind.BACKWARD:
                reduced.append(self._reduce_pass(stage, stream, before[1]))
                if len(reduced) >= slots:
                    self._wait(first, reduced[-slots])
            if others and own and not by_turns:
                for node, alone in zip(first, layer[kind], strict=True):
                    seconds[node] += sum(max(0.0, other - alone) for other in others)
                brought = self._beside(stream, sum(others), first)
                if index + 1 < len(passes):
                    for node, alone in zip(stage.first[passes[index + 1]], layer[kind], strict=True):
                        self.graph.needs[node].append((brought, alone))
            if others and own:
                self._wait_for_all_to_begin(stage, first, 1 / (1 + len(others)))
        if sharded:
            self._reduce_pass(stage, stream, passes[-1][1])

    def _gathers(self, stage: StageNodes, kind: Kind, chunk: int) -> list[float]:
        """Return the seconds to gather each layer of a chunk, in the order of the pass."""
        found = self.costs.state.gather_seconds(stage.index, self.costs.state.portions[stage.index][chunk], kind)
        return found if kind is Kind.FORWARD else found[::-1]

    def _reduce_pass(self, stage: StageNodes, stream: int, chunk: int) -> int:
        """Add the reduction of a chunk, layer by layer while the last microbatch is in it, if ranks can do both at once.
        Return its last node."""
        layers = self.costs.state.reduce_seconds(stage.index, self.costs.state.portions[stage.index][chunk])
        last, by_turns = stage.completing(chunk), self.costs.state.by_turns[stage.index]
        under_way = self.costs.state.sums_under_way(stage.index)
        if len(layers) > under_way:  # behind the layer after these waits what adds to gradients
            self._wait_for_all_to_begin(stage, last, under_way / len(layers))
        node = self._beside(stream, sum(layers), last, ahead=0.0 if by_turns else 1.0 - 1.0 / len(layers))
        self._wait(stage.reduces(chunk), node, self._meet(last, layers[0]))
        return node

    def _step_and_gather(self, stage: StageNodes) -> None:
        """Let the steps at the end wait for the norm of all stages' gradients, and the gathers for all owners' steps."""
        for chunk in stage.updates[Kind.STEP]:
            state = self.costs.state
            portion = self._portion(stage, chunk) if state.steps_apart else None
            gather = state.reduction(stage.index, portion).gather_seconds
            if portion and chunk and state.in_rounds(stage.index) and state.level(stage.index) == 3:
                gather = state.norms_seconds(stage.index, portion)  # weights come beside the chunk before
            own: dict[int, float] = {}  # by actor
            for place, run in stage.runs.items():
                seconds = self.costs.optimizer(*place, portion)
                own[run.actor] = max(own.get(run.actor, 0.0), seconds)
                self.optimizer_seconds[place] += seconds
                self.gather_seconds[place] += gather
            # New weights that are gathered come once all owners have stepped.
            updated = dict.fromkeys(own, max(own.values()) + gather) if gather else own
            if self.costs.state.steps_apart:
                self._catch_up(stage, chunk, updated, meets=gather > 0)
            else:
                self.update_seconds |= updated
                self._update(stage, chunk, own, gather)

    def _catch_up(self, stage: StageNodes, chunk: int, updated: dict[int, float], *, meets: bool) -> None:
        """Let each chunk be stepped in the next step, since its gradients cannot be clipped before the norm of all is known.
        The first chunk is stepped when the next step begins, each other one during the first forward of the chunk before."""
        if not chunk:
            self.update_seconds |= updated
            return
        first = stage.first[Kind.FORWARD, chunk - 1]
        for run, node in zip(stage.apart, first, strict=True):
            self.graph.delay(node, updated[run.actor])
        if meets:
            self._wait_for_all_to_begin(stage, first, 0.0)

    def _update(self, stage: StageNodes, chunk: int, own: dict[int, float], gather: float) -> None:
        seconds, steps = self.graph.seconds, stage.updates[Kind.STEP][chunk]
        for run, node in zip(stage.apart, steps, strict=True):
            seconds[node] = own[run.actor]
        self._wait(steps, self.norm)
        if gather:  # else nobody steps for others
            gathers = stage.updates[Kind.GATHER][chunk]
            self._wait(gathers, self._meet(steps))
            for node in gathers:
                seconds[node] = gather
