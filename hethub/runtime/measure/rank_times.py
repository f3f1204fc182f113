"""How long a rank is planned to compute: what an emulation takes, and what stragglers are measured against."""

from collections import Counter

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import PassSeconds
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.execution import Kind

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)  # what makes a rank slow; the update is only reported


class RankTimes:
    """Planned seconds of one rank's layers and optimizer, compute only; a rank's `slowdown` multiplies them."""

    def __init__(self, costs: PlanCosts, assignment: Assignment, slowdown: float = 1.0) -> None:
        layout, self._slowdown = costs.layout, slowdown
        spec = layout.replica(assignment.stage, assignment.replica)
        stage = layout.stages[assignment.stage]
        self._cost = costs.layer_cost(assignment.rank)
        self._tp = costs.state.rings.tensor_parallel(spec)
        self._fraction = costs.state.rings.rank_fractions(spec)[assignment.position]
        self._recompute = stage.recompute
        self._defers_wgrad = layout.plan.defers_wgrad
        self._first = 0 if assignment.stage == 0 else None
        self._last = stage.num_layers - 1 if assignment.stage == layout.num_stages - 1 else None
        place = layout.cluster.places[assignment.rank]
        self.host_seconds_per_byte = costs.state.host_copies.seconds_per_byte(place)
        self.host_passing_seconds_per_byte = costs.state.host_copies.passing_seconds_per_byte(place)

    def layer(self, kind: Kind, layer: int, samples: int) -> float:
        """Seconds of an action in a layer of the stage, counted in model order; embedding and head count with the
        model's ends."""
        own = self._cost.layer(samples, self._tp, self._recompute, self._fraction)
        deferred_wgrad = self._cost.weight_seconds(samples, self._tp, self._fraction) if self._defers_wgrad else 0.0
        if kind not in (Kind.FORWARD, Kind.BACKWARD):
            return self._slowdown * deferred_wgrad
        passes = [PassSeconds(own.forward, own.backward - deferred_wgrad)]
        if layer == self._first:
            passes.append(self._cost.embedding(samples))
        if layer == self._last:
            passes.append(self._cost.head(samples, self._fraction))
        return self._slowdown * sum(each.forward if kind is Kind.FORWARD else each.backward for each in passes)

    def optimizer(self, num_elements: int) -> float:
        """Seconds to update the state of so many parameters."""
        return self._slowdown * self._cost.optimizer(num_elements) if num_elements else 0.0


def planned_seconds(
    layout: Layout,
    profile: ProfileSpec | None,
    factors: dict[int, float] | None = None,
    software: Software = HETHUB,
) -> list[dict[str, float]]:
    """What every rank is planned to compute in a step, by kind of action, communication left out; times its known
    factor; nothing for an unused rank."""
    costs = PlanCosts(layout, software, packaged(), profile)
    result: list[dict[str, float]] = [{} for _ in range(layout.plan.num_ranks)]
    for assignment in layout.assignments:
        times = RankTimes(costs, assignment, (factors or {}).get(assignment.rank, 1.0))
        layers = range(layout.stages[assignment.stage].num_layers)
        sizes = Counter(
            microbatch.samples.size for microbatch in layout.microbatches_of(assignment.stage, assignment.replica)
        )
        seconds: dict[str, float] = {
            kind: sum(count * times.layer(kind, layer, size) for size, count in sizes.items() for layer in layers)
            for kind in PASSES
        }
        owned = costs.state.owned(
            assignment.stage, layout.replica(assignment.stage, assignment.replica), assignment.rank, None
        )
        seconds[Kind.STEP] = times.optimizer(round(owned))
        result[assignment.rank] = {kind: value for kind, value in seconds.items() if value}
    return result
