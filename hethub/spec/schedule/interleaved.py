"""Interleaved 1F1B: stages of several chunks, every chunk a station of its own on a sample's way.

Where replica i of every stage gets the same samples and has a microbatch per stage the order is Megatron's (arXiv
2104.04473, §2.2). Anywhere else it comes from a list schedule (hethub.spec.schedule.list_schedule).
"""

from collections.abc import Sequence
from itertools import accumulate

from hethub.spec.errors import BadInput
from hethub.spec.plan import PlanSpec
from hethub.spec.ranges import split
from hethub.spec.schedule.actions import Kind
from hethub.spec.schedule.in_flight import asked_in_flight
from hethub.spec.schedule.list_schedule import ListSchedule, depth
from hethub.spec.schedule.microbatches import Microbatching, deal, load_alone, sizes_of
from hethub.spec.schedule.orders import ActorOrder, updated_once


def interleave(plan: PlanSpec, microbatchings: Sequence[Microbatching]) -> list[list[ActorOrder]]:
    """Return the passes of each stage and actor in order. `microbatchings` are the stages' microbatches; those of an actor have
    its number.

    `in_flight` counts passes held, of all chunks together. The default is Megatron's depth in proportion to the
    actor's samples, and more where the microbatches would wait for each other otherwise. Raises BadInput where the
    plan gives less than that.
    """
    found = ListSchedule(plan, microbatchings).run()
    for stage, actors in enumerate(found):
        for actor, (asked, place) in enumerate(asked_in_flight(plan, stage)):
            if asked is not None and (held := most_held(actors[actor])) > asked:
                raise BadInput(
                    f"{place}.in_flight is {asked}, but interleaved chunks of these microbatches wait for {held} forwards of this replica; "
                    f"give at least {held}, or remove it."
                )
    return found


def interleave_regular(plan: PlanSpec) -> list[list[ActorOrder]]:
    """Return what `interleave` returns, for a regular plan and without its microbatches. Replica i of a stage waits only for
    replica i of other stages, so equal replicas share their lists."""
    alone: dict[tuple[int, int], list[ActorOrder]] = {}  # by micro-batch and samples
    sizes = sizes_of(plan.stages[0].replicas)
    for replica, own in enumerate(sizes):
        if own not in alone:
            alone[own] = _alone(plan.of_replicas([[replica]] * len(plan.stages)))
    return [
        [alone[own][stage] for own in (sizes[:1] if plan.runs_in_rounds(stage) else sizes)]
        for stage in range(len(plan.stages))
    ]


def _alone(plan: PlanSpec) -> list[ActorOrder]:
    """Return the order of each stage's only replica."""
    num_microbatches = load_alone(plan.stages[0].replicas[0]).num_microbatches
    if num_microbatches >= len(plan.stages):
        return [_megatron(plan, stage, num_microbatches) for stage in range(len(plan.stages))]
    return [own for own, *_ in ListSchedule(plan, [deal(stage.replicas) for stage in plan.stages]).run()]


def most_held(order: ActorOrder) -> int:
    """Return the most passes that have run forward and not yet backward."""
    gains = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(kind, 0) for kind, _ in order.computing + order.updating]
    return max(accumulate(map(gains.__getitem__, order.operation_of)))


def _megatron(plan: PlanSpec, stage: int, num_microbatches: int) -> ActorOrder:
    """Return Megatron's order: groups of as many microbatches as there are stages pass one chunk after another. Microbatches
    that are left over make the first groups larger.

    No group is smaller than the number of stages, and the warm-up is that of the largest group. So if the m-th forward is
    given the time m + stage and the k-th backward the time k + 2 * stages - 2 - stage + (chunks - 1) * largest, everything
    comes after what it waits for.
    """
    stages, chunks = len(plan.stages), plan.num_chunks
    groups = split(num_microbatches, num_microbatches // stages)
    total = num_microbatches * chunks
    warm = min(int(depth(stage, stages, 1, groups[0].size, chunks)), total)
    forwards = [chunk for own in groups for chunk in range(chunks) for _ in range(own.size)]
    microbatches = [index for own in groups for _ in range(chunks) for index in range(*own)]
    back = [2 * chunks - 1 - chunk for chunk in forwards]
    computing = tuple((kind, chunk) for kind in (Kind.FORWARD, Kind.BACKWARD) for chunk in range(chunks))
    return updated_once(computing, _warmed(forwards, back, warm), _warmed(microbatches, microbatches, warm))


def _warmed(forwards: list[int], backwards: list[int], warm: int) -> list[int]:
    """Return `warm` forwards, then forwards and backwards in turn, then the remaining backwards."""
    steady = [one for pair in zip(forwards[warm:], backwards, strict=False) for one in pair]
    return forwards[:warm] + steady + backwards[len(forwards) - warm :]
