"""Layouts of plans, by the short way where no microbatch needs to be dealt."""

from functools import cached_property

from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.in_flight import raised_limits
from hethub.spec.schedule.microbatches import sizes_of


def is_alike(plan: PlanSpec) -> bool:
    """Whether nothing needs dealing: all stages have the same replicas, of equal microbatches or with microbatches in
    flight given."""
    if plan.schedule not in ("1f1b", "gpipe") or any(map(plan.runs_in_rounds, range(len(plan.stages)))):
        return False
    first, *others = {sizes_of(stage.replicas) for stage in plan.stages}
    if others:
        return False
    return len(set(first)) == 1 or all(r.in_flight for stage in plan.stages for r in stage.replicas)


def is_equal(plan: PlanSpec) -> bool:
    """Whether all replicas of all equally wide stages have the same samples in the same microbatches."""
    microbatches = {(len(stage.replicas), r.micro_batch, r.samples) for stage in plan.stages for r in stage.replicas}
    return len(microbatches) == 1


class AlikeLayout(Layout):
    """The layout of a plan that `is_alike`, its microbatches in flight known without dealing thousands of microbatches.

    With equal microbatches everywhere a replica holds as many as there are stages from its own to the last. `bind`
    checks the answer in full before it is given.
    """

    @cached_property
    def in_flight(self) -> list[list[int]]:
        stages = self.plan.stages
        if self.plan.schedule == "gpipe":
            return [[-(-r.samples // r.micro_batch) for r in stage.replicas] for stage in stages]
        return [
            [min(r.in_flight or len(stages) - index, -(-r.samples // r.micro_batch)) for r in stage.replicas]
            for index, stage in enumerate(stages)
        ]

    @property
    def actor_limits(self) -> list[list[int]]:  # every replica is an actor of its own
        return self.in_flight


def layout_of(plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> Layout:
    """The plan's layout, by the short way where it is alike. Raises BadInput where it does not bind."""
    return AlikeLayout(plan, model, cluster) if is_alike(plan) else bind(plan, model, cluster)


def raised(plan: PlanSpec) -> PlanSpec:
    """The plan with the default of microbatches in flight wherever it gives too few."""
    stages = []
    for index, (stage, limits) in enumerate(zip(plan.stages, raised_limits(plan), strict=True)):
        held = limits * len(stage.replicas) if plan.runs_in_rounds(index) else limits
        own = zip(stage.replicas, held, strict=True)
        stages.append(
            stage.replace(replicas=tuple([replica.replace(in_flight=microbatches) for replica, microbatches in own]))
        )
    return plan.replace(stages=tuple(stages))
