"""A profile steers the search: what was measured counts, not what the data sheet promises."""

import json

import pytest

import hethub
from hethub.planner import plan
from hethub.planner.generate.families import FAMILIES
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor.cost.profile import LayerTiming, LinkTiming, ProfileSpec
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from tests.predictor.plans import TINY
from tests.support.command import one, ranks
from tests.support.job_files import write_job

NODES = [
    {"name": "a", "accelerator": "A100-PCIe-40GB", "accelerators": 1, "gbps_per_nic": 100},
    {"name": "v", "accelerator": "A100-PCIe-80GB", "accelerators": 1, "gbps_per_nic": 100},
]
CLUSTER = ClusterSpec.model_validate({"name": "pair", "nodes": NODES})
BATCH = (24, 128, "fp32")


def profile(factors: dict[str, float], model=TINY, largest: int | None = None) -> ProfileSpec:
    """A profile in which an accelerator takes so many seconds a sample, whatever its data sheet says."""
    devices = [
        {
            "accelerator": name,
            "precision": "fp32",
            "largest_micro_batch": largest,
            "layers": [
                {"micro_batch": b, "seq_len": 128, "forward_seconds": f * b, "backward_seconds": 2 * f * b}
                for b in (1, 2, 4, 8, 16)
            ],
        }
        for name, f in factors.items()
    ]
    facts = {"date": "2026-01-01", "hethub": hethub.__version__, "software": "test"}
    return ProfileSpec.model_validate({**facts, "model": model.to_dict(), "devices": devices})


def samples(result) -> dict[int, int]:
    (stage,) = result.plan.stages
    return {replica.ranks[0]: replica.samples for replica in stage.replicas}


def test_an_accelerator_measured_slow_gets_fewer_samples() -> None:
    measured = profile({"A100-PCIe-40GB": 3e-3, "A100-PCIe-80GB": 1e-3})
    wishes = ConstraintsSpec(pp=1)
    result = plan(TINY, CLUSTER, BATCH, wishes, with_bounds=False, profile=measured)
    assert samples(result) == {0: 6, 1: 18}
    assert abs(samples(plan(TINY, CLUSTER, BATCH, wishes, with_bounds=False))[0] - 12) <= 1


def test_the_plans_prediction_is_the_profiles() -> None:
    measured = profile({"A100-PCIe-40GB": 1e-3, "A100-PCIe-80GB": 1e-3})
    result = plan(TINY, CLUSTER, BATCH, ConstraintsSpec(pp=1), with_bounds=False, profile=measured)
    # Between measured sizes of micro-batches a profile is interpolated.
    assert result.prediction.breakdown["compute"] == pytest.approx(12 * 3e-3 * TINY.layers, rel=0.02)


# A rank takes 1 ms a microbatch and next to nothing a sample: without the limit the largest micro-batch is best.
FLAT = tuple(
    LayerTiming(micro_batch=b, seq_len=128, forward_seconds=1e-3 * (1 + 1e-3 * b), backward_seconds=2e-3)
    for b in (1, 2, 4, 8, 16)
)


def micro_batches(largest: int | None, strategy: str, **wishes: int) -> set[int]:
    measured = profile({"A100-PCIe-40GB": 1e-3, "A100-PCIe-80GB": 1e-3}, largest=largest)
    measured = measured.replace(devices=tuple(device.replace(layers=FLAT) for device in measured.devices))
    found = plan(
        TINY, CLUSTER, BATCH, ConstraintsSpec(**wishes), strategy=strategy, with_bounds=False, profile=measured
    ).plan
    return {replica.micro_batch for stage in found.stages for replica in stage.replicas}


@pytest.mark.parametrize("wishes", [{}, {"zero": 3}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("strategy", ["auto", *FAMILIES])
def test_no_rank_gets_a_larger_micro_batch_than_it_measured_to_fit(strategy: str, wishes: dict[str, int]) -> None:
    if strategy in ("poplar", "cephalo") and "pp" in wishes:
        pytest.skip(f"{strategy} plans one stage; it would take a family of several")
    assert max(micro_batches(2, strategy, **wishes)) <= 2
    assert max(micro_batches(None, strategy, **wishes)) > 2


def test_the_limit_is_each_kinds_own_and_the_jobs_micro_batch_counts_for_itself() -> None:
    measured = profile({"A100-PCIe-40GB": 1e-3, "A100-PCIe-80GB": 1e-3}, largest=2)
    free = measured.devices[1].replace(largest_micro_batch=None)
    asked = pose(TINY, CLUSTER, Batch(*BATCH), profile=measured.replace(devices=(measured.devices[0], free)))
    assert [asked.at_most(device_type, 8) for device_type in (0, 1)] == [2, 8]
    assert asked.at_most(0, 1) == 1
    assert asked.with_constraints(ConstraintsSpec(micro_batch=4)).at_most(0, 4) == 4


@pytest.mark.parametrize(
    ("layers", "seq_len", "counts"), [(4, 128, True), (4, 256, True), (8, 128, True), (2, 128, False), (4, 64, False)]
)
def test_what_fitted_with_more_layers_or_longer_sequences_limits_no_smaller_job(
    layers: int, seq_len: int, counts: bool
) -> None:
    """One sample of 4,096 tokens made a job of 128 take microbatches of one: a plan 3.7 times as slow."""
    measured = profile({"A100-PCIe-40GB": 1e-3, "A100-PCIe-80GB": 1e-3}, largest=2)
    asked = pose(TINY.replace(layers=layers), CLUSTER, Batch(24, seq_len, "fp32"), profile=measured)
    assert asked.at_most(0, 8) == (2 if counts else 8)


def test_a_profile_of_another_model_is_refused() -> None:
    measured = profile({"A100-PCIe-40GB": 1e-3}, TINY.replace(hidden=2 * TINY.hidden))
    with pytest.raises(BadInput, match="hidden"):
        plan(TINY, CLUSTER, BATCH, profile=measured)


def test_a_profile_of_other_accelerators_or_another_model_is_refused_by_its_file(tmp_path) -> None:
    job = write_job(tmp_path / "job", plan="auto")
    file = tmp_path / "profile.json"
    other = TINY.replace(hidden=2 * TINY.hidden)
    for measured, words in (
        (profile({"T4": 1e-3}), "T4 in fp32"),
        (profile({"CPU-core": 1e-3}, other), "layers of model"),
    ):
        file.write_text(json.dumps(measured.to_dict()))
        ended = one(ranks(1, "plan", job, "--profile", file, cwd=tmp_path))
        assert ended.exit_code == 2
        assert f"hethub: {file}: the profile measured {words}" in ended.stderr
    ended = one(ranks(1, "plan", job, "--set", f"profile={file}", cwd=tmp_path))
    assert ended.exit_code == 2


def explained(links: tuple[LinkTiming, ...] = ()):
    """Eighteen samples on the faster one, six on the other: both compute for 18 x 4 x 3 ms."""
    measured = profile({"A100-PCIe-40GB": 3e-3, "A100-PCIe-80GB": 1e-3}).replace(links=links)
    # Where links count: sums that slow no compute which hides them, and one schedule, which hides none but by the backward.
    on, asked = CLUSTER.replace(emulated=bool(links)), {"schedule": "1f1b", "zero": 0} if links else {}
    constraints = ConstraintsSpec.model_validate({"pp": 1, **asked})
    return plan(TINY, on, BATCH, constraints, with_bounds=False, profile=measured, explain=True)


def test_what_binds_is_found_for_measured_accelerators() -> None:
    """With the faster one a tenth better 19 samples take 19 x 4 x 3 / 1.1 ms, 4.2 % less. All speeds were told to win
    nothing, for the measurements stayed as they were."""
    gains = {reason.constraint: reason.faster_percent for reason in explained().reasons}
    assert gains["the speed of A100-PCIe-80GB"] == pytest.approx(100 * (18 / (19 / 1.1) - 1), abs=0.5)


def test_measured_speeds_and_links_are_off_in_the_scenarios_too() -> None:
    """A step that is computing alone varies with the accelerators' speeds; one that waits for a measured link waits 1/0.6
    times as long where links give 60 %."""
    computing = explained().outlook
    assert computing.p90_seconds > 1.02 * computing.p10_seconds
    link = {"level": "between_nodes", "latency_seconds": 0.0, "gbytes_per_second": 0.05}
    operations = ("send", "all_reduce")
    waiting = explained(tuple(LinkTiming.model_validate({**link, "operation": each}) for each in operations))
    shown = waiting.prediction.breakdown["dp"]
    more = waiting.outlook.links_at_60_percent_seconds - waiting.prediction.step_seconds
    assert more == pytest.approx(shown * (1 / 0.6 - 1), rel=0.02)
