"""How long a rank is planned to compute: what an emulation takes, and what stragglers are measured against."""

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import PassSeconds
from hethub.predictor.cost.links import host_gbytes_per_second
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.layout.bind import Assignment
from hethub.spec.layout.execution import Kind


class RankTimes:
    """Planned seconds of one rank's layers and optimizer, compute only; a rank's `slowdown` multiplies them."""

    def __init__(self, costs: PlanCosts, assignment: Assignment, slowdown: float = 1.0) -> None:
        layout, self._slowdown = costs.layout, slowdown
        spec = layout.replica(assignment.stage, assignment.replica)
        stage = layout.stages[assignment.stage]
        self._cost = costs.layer_cost(assignment.rank)
        self._tp = costs.state.tensor_parallel(spec)
        self._fraction = costs.state.rank_fractions(spec)[assignment.position]
        self._recompute = stage.recompute
        self._defers_wgrad = layout.plan.schedule == "zero_bubble"
        self._first = 0 if assignment.stage == 0 else None
        self._last = stage.num_layers - 1 if assignment.stage == layout.num_stages - 1 else None
        self.host_seconds_per_byte = 1e-9 / host_gbytes_per_second(self._cost.accelerator, packaged().links)

    def layer(self, kind: Kind, layer: int, samples: int) -> float:
        """Seconds of an action in a layer of the stage, counted in model order; embedding and head count with the
        model's ends."""
        own = self._cost.layer(samples, self._tp, self._recompute, self._fraction)
        deferred_wgrad = own.backward * self._cost.weight_share(samples, self._fraction) if self._defers_wgrad else 0.0
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
