"""Where all stages tile the samples alike, as uniform plans do: then a plan is cheap to reason about, tile by tile or not."""

from hethub.spec.layout import Layout
from hethub.spec.plan import PlanSpec


def tiles_alike(plan: PlanSpec) -> bool:
    """Whether all stages tile the samples alike, so that replica r talks only to replica r of its neighbours."""
    first = [(r.micro_batch, r.samples) for r in plan.stages[0].replicas]
    return all([(r.micro_batch, r.samples) for r in stage.replicas] == first for stage in plan.stages[1:])


def in_flight(layout: Layout, alike: bool, stage: int, replica: int) -> int:
    """Tiles that a replica holds before their backward; without looking at the tiles where they are `alike` under 1F1B."""
    spec = layout.replica(stage, replica)
    if layout.plan.schedule != "1f1b" or not alike:
        return layout.in_flight[stage][replica]
    return min(spec.in_flight or layout.num_stages - stage, -(-spec.samples // spec.micro_batch))
