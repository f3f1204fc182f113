"""The proof that a layout's schedule can finish: its actions run symbolically, each once all that it waits for is done."""

from collections.abc import Iterable

from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import schedule
from hethub.spec.ranges import overlap
from hethub.spec.schedule.actions import Action, Kind


def dependencies(layout: Layout, action: Action) -> list[Action]:
    """The actions on other stages that must have ended before this one can start; none where it has no microbatch."""
    if action.microbatch is None or action.kind not in (Kind.FORWARD, Kind.BACKWARD):
        return []
    beside = layout.chunk_beside(action.stage, action.chunk, -1 if action.kind is Kind.FORWARD else 1)
    if beside is None or beside.stage == action.stage:
        return []
    num_chunks = len(layout.chunks(beside.stage))
    return [
        Action(action.kind, beside.stage, other, beside.chunk, num_chunks)
        for other in layout.microbatches[beside.stage]
        if overlap(other.samples, action.microbatch.samples)
    ]


def execution_order(layout: Layout) -> list[tuple[int, int, Action]]:
    """A global order in which all compute actions can run, as (stage, replica, action): the proof of no deadlock.

    The entries of a round run together, once all of them can. Raises AssertionError naming the actions that wait for
    each other if there is no such order.
    """
    actors: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s, r in (lists := schedule(layout)):
        actors.setdefault((s, layout.actor_of(s, r)), []).append((s, r))
    pending = {
        actor: zip(*(lists[assignment] for assignment in assignments), strict=True)
        for actor, assignments in actors.items()
    }
    heads = {actor: next(entries) for actor, entries in pending.items()}
    done: set[Action] = set()
    order: list[tuple[int, int, Action]] = []
    progress = True
    while progress:
        progress = False
        for actor in list(heads):
            while actor in heads and all(need in done for act in heads[actor] for need in _needs(layout, act)):
                order += [
                    (*assignment, act)
                    for assignment, act in zip(actors[actor], heads[actor], strict=True)
                    if act.is_compute
                ]
                done.update(heads.pop(actor))
                if (following := next(pending[actor], None)) is not None:
                    heads[actor] = following
                progress = True
    stuck = [act.name for head in heads.values() for act in head]
    assert not stuck, f"these actions wait for each other: {stuck}"
    return order


def _needs(layout: Layout, action: Action) -> Iterable[Action]:
    """As `dependencies`; a reduction needs the backwards of all replicas."""
    if action.kind is not Kind.REDUCE:
        return dependencies(layout, action)
    stage, num_chunks = action.stage, len(layout.chunks(action.stage))
    chunks = [action.chunk] if layout.plan.steps_chunk_by_chunk else range(num_chunks)
    return (
        Action(Kind.BACKWARD, stage, microbatch, chunk, num_chunks)
        for chunk in chunks
        for microbatch in layout.microbatches[stage]
    )
