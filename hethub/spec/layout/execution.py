"""Schedules: pure functions from a layout to every replica's ordered actions.

One schedule, two interpreters: the predictor replays it against costs, the runtime's executor runs it.
What both may rely on:

- `schedule(layout)` is the one source of order: a rank runs its replica's list from front to back.
- An action waits for the actions of other stages whose microbatches share its samples. What crosses between stages is
  no action of its own: a forward first waits for the transfers that end in its microbatch and chunk and then sends those
  that start there (Layout.boundaries); a backward does the same the other way. Between neighbouring chunks of one stage
  a replica hands its own microbatch over; its list has the two in the right order.
- A stage that runs in rounds (`plan.runs_in_rounds`) gives all its replicas lists of one length. Their k-th entries are
  one round: the same kind and chunk, with a microbatch or without. A round's collectives need all of its replicas, so
  none gets further into the next round than they allow.
- Reduction, step and gather come once at the end of a list, or under ministages behind the last backward of each chunk.
  Where gradients are clipped a chunk's step is put off until the norm is known and the chunk is next at hand; the list
  says where it belongs.
- Every compute action of a microbatch in a chunk comes once: forward, backward, and under zero_bubble weight after it.
"""

from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import StateMap
from hethub.spec.schedule.actions import COLLECTIVE, COMPUTE, Action, Kind
from hethub.spec.schedule.orders import NO_MICROBATCH, ActorOrder, chunk_by_chunk, pipelined

__all__ = [
    "COLLECTIVE",
    "COMPUTE",
    "Action",
    "Kind",
    "actions",
    "actor_order",
    "check_executable",
    "schedule",
]  # fmt: skip


def check_executable(layout: Layout) -> None:
    """Raises BadInput naming what the plan asks for and the runtime cannot do: state shares that nobody can hold."""
    _ = StateMap(layout).buckets


def actions(layout: Layout, stage: int, replica: int) -> list[Action]:
    """The ordered actions of every rank of a replica for one step."""
    own, num_chunks = layout.actor_microbatches(stage, replica), len(layout.chunks(stage))
    chunks_of_updates = num_chunks if layout.plan.steps_chunk_by_chunk else 1
    return [
        Action(kind, stage, None, chunk, chunks_of_updates)
        if index == NO_MICROBATCH
        else Action(kind, stage, own[index], chunk, num_chunks)
        for kind, chunk, index in actor_order(layout, stage, layout.actor_of(stage, replica)).passes
    ]


def actor_order(layout: Layout, stage: int, actor: int) -> ActorOrder:
    """What an actor does with its microbatches, in order, and its updates."""
    if layout.plan.schedule == "interleaved":
        return layout.interleaved[stage][actor]
    num_microbatches = layout.loads[stage][actor].num_microbatches
    if layout.plan.goes_chunk_by_chunk:
        return chunk_by_chunk(num_microbatches, len(layout.chunks(stage)), layout.plan.steps_chunk_by_chunk)
    later = layout.deferred_wgrad[stage][actor] if layout.plan.defers_wgrad else None
    return pipelined(num_microbatches, layout.actor_limits[stage][actor], later)


def schedule(layout: Layout) -> dict[tuple[int, int], list[Action]]:
    """The actions of every replica, by (stage, replica)."""
    return {(s, r): actions(layout, s, r) for s, stage in enumerate(layout.stages) for r in range(len(stage.replicas))}
