"""Schedules of random plans: complete, in order, and free of deadlock by simulated execution."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import Action, Kind, actions, schedule
from hethub.spec.schedule.microbatches import MicrobatchRange
from tests.oracle.execution_order import dependencies, execution_order
from tests.spec.random_plans import any_cases, cases
from tests.spec.schedule.test_in_flight import minimum, with_in_flight
from tests.support.layouts import MODEL, Case, chunked, replica, stage

PIPELINE = [stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]


def check_order(layout: Layout) -> None:
    """Everything runs once, after what it needs: other stages' microbatches, the own microbatch's chunk before, its
    forward."""
    done: set[Action] = set()
    compute = [acts for acts in execution_order(layout) if acts[2].microbatch is not None]
    for s, r, action in compute:
        microbatch, chunk = action.microbatch, action.chunk
        assert microbatch is not None
        assert (action.stage, microbatch.replica) == (s, r)
        assert done.issuperset(dependencies(layout, action))
        if action.kind is Kind.WEIGHT:
            assert action._replace(kind=Kind.BACKWARD) in done
        if action.kind is Kind.BACKWARD:
            assert action._replace(kind=Kind.FORWARD) in done
        beside = layout.chunk_beside(s, chunk, -1 if action.kind is Kind.FORWARD else 1)
        if beside is not None and beside.stage == s and action.kind is not Kind.WEIGHT:
            assert action._replace(chunk=beside.chunk) in done
        done.add(action)
    passes = 3 if layout.plan.defers_wgrad else 2
    microbatches = sum(len(own) * len(layout.chunks(s)) for s, own in enumerate(layout.microbatches))
    assert len(compute) == len(done) == passes * microbatches


@settings(max_examples=300)
@given(any_cases(max_batch=20))
def test_every_plan_has_an_execution_order(case: Case) -> None:
    check_order(case.layout())


@given(any_cases(max_batch=20))
def test_the_entries_of_a_round_belong_together(case: Case) -> None:
    layout = case.layout()
    lists = schedule(layout)
    for s, spec in enumerate(layout.stages):
        replicas = range(len(spec.replicas))
        for r in replicas:
            compute = [act for act in lists[s, r] if act.is_compute]
            update = [act for act in lists[s, r] if not act.is_compute]
            if layout.plan.steps_chunk_by_chunk:
                ends = {act.chunk: index for index, act in enumerate(lists[s, r]) if act.kind is Kind.BACKWARD}
                for chunk, index in ends.items():
                    assert lists[s, r][index + 1 : index + 4] == [act for act in update if act.chunk == chunk]
            else:
                assert lists[s, r] == compute + update
                assert [act.kind for act in update] == [Kind.REDUCE, Kind.STEP, Kind.GATHER]
            assert layout.plan.runs_in_rounds(s) or all(act.microbatch for act in compute)
        if not layout.plan.runs_in_rounds(s):
            continue
        for together in zip(*(lists[s, r] for r in replicas), strict=True):
            assert len({(act.kind, act.chunk) for act in together}) == 1
            ranges = sorted(act.microbatch.samples for act in together if act.microbatch)
            assert all(a.stop == b.start for a, b in pairwise(ranges))
        busiest = max(len(layout.microbatches_of(s, r)) for r in replicas)
        assert len([act for act in lists[s, 0] if act.kind is Kind.FORWARD]) == busiest * len(layout.chunks(s))


@given(st.sampled_from(["ministages", "layered"]).flatmap(lambda name: any_cases(max_batch=20, schedule=name)))
def test_a_chunk_is_passed_by_all_microbatches_before_the_next(case: Case) -> None:
    layout = case.layout()
    for (s, r), acts in schedule(layout).items():
        chunks = range(len(layout.chunks(s)))
        for kind, order in ((Kind.FORWARD, chunks), (Kind.BACKWARD, chunks[::-1])):
            own = [(act.chunk, act.microbatch) for act in acts if act.kind is kind]
            assert own == [(chunk, microbatch) for chunk in order for microbatch in layout.microbatches_of(s, r)]


@given(cases(max_batch=20))
def test_every_microbatch_runs_forward_once_and_backward_once(case: Case) -> None:
    layout = case.layout()
    for (s, r), acts in schedule(layout).items():
        microbatches = layout.microbatches_of(s, r)
        assert [a.microbatch for a in acts if a.kind is Kind.FORWARD] == list(microbatches)
        assert [a.microbatch for a in acts if a.kind is Kind.BACKWARD] == list(microbatches)
        assert [a.kind for a in acts if a.microbatch is None] == [Kind.REDUCE, Kind.STEP, Kind.GATHER]
        assert all(a.microbatch is None for a in acts[2 * len(microbatches) :])


@given(any_cases(max_batch=20))
def test_loads_are_those_of_the_microbatches(case: Case) -> None:
    """Known without dealing them: how many an actor has, their samples and the largest one's."""
    layout = case.layout()
    for own, actors in zip(layout.loads, layout.actors, strict=True):
        sizes = [[] for _ in own]
        for microbatch in actors.microbatches(0):
            sizes[microbatch.replica].append(microbatch.samples.size)
        assert own == [(len(each), sum(each), max(each)) for each in sizes]


@given(any_cases(max_batch=20))
def test_what_is_held_is_foreseen(case: Case) -> None:
    layout = case.layout()
    for (s, r), acts in schedule(layout).items():
        held: set[tuple[int, MicrobatchRange]] = set()
        most = 0
        for action in acts:
            if action.microbatch and action.kind is Kind.FORWARD:
                held.add((action.chunk, action.microbatch))
            elif action.microbatch and action.kind is Kind.BACKWARD:
                held.remove((action.chunk, action.microbatch))
            counted = held if layout.plan.schedule == "interleaved" else {microbatch for _, microbatch in held}
            most = max(most, len(counted))
        assert most <= layout.in_flight[s][r]
        assert most == layout.in_flight[s][r] or layout.plan.runs_in_rounds(s)


@given(any_cases(schedule="zero_bubble", max_batch=20))
def test_deferred_weight_gradients_stay_within_the_fullest_stage(case: Case) -> None:
    """What is put off never takes a stage above the samples that the fullest stage holds under way."""
    layout = case.layout()
    fullest = 0
    held_by_stage = []
    for s in range(layout.num_stages):
        held = 0
        for actor in {microbatch.replica for microbatch in layout.actors[s].microbatches(s)}:
            size = max(
                microbatch.samples.size
                for microbatch in layout.actors[s].microbatches(s)
                if microbatch.replica == actor
            )
            limit = layout.actor_limits[s][actor]
            fullest_here, deferred_wgrad = limit * size, 0
            assignments = [r for r in range(len(layout.stages[s].replicas)) if layout.actor_of(s, r) == actor]
            waiting = 0
            for action in actions(layout, s, assignments[0]):
                waiting += {Kind.BACKWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
                deferred_wgrad = max(deferred_wgrad, waiting - 1)  # one is between its two halves
            held += deferred_wgrad * size + fullest_here
        held_by_stage.append(held)
        fullest = max(fullest, sum(
            layout.actor_limits[s][actor] * max(t.samples.size for t in layout.actors[s].microbatches(s) if t.replica == actor)
            for actor in {microbatch.replica for microbatch in layout.actors[s].microbatches(s)}
        ))  # fmt: skip
    assert all(held <= fullest for held in held_by_stage)


@given(cases(max_batch=20))
def test_a_replica_never_holds_more_microbatches_than_in_flight(case: Case) -> None:
    layout = case.layout()
    for (s, r), acts in schedule(layout).items():
        held, most = set(), 0
        for action in acts:
            if action.kind is Kind.FORWARD:
                held.add(action.microbatch)
            elif action.kind is Kind.BACKWARD:
                held.remove(action.microbatch)
            most = max(most, len(held))
        assert most == layout.in_flight[s][r] <= len(layout.microbatches_of(s, r))
        if case.schedule == "gpipe":
            assert most == len(layout.microbatches_of(s, r))


@given(cases(schedule="1f1b"), st.data())
def test_any_in_flight_from_the_smallest_up_runs(case: Case, data: st.DataObject) -> None:
    layout = case.layout()
    plan = layout.plan
    for s in range(layout.num_stages - 1, -1, -1):  # what a stage needs depends on those below
        for r in range(len(layout.stages[s].replicas)):
            more = data.draw(st.sampled_from([0, 0, 1, 3]))
            plan = with_in_flight(plan, {(s, r): minimum(plan, layout, (s, r)) + more})
    assert execution_order(Layout(plan, layout.model, layout.cluster))


def test_the_classical_order_of_two_stages() -> None:
    layout = Case(name="pp2", stages=PIPELINE).layout()
    first = [a.name for a in actions(layout, 0, 0)]
    assert first == [
        "forward s0 [0, 2)", "forward s0 [2, 4)", "backward s0 [0, 2)", "forward s0 [4, 6)", "backward s0 [2, 4)",
        "forward s0 [6, 8)", "backward s0 [4, 6)", "backward s0 [6, 8)", "reduce s0", "step s0", "gather s0",
    ]  # fmt: skip
    second = [a.name.split()[0] for a in actions(layout, 1, 0)]
    assert second == ["forward", "backward"] * 4 + ["reduce", "step", "gather"]


def names(layout: Layout, stage: int, number: int = 0) -> list[str]:
    """The compute of one of a stage's replicas in short: F00 is the forward of microbatch 0 in chunk 0."""
    return [
        f"{act.kind[0].upper()}{act.chunk}{act.microbatch.index}"
        for act in actions(layout, stage, number)
        if act.microbatch
    ]


def test_interleaved_is_megatrons_order_where_all_is_regular() -> None:
    """By hand from the rule: groups of two microbatches, chunk after chunk; 4 and 2 forwards before the first
    backward."""
    stages = [chunked([(0, 1), (2, 3)], replica([0], 4)), chunked([(1, 2), (3, 4)], replica([1], 4))]
    layout = Case(name="vpp", stages=stages, schedule="interleaved", global_batch=4).layout()
    assert names(layout, 0) == [
        "F00", "F01", "F10", "F11", "F02", "B10", "F03", "B11", "F12", "B00", "F13", "B01", "B12", "B13", "B02", "B03",
    ]  # fmt: skip
    assert names(layout, 1) == [
        "F00", "F01", "F10", "B10", "F11", "B11", "F02", "B00", "F03", "B01", "F12", "B12", "F13", "B13", "B02", "B03",
    ]  # fmt: skip
    assert actions(layout, 0, 0)[2].name == "forward s0 c1 [0, 1)"
    assert [act.name for act in actions(layout, 0, 0)[-3:]] == ["reduce s0", "step s0", "gather s0"]  # of both chunks
    assert layout.in_flight == [[5], [3]]


def test_replicas_that_wait_for_no_others_interleave_as_if_alone() -> None:
    """Whatever their numbers of microbatches are; a list schedule of all of them had taken 0.4 s on 80 accelerators."""

    def order(*samples: int) -> list[list[str]]:
        chunks = ([(0, 1), (2, 3)], [(1, 2), (3, 4)])
        stages = [
            chunked(own, *(replica([s * len(samples) + r], n) for r, n in enumerate(samples)), zero=1)
            for s, own in enumerate(chunks)
        ]
        layout = Case(name="chains", stages=stages, schedule="interleaved", global_batch=sum(samples)).layout()
        return [names(layout, stage, r) for r in range(len(samples)) for stage in range(2)]

    assert order(5, 1, 4) == [*order(5), *order(1), *order(4)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(2, 3), st.integers(1, 2), st.integers(0, 13))
def test_megatrons_order_runs_for_any_number_of_microbatches(pp: int, chunks: int, dp: int, more: int) -> None:
    """Microbatches that fill no group of their own make the first ones larger; a stage holds what its largest group
    asks for."""
    microbatches = pp + more
    stages = [
        chunked(
            [(c * pp + s, c * pp + s + 1) for c in range(chunks)],
            *(replica([s * dp + r], microbatches) for r in range(dp)),
        )
        for s in range(pp)
    ]
    model = MODEL.replace(layers=pp * chunks)
    layout = Case(
        name="any", stages=stages, schedule="interleaved", global_batch=dp * microbatches, model=model
    ).layout()
    check_order(layout)
    largest = -(-microbatches // (microbatches // pp))
    for s in range(pp):
        assert layout.in_flight[s] == [min(2 * (pp - s - 1) + (chunks - 1) * largest + 1, chunks * microbatches)] * dp


def ticks(layout: Layout) -> int:
    """How long a step's compute takes where a sample takes a tick forward in a layer, one for its input, one for its
    weights."""
    splits = layout.plan.defers_wgrad
    lengths = {Kind.FORWARD: 1, Kind.BACKWARD: 1 if splits else 2, Kind.WEIGHT: 1}
    clock: dict[tuple[int, int], int] = {}
    ends: dict[Action, int] = {}
    for s, r, act in execution_order(layout):
        if act.microbatch is not None:
            start = max([clock.get((s, r), 0), *(ends[need] for need in dependencies(layout, act))])
            chunk = layout.chunks(s)[act.chunk]
            clock[s, r] = ends[act] = start + lengths[act.kind] * act.microbatch.samples.size * chunk.size
    return max(clock.values())


@pytest.mark.parametrize("micro_batches", [(1, 1, 1), (1, 2, 1), (2, 1, 3)])
@pytest.mark.parametrize("batch", [6, 7, 10])
def test_interleaving_and_splitting_fill_waits(micro_batches: tuple[int, ...], batch: int) -> None:
    model = MODEL.replace(layers=6)
    found = {}
    for name in ("1f1b", "zero_bubble", "interleaved"):
        pieces = [[(s, s + 1), (s + 3, s + 4)] if name == "interleaved" else [(2 * s, 2 * s + 2)] for s in range(3)]
        stages = [chunked(own, replica([s], batch, micro_batches[s])) for s, own in enumerate(pieces)]
        found[name] = ticks(Case(name=name, stages=stages, schedule=name, global_batch=batch, model=model).layout())
    assert found["zero_bubble"] < found["1f1b"]
    assert found["interleaved"] < found["1f1b"]


def test_zero_bubble_puts_off_more_the_later_the_stage() -> None:
    """By hand, schedule H1: stage s puts s microbatches off; without the weight gradients it is 1F1B."""
    stages = [stage((s, s + 1), replica([s], 4)) for s in range(3)]
    layout = Case(
        name="zb", stages=stages, schedule="zero_bubble", global_batch=4, model=MODEL.replace(layers=3)
    ).layout()
    assert names(layout, 0) == ["F00", "F01", "F02", "B00", "W00", "F03", "B01", "W01", "B02", "W02", "B03", "W03"]
    assert names(layout, 1) == ["F00", "F01", "B00", "F02", "B01", "W00", "F03", "B02", "W01", "B03", "W02", "W03"]
    assert names(layout, 2) == ["F00", "B00", "F01", "B01", "F02", "B02", "W00", "F03", "B03", "W01", "W02", "W03"]


@given(any_cases(schedule="zero_bubble"))
def test_zero_bubble_without_its_weight_gradients_is_1f1b(case: Case) -> None:
    layout = case.layout()
    plain = Layout(layout.plan.replace(schedule="1f1b"), layout.model, layout.cluster)
    for assignment, acts in schedule(layout).items():
        assert [act for act in acts if act.kind is not Kind.WEIGHT] == schedule(plain)[assignment]


@settings(max_examples=50)
@given(any_cases(schedule="interleaved", max_batch=10), st.data())
def test_interleaved_names_an_in_flight_that_is_enough(case: Case, data: st.DataObject) -> None:
    layout = case.layout()
    s = data.draw(st.integers(0, layout.num_stages - 1))
    r = data.draw(st.integers(0, len(layout.stages[s].replicas) - 1))
    value = 1
    while value < 200:
        plan = with_in_flight(layout.plan, {(s, r): value})
        try:
            check_order(bind(plan, layout.model, layout.cluster))
        except BadInput as refusal:
            found = re.search(
                rf"stages\[{s}\]\.replicas\[{r}\]\.in_flight is {value}, .* give at least (\d+)", str(refusal)
            )
            assert found, str(refusal)  # noqa: PT017
            assert int(found[1]) > value
            value = int(found[1])
        else:
            return
    raise AssertionError("no in_flight is enough")


def test_zero_bubble_needs_what_full_recompute_throws_away() -> None:
    stages = [stage((0, 4), replica([0], 8, 2), recompute="full")]
    with pytest.raises(BadInput, match=r"stages\[0\]: schedule zero_bubble .* Set recompute to none or selective"):
        Case(name="zb", stages=stages, schedule="zero_bubble").layout()


def test_interleaved_needs_chunks() -> None:
    with pytest.raises(ValidationError, match="interleaved takes two or more chunks of layers per stage; got one"):
        Case(name="vpp", stages=PIPELINE, schedule="interleaved").layout()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "layered", "zero_bubble"])
def test_schedules_of_one_chunk_refuse_several(name: str) -> None:
    stages = [chunked([(0, 2), (2, 4)], replica([0], 8))]
    with pytest.raises(ValidationError, match=f"schedule {name} takes one chunk of layers per stage; got 2"):
        Case(name="chunks", stages=stages, schedule=name).layout()


def test_chunks_that_layers_cannot_fill_are_refused() -> None:
    stages = [chunked([(0, 2), (2, 4), (4, 4)], replica([0], 8))]
    with pytest.raises(
        ValidationError, match=r"\[4, 4\) holds none; .* 3 chunks are more than this stage's layers fill"
    ):
        Case(name="chunks", stages=stages, schedule="ministages").layout()


def test_too_few_in_flight_is_refused_when_the_plan_is_bound() -> None:
    stages = [stage((0, 2), replica([0], 8, 1, in_flight=1)), stage((2, 4), replica([1], 8, 2))]
    with pytest.raises(BadInput, match=r"stages\[0\]\.replicas\[0\]\.in_flight is 1.*give at least 2"):
        Case(name="small", stages=stages).layout()


@pytest.mark.parametrize("name", ["gpipe", "ministages", "layered"])
def test_in_flight_has_no_meaning_where_all_microbatches_are_held(name: str) -> None:
    stages = [stage((0, 4), replica([0], 8, 1, in_flight=3))]
    with pytest.raises(BadInput, match=f"schedule {name} holds all microbatches at once, so in_flight has no meaning"):
        Case(name=name, stages=stages, schedule=name, model=MODEL).layout()


def test_every_shape_of_replica_is_checked_when_the_plan_is_bound() -> None:
    unlike = replica([2, 3], 4, tensor_shares=[100, 1])
    with pytest.raises(BadInput, match=r"stages\[0\]\.replicas\[1\]: tensor_shares \[100.*leave rank 3 without"):
        Case(name="unlike", stages=[stage((0, 4), replica([0, 1], 4), unlike)]).layout()
