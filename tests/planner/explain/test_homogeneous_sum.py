"""The upper bound without a plan: what `hethub predict --bounds` asks for is what planning finds."""

from typing import Any

import pytest

from hethub.planner import plan
from hethub.planner.explain.homogeneous_sum import divisible, homogeneous_parts, makers_alone_tokens_per_second
from hethub.planner.generate.families import FAMILIES
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from tests.predictor.plans import LLAMA_8B, TINY, cluster


def with_little_host_memory(on: ClusterSpec) -> ClusterSpec:
    """The same nodes, of which the first cannot hold what does not fit on its accelerators."""
    first, *others = on.nodes
    return on.replace(nodes=(first.replace(host_memory_gb=32.0), *others))


def test_the_bound_of_a_job_is_the_one_that_planning_reports() -> None:
    on = cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD", 1, 2))
    found = plan(TINY, on, (16, 128, "bf16")).prediction.makers_alone_tokens_per_second
    alone = homogeneous_parts(pose(TINY, on, Batch(16, 128, "bf16")))
    assert makers_alone_tokens_per_second(alone) == pytest.approx(found)


@pytest.mark.parametrize(
    ("part", "samples"),
    [(0.4, 0), (0.6, 1), (43.2, 43), (64.9, 64), (65.1, 66), (760.6, 768), (472.7, 472), (1891, 1888)],
)
def test_a_part_of_the_batch_can_be_divided(part: float, samples: int) -> None:
    """By eye: of 761 samples ten replicas' microbatches do not come out even, nor do those of 16."""
    assert divisible(part) == samples
    assert part < 32 or abs(samples / part - 1) <= 1 / 64


def test_a_kind_without_a_sample_leaves_it_undefined() -> None:
    on = cluster(("H100-SXM5-80GB", 1, 8), ("T4", 1, 1))
    alone = homogeneous_parts(pose(TINY, on, Batch(2, 128, "fp16")))
    assert alone is None
    assert makers_alone_tokens_per_second(alone) is None


MID = LLAMA_8B.replace(name="mid", layers=8, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000)
ALONE: dict[str, Any] = {
    "small memory": (MID, cluster(("T4", 1, 4), ("V100-SXM2-16GB", 1, 4), gbps=50), (24, 1024, "fp16")),
    "unlike makes": (MID, cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD", 1, 4), gbps=50), (17, 2048, "bf16")),
    "small layers over nodes": (TINY, cluster(("A100-SXM4-80GB", 2, 2), ("MI100", 1, 3), gbps=50), (40, 128, "bf16")),
    "memory lifted": (
        LLAMA_8B,
        with_little_host_memory(cluster(("T4", 1, 4), ("V100-SXM2-32GB", 1, 8), gbps=50)),
        (32, 1024, "fp16"),
    ),
}


def test_a_lifted_memory_is_searched_as_a_large_one() -> None:
    """Only evaluations knew that it was lifted; estimates led away from what did not fit, to 10 % less throughput."""
    on, asked = with_little_host_memory(cluster(("T4", 1, 8))), (32, 512, "fp16")
    alone = homogeneous_parts(pose(LLAMA_8B, on, Batch(*asked)))
    assert alone is not None
    device = on.nodes[0].device.replace(memory_gb=1000)
    large = on.replace(nodes=(on.nodes[0].replace(accelerator=device, host_memory_gb=8000),))
    best = plan(LLAMA_8B, large, asked, with_bounds=False, top=0).prediction
    assert [device_type.memory_lifted for device_type in alone] == [True]
    assert alone[0].tokens_per_second >= best.tokens_per_second


def test_a_time_limit_is_the_searchs_and_makes_the_bound_no_smaller() -> None:
    """`predict --bounds` cut the searches of the device types short where `plan` does not."""
    model, on, (batch, seq_len, precision) = ALONE["unlike makes"]
    limits = ConstraintsSpec(), ConstraintsSpec(time_limit_seconds=1e-3)
    problems = (pose(model, on, Batch(batch, seq_len, precision), limit) for limit in limits)
    free, limited = (makers_alone_tokens_per_second(homogeneous_parts(problem)) for problem in problems)
    assert limited == free


@pytest.mark.parametrize(
    "name",
    [*list(ALONE)[1:3], *(pytest.param(name, marks=pytest.mark.slow) for name in ("small memory", "memory lifted"))],
)
def test_no_system_is_faster_on_a_homogeneous_part_than_the_bound_counts(name: str) -> None:
    model, on, (batch, seq_len, precision) = ALONE[name]
    alone = homogeneous_parts(pose(model, on, Batch(batch, seq_len, precision)))
    assert alone is not None
    assert [device_type.memory_lifted for device_type in alone] == [name == "memory lifted", False]
    for device_type in alone:
        for family in FAMILIES:
            try:
                found = plan(
                    model,
                    device_type.cluster,
                    (device_type.global_batch, seq_len, precision),
                    strategy=family,
                    with_bounds=False,
                )
            except BadInput:
                continue  # it has no plan that fits this device type
            assert found.prediction.tokens_per_second <= device_type.tokens_per_second * (1 + 1e-9), family


@pytest.mark.slow
def test_several_processes_give_the_same_answer() -> None:
    on = cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD", 1, 2))
    one, two = (plan(TINY, on, (16, 128, "bf16"), explain=True, processes=n).to_dict() for n in (1, 2))
    assert one.pop("search_seconds") > 0
    assert two.pop("search_seconds") > 0
    assert one == two
    assert len(one["kinds_alone"]) == 2
    names = {reason["constraint"] for reason in one["reasons"]}
    assert {"the speed of A100-SXM4-80GB", "the speed of MI250X-GCD", "twice the batch"} < names
