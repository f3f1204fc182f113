"""The profiler on real ranks: every level of link, every point asked for, one profile on all ranks, and it predicts."""

import math
from typing import Any

import pytest

from hethub.predictor import predict
from hethub.predictor.profile import ProfileSpec
from tests.predictor.plans import TINY, cluster, uniform

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

from tests.support.ranks import run_ranks


def profile_on_rank(world: Any) -> dict[str, Any]:
    from hethub.runtime.profiler import profile_world
    from hethub.spec.accelerator import find_accelerator

    return profile_world(
        world, TINY, find_accelerator("CPU-core"), "fp32", [0] * world.size,
        seq_lens=[64], micro_batches=[1, 2], tps=[1, 2], seconds_per_point=0.01,
    ).to_dict()  # fmt: skip


def test_all_ranks_of_two_islands_measure_one_profile() -> None:
    profiles = run_ranks(4, profile_on_rank, islands=[[0, 1], [2, 3]])
    assert all(profile == profiles[0] for profile in profiles)
    profile = ProfileSpec.model_validate(profiles[0])
    points = {(t.micro_batch, t.seq_len, t.tp) for t in profile.devices[0].layers}
    assert points == {(b, 64, tp) for b in (1, 2) for tp in (1, 2)}
    assert {(link.level, link.operation) for link in profile.links} == {
        (level, operation) for level in ("in_node", "between_islands") for operation in ("send", "all_reduce")
    }
    layout = uniform(TINY, cluster(("CPU-core", 1, 4)), tp=1, pp=2, micro_batch=2, batch=16, seq=64, precision="fp32")
    prediction = predict(layout, profile=profile)
    assert not prediction.extrapolated
    assert 0 < prediction.step_seconds < math.inf
