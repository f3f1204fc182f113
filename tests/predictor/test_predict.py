"""A prediction adds up, agrees with the schedule however it is replayed, and never beats its ceiling."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hethub
from hethub.predictor import check_memory, predict, rank_memory
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.closed_form import Chain, pipeline
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.replay import NONE, TaskGraph, replay
from hethub.predictor.pipeline.step import step_times
from hethub.predictor.pipeline.symmetry import copies
from hethub.predictor.predict import with_staging
from hethub.predictor.staging import Staging
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import schedule
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.in_flight import even_limits, in_flight_limits
from tests.predictor.plans import LLAMA_8B, TINY, cluster, last_stops, uniform

TWO_MAKERS = cluster(("A100-SXM4-80GB", 1, 8), ("MI250X-GCD", 1, 8))
LAPTOP = cluster(("CPU-core", 1, 4))

uneven = PlanSpec.model_validate(
    {
        "model": "tiny", "cluster": "test", "global_batch": 14, "seq_len": 128, "precision": "fp32",
        "stages": [
            {"layers": [[0, 3]], "zero": 1, "replicas": [
                {"ranks": [0], "micro_batch": 3, "samples": 10}, {"ranks": [1], "micro_batch": 2, "samples": 4}]},
            {"layers": [[3, 4]], "replicas": [{"ranks": [2, 3], "micro_batch": 4, "samples": 14}]},
        ],
    }
)  # fmt: skip

LAYOUTS = {
    "tp4 pp2 dp2": uniform(LLAMA_8B, TWO_MAKERS, tp=4, pp=2, micro_batch=1, batch=32, seq=4096, zero=1),
    "tp1 pp4 dp4, recompute": uniform(
        LLAMA_8B, TWO_MAKERS, tp=1, pp=4, micro_batch=2, batch=32, seq=4096, zero=1, recompute="full"
    ),
    "cpu pp2 dp2": uniform(TINY, LAPTOP, tp=1, pp=2, micro_batch=2, batch=16, seq=128, precision="fp32"),
    "cpu, unlike microbatches": bind(uneven, TINY, LAPTOP),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def test_breakdown_sums_to_the_step(layout):
    prediction = predict(layout)
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_seconds, rel=1e-12)
    assert min(prediction.breakdown.values()) >= 0


def test_no_plan_beats_the_ceiling(layout):
    prediction = predict(layout)
    assert 0 < prediction.percent_of_ceiling <= 100


def test_timeline_has_the_schedule_of_every_rank(layout):
    prediction = predict(layout, with_timeline=True)
    for (stage, replica), acts in schedule(layout).items():
        for rank in layout.replica(stage, replica).ranks:
            spans = [span for span in prediction.timeline if span.rank == rank]
            assert [span.name for span in spans] == [act.name for act in acts]
            assert all(a.stop_seconds <= b.start_seconds + 1e-12 for a, b in pairwise(spans))
    assert min(last_stops(prediction)) == pytest.approx(prediction.step_seconds)


def test_a_chain_of_equal_microbatches_equals_the_full_replay():
    layout = uniform(TINY, LAPTOP, tp=1, pp=4, micro_batch=1, batch=96, seq=128, precision="fp32")
    short, full = (step_times(layout, PlanCosts(layout, HETHUB, packaged()), full=full) for full in (False, True))
    assert short.seconds == pytest.approx(full.seconds, rel=1e-9)
    assert short.breakdown == pytest.approx(full.breakdown, rel=1e-9)
    assert short.timed is None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("batch", [64, 56])
def test_groups_of_replicas_that_are_copies_are_replayed_once(schedule: str, batch: int) -> None:
    """Eight replicas with microbatches of one sample feed eight with microbatches of two: two of each talk among
    themselves alone."""
    on = cluster(("A100-SXM4-80GB", 2, 8))
    plan = uniform(TINY, on, tp=1, pp=2, micro_batch=1, batch=batch, seq=128, zero=1).plan
    wide = plan.stages[1].replace(replicas=tuple(one.replace(micro_batch=2) for one in plan.stages[1].replicas))
    layout = bind(plan.replace(stages=(plan.stages[0], wide), schedule=schedule), TINY, on)
    costs = PlanCosts(layout, HETHUB, packaged())
    assert [len(group[0]) for group in copies(layout, costs)] == ([2] * 4 if batch == 64 else [8])
    short, full = (step_times(layout, costs, full=full) for full in (False, True))
    assert (short.seconds, short.breakdown, short.bottleneck) == (full.seconds, full.breakdown, full.bottleneck)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_even_plans_know_their_microbatches_in_flight_without_microbatches(data: st.DataObject) -> None:
    pp, dp, microbatches = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)))
    on, batch = cluster(("CPU-core", 1, pp * dp)), microbatches * dp * 2 - data.draw(st.sampled_from([0, dp]))
    plan = uniform(TINY, on, tp=1, pp=pp, micro_batch=2, batch=batch, seq=64, precision="fp32").plan
    held = st.lists(st.none() | st.integers(1, 5), min_size=pp, max_size=pp)
    stages = tuple(
        stage.replace(zero=zero, replicas=tuple(replica.replace(in_flight=flight) for replica in stage.replicas))
        for stage, flight, zero in zip(
            plan.stages, data.draw(held), data.draw(st.sampled_from([[0] * 4, [0, 2, 3, 1]])), strict=False
        )
    )
    layout = Layout(plan.replace(stages=stages), TINY, on)
    assert granted(lambda: even_limits(layout.plan)) == granted(lambda: in_flight_limits(layout.plan))


def granted(limits: Callable[[], list[list[int]]]) -> list[list[int]] | str:
    try:
        return limits()
    except BadInput as refusal:
        return str(refusal)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(1, 300), st.sampled_from([0, 1, 5]))
def test_a_steady_state_is_found_exactly(draw: Random, stages: int, num_microbatches: int, more: int) -> None:
    """Any 1F1B pipeline: known from where it repeats, and replayed action by action. Stages of nearly one speed take long to
    settle, and what was known from two short runs was up to 13 % too short."""
    longest = draw.choice([0.0, 0.1, 1.0])
    some = lambda n, least, most: tuple(draw.uniform(least, most) for _ in range(n))  # noqa: E731
    held = tuple(stages - stage + (more if stage < stages - 1 else 0) for stage in range(stages))
    chain = Chain(some(stages, 0.5, 1.0), some(stages, 1.0, 2.0), *(some(stages - 1, 0.0, longest) for _ in "du"), held)
    ends = replay(_task_graph(chain, num_microbatches))
    expected = [max(ends[2 * num_microbatches * s : 2 * num_microbatches * (s + 1)]) for s in range(stages)]
    assert [e.last_backward_end for e in pipeline(chain, num_microbatches)] == pytest.approx(expected, rel=1e-9)


def _task_graph(chain: Chain, m: int) -> TaskGraph:
    """The chain's microbatches one by one: stage s runs microbatch i forward as node 2 m s + i, and back as the m-th
    after that."""
    graph, last = TaskGraph(), len(chain.forward) - 1
    forward = lambda s, i: 2 * m * s + i  # noqa: E731
    backward = lambda s, i: 2 * m * s + m + i  # noqa: E731
    for s in range(last + 1):
        for i in range(m):
            graph.seconds.append(chain.forward[s])
            graph.sources.append(forward(s - 1, i) if s else NONE)
            graph.under_way.append(chain.down[s - 1] if s else 0.0)
        for i in range(m):
            graph.seconds.append(chain.backward[s])
            graph.sources.append(backward(s + 1, i) if s < last else NONE)
            graph.under_way.append(chain.up[s] if s < last else 0.0)
        limit, order = min(chain.in_flight[s], m), []
        for i in range(m + limit):
            order += [backward(s, i - limit)] if i >= limit else []
            order += [forward(s, i)] if i < m else []
        graph.orders.append(order)
    return graph


def test_json_has_every_promised_key_and_no_nan(layout):
    data = json.loads(json.dumps(predict(layout).beside_makers_alone(1e6).to_dict(), allow_nan=False))
    promised = {"fits", "step_seconds", "step_seconds_interval", "tokens_per_second", "mfu", "percent_of_makers_alone",
                "makers_alone_tokens_per_second", "upper_bound_tokens_per_second",
                "percent_of_upper_bound", "percent_of_ceiling", "breakdown", "memory"}  # fmt: skip
    assert promised <= set(data)
    assert [entry["rank"] for entry in data["memory"]] == list(range(layout.cluster.size))


def test_memory_over_the_limit_is_refused_by_name():
    layout = uniform(LLAMA_8B, cluster(("A100-SXM4-40GB", 1, 8)), tp=1, pp=2, micro_batch=1, batch=32, seq=4096)
    with pytest.raises(BadInput, match=r"rank \d+ \(A100-SXM4-40GB\) would need .* GiB"):
        check_memory(layout)
    assert not predict(layout).fits


def test_the_rank_that_is_over_by_the_largest_part_is_named() -> None:
    """Though another needs more bytes; the last one's few layers fit."""
    on = cluster(("A100-SXM4-40GB", 1, 1), ("A100-SXM4-80GB", 1, 2))
    edges = pairwise([0, 10, 31, 32])
    stages = [
        {"layers": [[*own]], "replicas": [{"ranks": [rank], "micro_batch": 1, "samples": 4}]}
        for rank, own in enumerate(edges)
    ]
    plan = {"model": LLAMA_8B.name, "cluster": on.name, "global_batch": 4, "seq_len": 512, "precision": "bf16"}
    layout = bind(PlanSpec.model_validate({**plan, "stages": stages}), LLAMA_8B, on)
    used = rank_memory(layout)
    assert used[0].bytes < used[1].bytes
    need = f"{used[0].bytes / 2**30:.2f}"
    with pytest.raises(BadInput, match=rf"rank 0 \(A100-SXM4-40GB\) would need {need} GiB .* 2 of 3 ranks are over"):
        check_memory(layout)


ACTIVATIONS = {"batch": 64, "seq": 4096, "micro_batch": 2, "zero": 1}


@pytest.mark.parametrize(
    ("schedule", "asked", "words"),
    [
        ("1f1b", ACTIVATIONS, "lower in_flight, lower micro_batch, set recompute: full or offload activations"),
        ("gpipe", ACTIVATIONS, "choose schedule 1f1b and lower micro_batch, set recompute: full or offload activations"),
        ("zero_bubble", ACTIVATIONS, "lower micro_batch or offload activations"),
        ("1f1b", {"batch": 8, "seq": 256, "micro_batch": 1, "zero": 0},
         "set zero: 1, offload optimizer, give the stage fewer layers or a higher tensor-parallel degree"),
        ("1f1b", {"batch": 8, "seq": 256, "micro_batch": 1, "zero": 1},
         "set zero: 2, give the stage fewer layers or a higher tensor-parallel degree"),
    ],
)  # fmt: skip
def test_a_remedy_is_one_under_the_plan_that_it_is_said_of(schedule: str, asked: dict[str, int], words: str) -> None:
    """Once gpipe, which takes no in_flight, was told to lower it, a stage with ZeRO-1 to set it, and zero_bubble to
    recompute."""
    layout = uniform(LLAMA_8B, cluster(("RTX-4090", 2, 8)), tp=1, pp=2, **asked)
    layout = bind(layout.plan.replace(schedule=schedule), layout.model, layout.cluster)
    with pytest.raises(BadInput, match=re.escape(f"GiB): {words}.")):
        check_memory(layout)


def test_zero_1_keeps_a_share_of_the_optimizer_state_per_rank():
    whole, cut = (
        rank_memory(uniform(TINY, LAPTOP, tp=1, pp=1, micro_batch=1, batch=16, seq=64, precision="fp32", zero=z))
        for z in (0, 1)
    )
    assert cut[0].parts["optimizer"] * 4 == pytest.approx(whole[0].parts["optimizer"], rel=0.01)
    assert cut[0].parts["gradients"] == whole[0].parts["gradients"] == 4 * TINY.parameters


def test_a_missing_link_speed_is_asked_for_by_name():
    layout = uniform(
        TINY, cluster(("A100-SXM4-80GB", 2, 2), gbps=None), tp=1, pp=4, micro_batch=1, batch=8, seq=64, precision="fp32"
    )
    with pytest.raises(BadInput, match=r"node 'n0' gives no gbps_per_nic"):
        predict(layout)


def test_importing_the_predictor_brings_no_torch_scipy_or_numpy():
    code = "import sys, hethub.predictor; print([m for m in ('torch', 'scipy', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def random_plan(draw: st.DrawFn) -> PlanSpec:
    """Any plan of TINY on four ranks of two device types: stages, replicas, samples, micro-batches, recompute, ZeRO."""
    ranks, cuts = list(range(4)), sorted(draw(st.sets(st.integers(1, 3), max_size=2)))
    groups = [ranks[a:b] for a, b in pairwise([0, *cuts, 4])]
    layers = sorted(draw(st.sets(st.integers(1, 3), min_size=len(cuts), max_size=len(cuts))))
    stages = []
    for (start, stop), group in zip(pairwise([0, *layers, 4]), groups, strict=True):
        split_up = len(group) > 1 and (draw(st.booleans()) or group[0] < 2 <= group[-1])
        own = [[rank] for rank in group] if split_up else [group]
        if len(own) == 1 and len(group) == 3:
            own = [group[:2], group[2:]] if group[1] < 2 or group[0] >= 2 else [[rank] for rank in group]
        samples = [8 // len(own) + (1 if i < 8 % len(own) else 0) for i in range(len(own))]
        replicas = [
            {"ranks": r, "micro_batch": draw(st.integers(1, 4)), "samples": s}
            for r, s in zip(own, samples, strict=True)
        ]
        recompute = draw(st.sampled_from(["none", "selective", "full"]))
        stages.append({"layers": [[start, stop]], "replicas": replicas, "recompute": recompute, "zero": 1})
    return PlanSpec.model_validate(
        {"model": "tiny", "cluster": "test", "global_batch": 8, "seq_len": 128, "precision": "fp32", "stages": stages}
    )


MIXED = cluster(("V100-SXM2-16GB", 1, 2), ("MI100", 1, 2))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_random_plan_beats_the_ceiling_and_parts_sum(data: st.DataObject) -> None:
    layout = bind(data.draw(st.composite(random_plan)()), TINY, MIXED)
    prediction = predict(layout)
    assert 0 < prediction.percent_of_ceiling <= 100
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_seconds, rel=1e-9)
    low, high = prediction.step_seconds_interval
    assert low < prediction.step_seconds < high


def test_a_link_that_holds_the_step_up_is_named() -> None:
    """Stages behind a thin uplink were said to wait for other stages, and one of them to set the pace."""
    shape = {"tp": 8, "pp": 2, "micro_batch": 1, "batch": 64, "seq": 4096}
    on = cluster(("A100-SXM4-80GB", 1, 8), ("A100-SXM4-80GB", 1, 8))
    told = {}
    for gbps in (1.0, 4000.0):
        racks = [{"name": f"hall {node.name}", "nodes": [node.name], "gbps": gbps} for node in on.nodes]
        behind = ClusterSpec.model_validate({**on.to_dict(), "links": {"racks": racks}})
        told[gbps] = predict(uniform(LLAMA_8B, behind, **shape)).bottleneck
    assert re.search(r"The uplinks of rack 'hall n[01]' carry bytes for (\d+) % of it\.$", told[1.0]), told[1.0]
    assert "carry bytes" not in told[4000.0]
    slow = cluster(("A100-SXM4-80GB", 1, 8), ("A100-SXM4-80GB", 1, 8), gbps=0.1)
    summed = predict(uniform(LLAMA_8B, slow, **{**shape, "tp": 1, "pp": 1})).bottleneck
    assert re.search(r"The network interfaces of machine \d \('n\d'\) carry bytes for (\d+) % of it\.$", summed), summed
    assert "exchanging gradients and weights between replicas" in summed
    assert "offloaded" not in summed  # it was said of plans that offload nothing


@pytest.mark.parametrize(("rate", "limits"), [(None, True), (0.1, True), (1000.0, False)])
def test_an_answer_says_what_staging_costs(rate: float | None, limits: bool) -> None:
    """Whose figure it is, whether it limits, and the step of a relay that does not exist."""
    on = cluster(("A100-SXM4-80GB", 1, 1), ("MI250X-GCD", 1, 1), gbps=400)
    on = on.replace(links=on.links.replace(staging=on.links.staging.replace(gbytes_per_second=rate)))
    layout = uniform(LLAMA_8B.replace(layers=4), on, tp=1, pp=1, micro_batch=1, batch=2, seq=1024, zero=1)
    found = with_staging(predict(layout), layout, None)
    assert found.staging is not None
    assert found.staging.limits == limits
    assert ("a guess" in found.staging.source) == (rate is None)
    assert found.staging.step_seconds_device_direct is not None
    assert (found.staging.step_seconds_device_direct < 0.9 * found.step_seconds) == limits
    sentence = found.staging.sentence()
    assert ("which limits this plan" in sentence and "no such relay" in sentence) == limits
    assert found.to_dict()["staging"]["gbytes_per_second"] == (rate or 1.2)


@pytest.mark.parametrize(
    ("rate", "said"), [(11.23456, "11.2"), (1.2, "1.2"), (100.04, "100"), (0.0123456, "0.0123"), (2345.678, "2346")]
)
def test_the_rate_of_staging_is_said_in_three_digits(rate: float, said: str) -> None:
    """A measured one came with six."""
    sentence = Staging(rate, "measured, with the wire", True, 1.0).sentence()
    assert f"through host memory at {said} GB/s per accelerator (measured, with the wire)" in sentence


def test_a_measured_bridge_does_not_tell_staging_from_the_wire() -> None:
    """A step of which 99.8 % crosses the bridge was said not to be limited."""
    on = cluster(("A100-SXM4-80GB", 1, 1), ("MI250X-GCD", 1, 1), gbps=400)
    layout = uniform(TINY, on, tp=1, pp=1, micro_batch=1, batch=2, seq=64, precision="fp32", zero=1)
    link = {"level": "between_islands", "operation": "send", "latency_seconds": 0.0, "gbytes_per_second": 0.001}
    device = {
        "accelerator": "A100-SXM4-80GB",
        "precision": "fp32",
        "layers": [{"micro_batch": 1, "seq_len": 64, "forward_seconds": 1e-4, "backward_seconds": 2e-4}],
    }
    about = {"date": "", "hethub": hethub.__version__, "software": "test", "model": TINY.to_dict()}
    measured = ProfileSpec.model_validate({**about, "devices": [device], "links": [link]})
    staging = with_staging(predict(layout, profile=measured), layout, measured).staging
    assert staging is not None
    assert (staging.limits, staging.step_seconds_device_direct) == (None, None)
    assert staging.sentence().endswith("at 0.001 GB/s per accelerator (measured, with the wire).")


def test_one_makers_answer_has_no_staging() -> None:
    layout = uniform(TINY, cluster(("A100-SXM4-80GB", 1, 2)), tp=1, pp=1, micro_batch=1, batch=2, seq=64)
    assert with_staging(predict(layout), layout, None).staging is None


def test_what_is_offloaded_is_no_part_of_what_staging_costs() -> None:
    """The step "straight between devices" had no limit of the host for the optimizer's state either: 8.3 s for 13.5,
    with 0.04 s of messages."""
    on = cluster(("A100-SXM4-80GB", 1, 1), ("MI250X-GCD", 1, 1), gbps=400)
    staging = on.links.staging.replace(gbytes_per_second=1000.0, per_host_gbytes_per_second=2.0)
    on = on.replace(links=on.links.replace(staging=staging))
    layout = uniform(LLAMA_8B.replace(layers=4), on, tp=1, pp=2, micro_batch=1, batch=2, seq=128)
    stages = tuple(stage.replace(offload=("optimizer",)) for stage in layout.plan.stages)
    layout = bind(layout.plan.replace(stages=stages), layout.model, on)
    found = with_staging(predict(layout), layout, None)
    assert found.staging is not None
    assert found.breakdown["optimizer"] > 0.5 * found.step_seconds
    bridged = found.breakdown["pp"] + found.breakdown["bubble"]
    assert found.staging.step_seconds_device_direct is not None
    assert found.step_seconds - found.staging.step_seconds_device_direct <= bridged
