"""Every schedule, ZeRO level and offload is predicted from the same lists that the executor runs."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch, which the random layouts' module imports: pip install hethub[train]")

from hethub.predictor import check_memory, predict, rank_memory
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.memory.parameters import rank_widths
from hethub.predictor.memory.shards import Shard
from hethub.predictor.pipeline.closed_form import Chain, interleaved, pipeline
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import step_times
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import Kind, schedule
from hethub.spec.plan import PlanSpec
from tests.oracle.execution_order import dependencies
from tests.predictor.plans import LLAMA_8B, TINY, cluster, last_stops, under, uniform
from tests.spec.random_plans import any_cases


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_plan_is_predicted_in_the_order_that_runs(data: st.DataObject) -> None:
    case = data.draw(any_cases())
    for own in case.stages:
        own["offload"] = sorted(data.draw(st.sets(st.sampled_from(["activations", "parameters", "optimizer"]))))
    layout = case.layout()
    prediction = predict(layout, with_timeline=True)
    check_timeline(layout, prediction)
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_seconds, rel=1e-9)
    assert prediction.percent_of_ceiling <= 100
    short = step_times(layout, PlanCosts(layout, HETHUB, packaged()))
    assert short.seconds == pytest.approx(prediction.step_seconds, rel=1e-12)
    assert short.breakdown == pytest.approx(prediction.breakdown, rel=1e-9, abs=1e-12 * short.seconds)
    by_chunk = layout.plan.steps_chunk_by_chunk and layout.plan.num_chunks > 1
    over = max if by_chunk else min  # who is done first begins the next step
    assert over(last_stops(prediction)) == pytest.approx(prediction.step_seconds)


@pytest.mark.parametrize("what", ["activations", "parameters", "optimizer"])
@pytest.mark.parametrize("name", ["1f1b", "ministages"])
def test_offloading_moves_bytes_to_the_host_and_takes_no_less_time(name: str, what: str) -> None:
    def layout(offload: list[str]) -> Layout:
        on, chunks = cluster(("A100-SXM4-80GB", 1, 4)), [1] if name == "1f1b" else [1, 1]
        stages = [
            {
                "layers": [[2 * s, 2 * s + 2]] if len(chunks) == 1 else [[s, s + 1], [s + 2, s + 3]],
                "replicas": [{"ranks": [2 * s + r], "micro_batch": 2, "samples": 16} for r in range(2)],
                "zero": 1,
                "offload": offload,
            }
            for s in range(2)
        ]
        plan = {"model": "tiny", "cluster": "test", "global_batch": 32, "seq_len": 128, "precision": "bf16"}
        return bind(PlanSpec.model_validate({**plan, "schedule": name, "stages": stages}), TINY, on)

    near, far = predict(layout([])), predict(layout([what]))
    part = {"activations": "activations", "parameters": "weights", "optimizer": "optimizer"}[what]
    for before, after in zip(near.memory, far.memory, strict=True):
        assert after.host_parts[part] > before.host_parts[part] == 0
        assert after.parts[part] <= before.parts[part]
    assert far.step_seconds >= near.step_seconds


def test_a_host_too_small_for_what_is_offloaded_is_refused_by_name() -> None:
    on = cluster(("A100-SXM4-80GB", 1, 1))
    small = on.replace(nodes=(on.nodes[0].replace(host_memory_gb=1e-4),))
    stages = [
        {"layers": [[0, 4]], "replicas": [{"ranks": [0], "micro_batch": 1, "samples": 4}], "offload": ["optimizer"]}
    ]
    plan = {"model": "tiny", "cluster": "test", "global_batch": 4, "seq_len": 64, "precision": "fp32", "stages": stages}
    layout = bind(PlanSpec.model_validate(plan), TINY, small)
    assert not predict(layout).fits
    with pytest.raises(BadInput, match=r"node 'n0': its ranks would hold .* GiB in host memory"):
        check_memory(layout)


def test_ranks_of_a_machine_share_its_host_memory() -> None:
    """Each fits alone: on machines of their own they fit, on one they do not."""
    for machines, per_machine in ((2, 1), (1, 2)):
        on = cluster(("A100-SXM4-80GB", machines, per_machine))
        layout = uniform(TINY, on, tp=1, pp=1, micro_batch=1, batch=4, seq=64, precision="fp32", offload=["optimizer"])
        held = [entry.host_bytes for entry in rank_memory(layout)]
        assert held[0] == held[1] > 0
        room = on.replace(nodes=(on.nodes[0].replace(host_memory_gb=1.5 * held[0] / 2**30),))
        assert predict(Layout(layout.plan, TINY, room)).fits == (per_machine == 1)


def check_timeline(layout: Layout, prediction) -> None:
    """Names as scheduled, none before what it depends on, one after the other on every rank."""
    ends = {}
    for (stage, replica), acts in schedule(layout).items():
        for rank in layout.replica(stage, replica).ranks:
            spans = [span for span in prediction.timeline if span.rank == rank]
            assert [span.name for span in spans] == [act.name for act in acts]
            assert all(a.stop_seconds <= b.start_seconds + 1e-12 for a, b in pairwise(spans))
        ends |= {act: span for act, span in zip(acts, spans, strict=True) if act.microbatch is not None}
    for act, span in ends.items():
        for needed in dependencies(layout, act):
            assert ends[needed].stop_seconds <= span.start_seconds + 1e-12
    backwards = [span.stop_seconds for act, span in ends.items() if act.kind is not Kind.FORWARD]
    reduces = [span for span in prediction.timeline if span.name.startswith("reduce")]
    assert max(span.stop_seconds for span in reduces) >= max(backwards) - 1e-12


def test_chunks_stepped_apart_wait_for_the_norm_that_clips_them() -> None:
    """They were priced as stepped behind their own backward, hidden by others'; with gradients clipped, or in fp16, the
    runtime steps them at the start of the next step, and one before each other chunk's forward."""
    on = cluster(("A100-SXM4-80GB", 1, 2))
    stages = [
        {"layers": [[s, s + 1], [s + 2, s + 3]], "replicas": [{"ranks": [s], "micro_batch": 1, "samples": 4}]}
        for s in range(2)
    ]
    plan = {"model": "tiny", "cluster": "test", "global_batch": 4, "seq_len": 128, "precision": "bf16"}
    layout = bind(PlanSpec.model_validate({**plan, "schedule": "ministages", "stages": stages}), TINY, on)
    costs = PlanCosts(layout, HETHUB, packaged())
    found = step_times(layout, costs, full=True).timed
    assert found is not None
    for stage in range(2):
        rows = {(row.action.kind, row.action.chunk, row.action.microbatch): row for row in found[stage, 0]}
        updates = [costs.optimizer(stage, 0, portion) for portion in costs.state.portions[stage]]
        first, second = (
            next(row for (kind, at, _), row in rows.items() if kind is Kind.FORWARD and at == chunk) for chunk in (0, 1)
        )
        alone = costs.microbatch(stage, 0, 1, costs.state.portions[stage][0]).forward.total
        assert first.start_seconds >= updates[0] - 1e-12
        assert first.stop_seconds - first.start_seconds == pytest.approx(updates[1] + alone)
        assert second.start_seconds > first.stop_seconds
        steps = [row for (kind, _, _), row in rows.items() if kind is Kind.STEP]
        assert [row.stop_seconds - row.start_seconds for row in steps] == pytest.approx([0.0, 0.0])


ALIKE = [
    ("1f1b", 2, 1, 2, 60), ("1f1b", 1, 1, 3, 30), ("ministages", 2, 2, 2, 24), ("ministages", 4, 1, 1, 40),
    ("interleaved", 2, 2, 1, 48), ("zero_bubble", 4, 1, 2, 72), ("layered", 1, 1, 3, 60), ("interleaved", 2, 2, 1, 47),
    ("zero_bubble", 2, 1, 1, 61), ("1f1b", 4, 1, 1, 83), ("gpipe", 2, 1, 1, 57),
]  # fmt: skip


@pytest.mark.parametrize("missing", [0, 1], ids=["whole", "short"])
@pytest.mark.parametrize(("name", "pp", "chunks", "zero", "microbatches"), ALIKE, ids=lambda value: str(value))
def test_equal_replicas_are_replayed_once_and_their_steady_state_extrapolated(
    name: str, pp: int, chunks: int, zero: int, microbatches: int, missing: int
) -> None:
    """Extrapolated where all microbatches are whole; where the last one is short, one replica's are all replayed."""
    on, size = cluster(("A100-SXM4-80GB", 1, pp), ("V100-SXM2-16GB", 1, pp)), TINY.layers // (pp * chunks)
    samples = 2 * microbatches - missing
    stages = [
        {
            "layers": [[(c * pp + s) * size, (c * pp + s + 1) * size] for c in range(chunks)],
            "replicas": [{"ranks": [2 * s + r], "micro_batch": 2, "samples": samples} for r in range(2)],
            "zero": zero,
        }
        for s in range(pp)
    ]
    plan = {"model": "tiny", "cluster": "test", "global_batch": 2 * samples, "seq_len": 128, "precision": "fp16"}
    layout = bind(PlanSpec.model_validate({**plan, "schedule": name, "stages": stages}), TINY, on)
    short, full = (step_times(layout, PlanCosts(layout, HETHUB, packaged()), full=full) for full in (False, True))
    assert short.seconds == pytest.approx(full.seconds, rel=1e-6)
    assert short.breakdown == pytest.approx(full.breakdown, rel=1e-6, abs=1e-6 * full.seconds)


def test_stages_that_begin_a_step_far_apart_are_not_extrapolated() -> None:
    """The second stage's update fetches its state from the host, and its first forward comes so much later: of few
    microbatches it was the second that held the step up, of many the first. The step was 7 % too short."""
    on = cluster(("MI300X", 1, 2))
    model = TINY.replace(hidden=1024, heads=16, ffn=2816, vocab=32000, max_seq_len=2048)
    replicas = [[{"ranks": [rank], "micro_batch": 2, "samples": 64}] for rank in range(2)]
    stages = [
        {"layers": [[0, 3]], "replicas": replicas[0], "recompute": "full"},
        {"layers": [[3, 4]], "replicas": replicas[1], "offload": ["activations", "optimizer"]},
    ]
    plan = {"model": "tiny", "cluster": "test", "global_batch": 64, "seq_len": 2048, "precision": "fp16"}
    layout = bind(PlanSpec.model_validate({**plan, "schedule": "layered", "stages": stages}), model, on)
    costs = PlanCosts(layout, HETHUB, packaged())
    assert step_times(layout, costs).seconds == pytest.approx(step_times(layout, costs, full=True).seconds, rel=1e-6)


def test_replicas_under_zero_2_meet_where_gradients_are_summed() -> None:
    """Priced in lockstep, a stage of A100 and T4 with three microbatches to one took 7 % longer than its rehearsal (29.36 ms
    with six layers); a faster replica goes forward while a slower one still goes back."""
    on = cluster(("A100-SXM4-80GB", 1, 1), ("T4", 1, 1))
    replicas = [{"ranks": [rank], "micro_batch": 1, "samples": samples} for rank, samples in enumerate((12, 4))]
    stages = [{"layers": [[0, 8]], "zero": 2, "replicas": replicas}]
    plan = {"model": TINY.name, "cluster": on.name, "global_batch": 16, "seq_len": 256, "precision": "fp32"}
    layout = bind(PlanSpec.model_validate({**plan, "stages": stages}), TINY.replace(layers=8), on)
    timeline = predict(layout, with_timeline=True).timeline
    assert timeline is not None
    fast, slow = ([span for span in timeline if span.rank == rank] for rank in range(2))
    rounds = layout.round_numbers(0, 1)
    for number in rounds[:-1]:
        (_, ours), (_, theirs) = ((own[2 * number], own[2 * number + 1]) for own in (fast, slow))
        layer = (theirs.stop_seconds - theirs.start_seconds) / 8
        assert theirs.stop_seconds - 2 * layer < ours.stop_seconds < theirs.stop_seconds
        forward, backward = fast[2 * number + 2], fast[2 * number + 3]
        assert forward.start_seconds == pytest.approx(ours.stop_seconds)
        own = costs_of_backward(layout) / 8
        assert backward.start_seconds >= theirs.stop_seconds - own - 1e-12


@pytest.mark.parametrize("own_seed", range(12))
def test_no_replica_under_zero_2_is_two_layers_ahead_of_all(own_seed: int) -> None:
    """Layer by layer, as executors go: of a round's pass only the last layer waited for the one before the last two, and
    steps were up to 11 % short."""
    chance, names = random.Random(own_seed), ("A100-SXM4-80GB", "T4", "V100-SXM2-16GB")
    on, layers = cluster(*((name, 1, 1) for name in names)), chance.randint(1, 12)
    model = LLAMA_8B.replace(layers=layers, hidden=1024, heads=8, ffn=4096, vocab=1024)
    sizes = [(chance.randint(1, 3), chance.randint(1, 12)) for _ in names]
    replicas = [{"ranks": [rank], "micro_batch": m, "samples": n} for rank, (m, n) in enumerate(sizes)]
    plan = {"model": model.name, "cluster": on.name, "seq_len": 256, "precision": "fp32", "schedule": "gpipe"}
    plan |= {
        "global_batch": sum(n for _, n in sizes),
        "stages": [{"layers": [[0, layers]], "zero": 2, "replicas": replicas}],
    }
    layout = bind(PlanSpec.model_validate(plan), model, on)
    costs, clock, sums = PlanCosts(layout, HETHUB, packaged()), [0.0] * 3, [0.0, 0.0]
    for acts in zip(*schedule(layout).values(), strict=True):
        behind = acts[0].kind is Kind.BACKWARD
        found = [act.microbatch and costs.microbatch(0, r, act.microbatch.samples.size) for r, act in enumerate(acts)]
        seconds = [own[behind].total if own else 0.0 for own in found]
        for _ in range(layers):
            clock = [max(now, sums[-2] * behind) + own / layers for now, own in zip(clock, seconds, strict=True)]
            sums += [max(clock)] * behind
    update, reduction = max(costs.optimizer(0, r) for r in range(3)), costs.state.reduction(0)
    expected = sums[-1] + reduction.tail_seconds + update + reduction.gather_seconds
    assert step_times(layout, costs).seconds == pytest.approx(expected, rel=1e-9)


def test_the_last_sum_of_a_step_comes_when_all_replicas_are_through() -> None:
    """A T4 begins its last backward long before an A100, and has waited for it in the third layer."""
    on, model = cluster(("T4", 1, 1), ("A100-SXM4-80GB", 1, 1), ("T4", 1, 1)), TINY.replace(layers=32)
    replicas = [
        [{"ranks": [r], "micro_batch": 1, "samples": 1} for r in (0, 1)],
        [{"ranks": [2], "micro_batch": 1, "samples": 2}],
    ]
    ranges = ([[0, 8]], [[8, 32]])
    stages = [{"layers": own, "zero": 2, "replicas": each} for own, each in zip(ranges, replicas, strict=True)]
    plan = {
        "model": "tiny",
        "cluster": on.name,
        "global_batch": 2,
        "seq_len": 256,
        "precision": "fp32",
        "stages": stages,
    }
    layout = bind(PlanSpec.model_validate(plan), model, on)
    costs, prediction = PlanCosts(layout, HETHUB, packaged()), predict(layout, with_timeline=True)
    through = max(span.stop_seconds for span in prediction.timeline or () if span.name.startswith("backward s0"))
    reduction = costs.state.reduction(0)
    updates = max(costs.optimizer(0, r) for r in (0, 1)) + reduction.gather_seconds, costs.optimizer(1, 0)
    assert prediction.step_seconds == pytest.approx(through + reduction.tail_seconds + min(updates), rel=1e-9)


@pytest.mark.parametrize(
    ("zero", "name", "turn", "ahead"),
    [(1, "forward s1 c0", 0, 0.0), (2, "backward s1 c0", 1, 0.5), (3, "forward s1 c1", 0, 0.25)],
)
def test_replicas_of_a_ministage_wait_in_its_collectives_for_the_last_to_come(
    zero: int, name: str, turn: int, ahead: float
) -> None:
    """The second replica gets its samples later. Under ZeRO-1 new weights of the next chunk are gathered during the
    first forward, under ZeRO-3 those of each layer during the first microbatch, and under ZeRO-2 at most two layers' sums
    are under way behind the last. Without these waits rehearsed steps were 4 to 12 % longer than predicted."""
    on = cluster(("T4", 1, 1), ("A100-SXM4-80GB", 1, 2))
    stages = [
        {"layers": [[0, 4], [8, 12]], "replicas": [{"ranks": [0], "micro_batch": 1, "samples": 4}]},
        {
            "layers": [[4, 8], [12, 16]],
            "replicas": [{"ranks": [rank], "micro_batch": 1, "samples": 2} for rank in (1, 2)],
            "zero": zero,
        },
    ]
    plan = {"model": "tiny", "cluster": on.name, "global_batch": 4, "seq_len": 128, "precision": "fp32"}
    plan |= {"schedule": "ministages", "stages": stages}
    timeline = predict(bind(PlanSpec.model_validate(plan), TINY.replace(layers=16), on), with_timeline=True).timeline
    assert timeline is not None
    early, late = ([own for own in timeline if own.rank == rank and own.name.startswith(name)][turn] for rank in (1, 2))
    part = ahead * (early.stop_seconds - early.start_seconds)
    assert early.start_seconds == pytest.approx(late.start_seconds - part, rel=1e-6)


def costs_of_backward(layout: Layout) -> float:
    return PlanCosts(layout, HETHUB, packaged()).microbatch(0, 0, 1).backward.total


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_that_lack_a_microbatch_in_unlike_rounds_stand_for_themselves(zero: int) -> None:
    """Two slow replicas of one sample, around a fast one of three, have theirs in unlike rounds. Without a timeline the
    first stood for both, and a step was a tenth too short."""
    on = cluster(("T4", 1, 1), ("A100-SXM4-80GB", 1, 1), ("T4", 1, 1))
    replicas = [{"ranks": [rank], "micro_batch": 1, "samples": samples} for rank, samples in enumerate((1, 3, 1))]
    stages = [{"layers": [[0, 4]], "zero": zero, "replicas": replicas}]
    plan = {"model": TINY.name, "cluster": on.name, "global_batch": 5, "seq_len": 256, "precision": "fp32"}
    layout = bind(PlanSpec.model_validate({**plan, "stages": stages}), TINY, on)
    assert predict(layout).step_seconds == pytest.approx(predict(layout, with_timeline=True).step_seconds, rel=1e-9)


def test_messages_of_replicas_behind_one_card_share_its_rate() -> None:
    node = {"accelerator": "A100-SXM4-80GB", "accelerators": 4, "nics": 1, "gbps_per_nic": 10.0}
    on = ClusterSpec.model_validate({"name": "test", "nodes": [{**node, "name": "a"}, {**node, "name": "b"}]})
    layout = uniform(LLAMA_8B, on, tp=1, pp=2, micro_batch=1, batch=16, seq=2048)
    costs, card = PlanCosts(layout, HETHUB, packaged()), 10e9 / 8 * packaged().links["between_nodes_fraction"]
    assert costs.boundary(0, 1, 1, 1) == pytest.approx(4 * 2048 * LLAMA_8B.hidden * 2 / card, rel=0.01)


def test_a_card_is_shared_by_no_more_replicas_than_have_their_partner_elsewhere() -> None:
    """Three of a stage's four replicas are on one machine with two of the next stage's: one of them at least stays there."""
    node = {"accelerator": "A100-SXM4-80GB", "nics": 1}
    nodes = [
        {**node, "name": name, "accelerators": size, "gbps_per_nic": gbps}
        for name, size, gbps in (("a", 5, 10.0), ("b", 3, 100.0))
    ]
    on = ClusterSpec.model_validate({"name": "test", "nodes": nodes})
    stages = [
        {"layers": [layers], "replicas": [{"ranks": [rank], "micro_batch": 1, "samples": 4} for rank in ranks]}
        for layers, ranks in (((0, 16), (0, 1, 2, 5)), ((16, 32), (6, 3, 4, 7)))
    ]
    plan = {"model": LLAMA_8B.name, "cluster": "test", "global_batch": 16, "seq_len": 2048, "precision": "bf16"}
    layout = bind(PlanSpec.model_validate({**plan, "stages": stages}), LLAMA_8B, on)
    costs, card = PlanCosts(layout, HETHUB, packaged()), 10e9 / 8 * packaged().links["between_nodes_fraction"]
    assert costs.boundary(0, 0, 0, 1) == pytest.approx(2 * 2048 * LLAMA_8B.hidden * 2 / card, rel=0.01)


def test_groups_that_take_what_is_left_over_are_all_replayed() -> None:
    """Seven microbatches that fill no group of eight make seven groups larger by one; fewer groups were larger by more."""
    on, model = cluster(("A100-SXM4-80GB", 8, 1), gbps=25.0), LLAMA_8B.replace(layers=16)
    plan = uniform(model, on, tp=1, pp=8, micro_batch=1, batch=8 * 20 + 7, seq=1024).plan
    layout = bind(under("interleaved", plan, 2), model, on)
    costs = PlanCosts(layout, HETHUB, packaged())
    short, full = (step_times(layout, costs, full=full).seconds for full in (False, True))
    assert short == pytest.approx(full, rel=1e-9)


def test_offloaded_activations_take_the_scores_of_unfused_attention_along() -> None:
    """What memory counts as kept is what is copied: at 8,192 tokens the scores are most of it."""
    on = cluster(("A100-SXM4-80GB", 1, 1))
    layout = uniform(LLAMA_8B, on, tp=1, pp=1, micro_batch=1, batch=2, seq=8192, offload=["activations"])
    unfused = Software(fused_attention=False)
    costs = PlanCosts(layout, unfused, packaged())
    kept = Shard(layout, 0, rank_widths(LLAMA_8B, 1)[0], unfused, 2).kept.layer
    copied = 32 * kept * costs.state.host_copies.seconds_per_byte(on.places[0])
    assert costs.microbatch(0, 0, 1).forward.dp > 0.5 * copied


@pytest.mark.parametrize(("stages", "num_microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 32, 4), (8, 64, 2)])
def test_bubbles_of_equal_stages_are_those_of_the_closed_forms(stages: int, num_microbatches: int, chunks: int) -> None:
    """Of 1F1B and GPipe (p - 1) forwards and backwards, interleaved a chunk's (arXiv 2104.04473, §2.2)."""
    forward, backward = 1.0, 2.0
    held = [min(stages - s, num_microbatches) for s in range(stages)]
    between = (0.0,) * (stages - 1)
    for limits in (held, [num_microbatches] * stages):
        chain = Chain((forward,) * stages, (backward,) * stages, between, between, tuple(limits))
        step = max(own.last_backward_end for own in pipeline(chain, num_microbatches))
        assert step == pytest.approx((num_microbatches + stages - 1) * (forward + backward))
    chain = Chain((forward,) * stages, (backward,) * stages, between, between, tuple(held))
    step = max(own.last_backward_end for own in interleaved(chain, num_microbatches, chunks))
    assert step == pytest.approx((num_microbatches + (stages - 1) / chunks) * (forward + backward))
