"""Plans: what a plan file is refused for by itself, and bound to a model and a cluster."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given

from hethub.spec.cluster import ClusterSpec
from hethub.spec.documents import dump_yaml
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import SCHEDULES, PlanSpec, ScheduleName, load_plan, save_plan
from tests.spec.random_plans import cases
from tests.support.layouts import MODEL, Case, replica, stage

TWO = [stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]
ONE = [stage((0, 4), replica([0], 4), replica([1], 4), zero=1)]


def plan(stages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"model": "tiny", "cluster": "test", "global_batch": 8, "seq_len": 16, "precision": "fp32"}
    return {**head, "stages": stages, **more}


def test_every_schedule_has_its_row() -> None:
    assert SCHEDULES.keys() == {*get_args(ScheduleName)}


@given(case=cases())
def test_a_saved_plan_is_the_plan(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    given_plan = case.layout().plan
    save_plan(given_plan, path)
    assert load_plan(path) == given_plan


def test_a_saved_plan_reads_as_a_person_would_write_it(tmp_path: Path) -> None:
    stages = [stage((0, 4), replica([0, 1], 6, 2, tensor_shares=[3, 1], in_flight=1), replica([2], 2), zero=1)]
    stages[0] |= {"state_shares": {2: 0.25}, "recompute": "full"}
    save_plan(PlanSpec.model_validate(plan(stages)), tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text() == (
        "version: 1\nmodel: tiny\ncluster: test\nglobal_batch: 8\nseq_len: 16\nprecision: fp32\nstages:\n"
        "- layers: [[0, 4]]\n  replicas:\n"
        "  - {ranks: [0, 1], micro_batch: 2, samples: 6, in_flight: 1, tensor_shares: [3.0, 1.0]}\n"
        "  - {ranks: [2], micro_batch: 1, samples: 2}\n"
        "  zero: 1\n  state_shares: {2: 0.25}\n  recompute: full\n"
    )


@pytest.mark.parametrize(
    ("stages", "more", "expected"),
    [
        ([TWO[0], stage((3, 4), replica([1], 8))], {}, r"layers \[2, 3\) are in no stage: stage 1 starts at layer 3"),
        ([TWO[0], stage((1, 4), replica([1], 8))], {}, r"layers \[1, 2\) are in two stages: stage 1 starts at layer 1"),
        ([stage((1, 4), replica([0], 8))], {}, r"layers \[0, 1\) are in no stage: stage 0 starts at layer 1, the model with layer 0"),
        ([stage((2, 2), replica([0], 8))], {}, r"the chunk of layers \[2, 2\) holds none; stop must exceed start"),
        ([TWO[0], stage((2, 4), replica([1], 7))], {}, "stage 1: its replicas take 7 samples, but global_batch is 8; .* by \\+1"),
        ([TWO[0], stage((2, 4), replica([0], 8))], {}, "rank 0 is twice in replicas; every rank belongs to exactly one"),
        ([TWO[0], stage((2, 4), replica([2], 8))], {}, r"rank 1 has no place in the plan, though .* or set unused: \[1\]"),
        (TWO, {"unused": [1]}, "rank 1 is in a replica and in unused; every rank belongs to exactly one replica, or is unused"),
        (TWO, {"unused": [2, 2]}, "rank 2 is twice in unused"),
        (TWO, {"unused": [2, 2, 2]}, "rank 2 is twice in unused"),
        (TWO, {"unused": [3]}, "rank 2 has no place in the plan, though rank 3 does"),
        ([stage((0, 4), replica([0, 1], 8, tensor_shares=[1]))], {}, "1 tensor_shares for 2 ranks; give one share per rank"),
        ([stage((0, 4), replica([0], 8), zero=1, state_shares={7: 0.5})], {}, "state_shares name rank 7, which is not in this"),
        ([{**ONE[0], "state_shares": {0: 0.7, 1: 0.7}}], {}, "state_shares sum to 1.4, .*; give rank 1 at most 0.3"),
        ([{**ONE[0], "zero": 0, "state_shares": {0: 0.7}}], {}, "state_shares need zero: 1 or more"),
        ([{**ONE[0], "zero": 4}], {}, "zero is 4, but input should be less than or equal to 3"),
        ([{**TWO[0], "layers": [[0, 1], [2, 3]]}, {**TWO[1], "layers": [[1, 2], [3, 4]]}], {},
         "schedule 1f1b takes one chunk of layers per stage; got 2. Several go with interleaved or ministages"),
        ([{**TWO[0], "layers": [[0, 1], [2, 3]]}, TWO[1]], {"schedule": "interleaved"}, "all have equally many"),
        (TWO, {"schedule": "2f2b"}, "schedule is '2f2b', but input should be 'gpipe'"),
        (TWO, {"precision": "int8"}, "precision is 'int8', but input should be 'fp64', 'fp32', 'bf16' or 'fp16'"),
        ([stage((0, 4), replica([0], 8, microbatch=1))], {}, "microbatch is not a known key; did you mean 'micro_batch'"),
        ([stage((0, 4), replica([-1], 8))], {}, r"ranks\[0\] is -1, but input should be greater than or equal to 0"),
        ([stage((0, 4), {**replica([0], 8), "micro_batch": 10**400})], {}, r"micro_batch is 1000.*, but input should be less than"),
        ([], {}, "stages is \\[\\], but it needs at least 1 item"),
        (TWO, {"version": 2}, "version is 2, but input should be 1"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(
    tmp_path: Path, stages: list[dict[str, Any]], more: dict[str, Any], expected: str
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan(stages, **more)))
    with pytest.raises(BadInput, match=expected) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": [TWO[0], stage((3, 4), replica([1], 8, 2))]},
         "plan.yaml, line 14: stages[1].layers[0]: layers [2, 3) are in no stage"),
        ({"stages": [TWO[0], stage((2, 4), replica([1], 6, 2))]}, "plan.yaml, line 15: stages[1].replicas: stage 1: its replicas"),
        ({"schedule": "interleaved"}, "plan.yaml, line 19: schedule: schedule interleaved takes two or more"),
        ({"unused": [1]}, "plan.yaml: rank 1 is in a replica and in unused"),
    ],
)  # fmt: skip
def test_a_fault_of_the_whole_plan_is_said_to_stand_at_its_key(tmp_path: Path, changes: Any, said: str) -> None:
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan(**{"stages": TWO, **changes})))
    with pytest.raises(BadInput) as refused:
        load_plan(tmp_path / "plan.yaml")
    assert str(refused.value).startswith(f"{tmp_path}/{said}")


@pytest.mark.parametrize(
    "shares", [(1 / 6, 1 / 6, 0.9), (0.166667, 0.166667, 0.9), (8 / 9, 8 / 9, 8 / 9), (0.7, 0.6, 0.6)]
)
def test_state_shares_that_are_offered_are_accepted(shares: tuple[float, ...]) -> None:
    """A sixth twice and 0.9: 0.6667 was offered, with which they were above 1 again."""

    def stages(shares: Sequence[float]) -> list[dict[str, Any]]:
        thirds = [replica([rank], samples) for rank, samples in enumerate((3, 3, 2))]
        return [stage((0, 4), *thirds, zero=1, state_shares=dict(enumerate(shares)))]

    with pytest.raises(ValueError, match="state_shares sum to") as refused:
        PlanSpec.model_validate(plan(stages(shares)))
    offered = re.search(r"give rank (\d) at most ([0-9.]*[0-9])|divide each by ([0-9.]*[0-9])", str(refused.value))
    assert offered is not None
    rank, most, divisor = offered.groups()
    better = [share / float(divisor) if divisor else share for share in shares]
    if rank:
        better[int(rank)] = float(most)
    assert 0.999 < sum(PlanSpec.model_validate(plan(stages(better))).stages[0].state_shares.values()) <= 1 + 1e-9


def test_chunks_interleave_over_the_stages() -> None:
    stages = [{**TWO[0], "layers": [[0, 1], [2, 3]]}, {**TWO[1], "layers": [[1, 2], [3, 4]]}]
    given_plan = PlanSpec.model_validate(plan(stages, schedule="interleaved"))
    assert (given_plan.num_chunks, given_plan.num_layers) == (2, 4)


def cluster(*accelerators: tuple[Any, str], name: str = "test") -> ClusterSpec:
    """One node of one accelerator per (accelerator, vendor)."""
    nodes = [
        {"name": f"node{i}", "accelerator": accelerator, "accelerators": 1, "vendor": vendor}
        for i, (accelerator, vendor) in enumerate(accelerators)
    ]
    return ClusterSpec.model_validate({"name": name, "nodes": nodes})


ALIKE = cluster(("CPU-core", "a"), ("CPU-core", "a"))
MIXED = cluster(("CPU-core", "a"), ("CPU-core", "b"))
WITHOUT_FP16 = {
    "name": "own", "vendor": "own", "memory_gb": 8, "memory_gbytes_per_second": 100, "fp32_tflops": 1, "bf16_tflops": 2,
    "link_gbytes_per_second": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "more", "on", "expected"),
    [
        (TWO, {"cluster": "other"}, ALIKE, "made for cluster 'other', but the job has cluster 'test'; plan again"),
        (TWO, {"model": "other"}, ALIKE, "made for model 'other', but the job has model 'tiny'"),
        ([stage((0, 2), replica([0], 8)), stage((2, 3), replica([1], 8))], {}, ALIKE,
         r"stages hold layers \[0, 3\), but model 'tiny' has 4; let the last stage stop at layer 4"),
        ([stage((0, 4), replica([0], 8))], {}, ALIKE, "places 1 ranks, but cluster 'test' has 2 accelerators"),
        (TWO, {"seq_len": 65}, ALIKE, "seq_len 65 exceeds the 64 tokens that model 'tiny' takes"),
        ([stage((0, 4), replica([0, 1, 2], 8))], {}, cluster(*[("CPU-core", "a")] * 3),
         r"stages\[0\].replicas\[0\]: TP 3 does not divide .* Degrees that work: 1, 2, 4, 8"),
        (TWO, {"precision": "bf16"}, cluster(("A100-SXM4-80GB", "nvidia"), ("T4", "nvidia")),
         r"precision bf16: accelerator T4 \(rank 1, node 'node1'\) does not compute in it; choose fp16 or fp32,"),
        (TWO, {"precision": "fp16"}, cluster((WITHOUT_FP16, "own"), (WITHOUT_FP16, "own")), "in it; choose bf16 or fp32,"),
        ([stage((0, 4), replica([0, 1], 8))], {}, MIXED,
         r"replicas\[0\]: ranks \[0, 1\] are a tensor-parallel group over islands a and b; a replica lies inside one island"),
        ([{**ONE[0], "zero": 0}], {}, MIXED, r"stages\[0\]: zero: 0 with replicas on islands a and b .* set zero: 1"),
        ([stage((0, 2), replica([0], 8, 1, in_flight=1)), TWO[1]], {}, ALIKE, "in_flight is 1.*give at least 2"),
    ],
)  # fmt: skip
def test_a_plan_for_something_else_is_refused(
    stages: list[dict[str, Any]], more: dict[str, Any], on: ClusterSpec, expected: str
) -> None:
    with pytest.raises(BadInput, match=expected):
        bind(PlanSpec.model_validate(plan(stages, **more)), MODEL, on)


@given(cases())
def test_assignments_leaders_and_shares_of_a_bound_plan_are_consistent(case: Case) -> None:
    layout: Layout = case.layout()
    assert [assignment.rank for assignment in layout.assignments] == list(range(case.size))
    for rank, assignment in enumerate(layout.assignments):
        assert layout.replica(assignment.stage, assignment.replica).ranks[assignment.position] == rank
    for microbatches in layout.microbatches:
        for microbatch in microbatches:
            assert layout.leader(microbatch) in layout.replica(microbatch.stage, microbatch.replica).ranks
    for assignment in layout.assignments:
        assert (
            len(layout.shares(assignment.stage, assignment.replica))
            == layout.replica(assignment.stage, assignment.replica).tp
        )
