"""Stragglers among ranks of unlike work: none is seen where there is none, and one that is there is soon named."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hethub.runtime.loop.replanning import Replanner
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.measure import straggler
from hethub.runtime.measure.rank_times import planned_seconds
from hethub.runtime.pace import LOOKED_AT, WatchedPace
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import StragglerSpec, TrainSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import PlanSpec
from tests.support.layouts import MODEL, Case, random_tokens, replica, stage
from tests.support.ranks import run_ranks

SPEC = StragglerSpec()
NOISE = 0.02  # of a step's time, drawn for each rank
CLUSTER = ClusterSpec.model_validate(
    {
        "name": "two makers",
        "nodes": [
            {"name": "nv", "accelerator": "A100-SXM4-80GB", "accelerators": 4, "nics": 4, "gbps_per_nic": 200},
            {"name": "amd", "accelerator": "MI250X-GCD", "accelerators": 4, "nics": 4, "gbps_per_nic": 200},
        ],
    }
)
FIRST, SECOND = (0, 2), (2, 4)
STAGES = {
    "dp8": [stage((0, 4), *(replica([rank], 2) for rank in range(8)), zero=1)],
    "dp8 uneven": [stage((0, 4), *(replica([rank], 3 - rank // 4 * 2) for rank in range(8)), zero=1)],
    "dp8 uneven, alike for each maker": [
        stage((0, 4), *(replica([rank], 3 - rank // 2 % 2 * 2, 3 - rank // 2 % 2 * 2) for rank in range(8)), zero=1)
    ],
    "tp4 beside dp4": [
        stage((0, 4), replica([0, 1, 2, 3], 8, 2), *(replica([rank], 2) for rank in range(4, 8)), zero=1)
    ],
    "tp2 beside dp2, both makers": [
        stage(
            (0, 4), replica([0, 1], 6, 2), replica([2], 2), replica([3], 2), replica([4, 5], 4, 2), replica([6], 1),
            replica([7], 1), zero=1,
        )
    ],
    "tp4 of each maker": [stage((0, 4), replica([0, 1, 2, 3], 10, 2), replica([4, 5, 6, 7], 6, 2), zero=1)],
    "tp4 then tp2 and dp2": [
        stage(FIRST, replica([0, 1, 2, 3], 16, 2)), stage(SECOND, replica([4, 5], 8, 2), replica([6], 4), replica([7], 4)),
    ],
    "four stages": [
        stage((number, number + 1), replica([2 * number], 8), replica([2 * number + 1], 8)) for number in range(4)
    ],
    "tp2 in two stages": [
        stage(FIRST, replica([0, 1], 8, 2), replica([2, 3], 8, 2)), stage(SECOND, replica([4, 5], 8, 2), replica([6, 7], 8, 2)),
    ],
}  # fmt: skip


def layout(name: str) -> Layout:
    plan = {
        "model": MODEL.name, "cluster": CLUSTER.name, "global_batch": 16, "seq_len": 16, "precision": "fp32",
        "schedule": "1f1b", "stages": STAGES[name],
    }  # fmt: skip
    return bind(PlanSpec.model_validate(plan), MODEL, CLUSTER)


# Of a world what a rank that does not plan needs.
OTHER: Any = SimpleNamespace(rank=1, barrier=lambda: None)


def watch(name: str) -> Replanner:
    job: Any = SimpleNamespace(spec=SimpleNamespace(drift=SPEC, replan="report", train=TrainSpec()))
    return Replanner(job, layout(name), None)


def steps(name: str, slow: dict[int, float], error: float = 1.0) -> Any:
    """Endless steps: what was planned, times its error for all, for each kind of rank, noise, and how slow a rank is.

    TP shards are narrower than what efficiencies were measured on, so that their prediction errs in its own way; so does
    that of small micro-batches, whose kernels are over before the next is launched.
    """
    bound, random = layout(name), np.random.default_rng(3)
    replicas = [bound.replica(own.stage, own.replica) for own in bound.assignments]
    errors = [{1: 1.05, 2: 1.3, 4: 1.5}[own.tp] * (1.0 + 0.3 / own.micro_batch) * error for own in replicas]
    planned = planned_seconds(bound, None)
    for _ in itertools.count():
        noise = random.lognormal(0.0, NOISE, len(planned))
        yield [
            {kind: seconds * errors[rank] * noise[rank] * slow.get(rank, 1.0) for kind, seconds in own.items()}
            for rank, own in enumerate(planned)
        ]


@pytest.mark.parametrize("name", STAGES)
def test_a_thousand_clean_steps_raise_no_alarm(name: str) -> None:
    watching, clean = watch(name), steps(name, {})
    assert not [row for step in range(1000) for row in watching.note(step, next(clean), OTHER)]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("rank", "error"), [(0, 1.0), (7, 1.0), (7, 0.3)])
def test_a_rank_1_3_times_slower_is_named_within_twenty_steps(name: str, rank: int, error: float) -> None:
    """Also where all ranks are faster than was predicted."""
    watching, slowed = watch(name), steps(name, {rank: 1.3}, error)
    looked_at = [step for step in range(1, 21) if (step - 1) % LOOKED_AT == 0 and step > 2]
    rows = [row for step in looked_at for row in watching.note(step, next(slowed), OTHER)]
    assert [row["rank"] for row in rows] == [rank]
    assert rows[0]["factor"] == pytest.approx(1.3, abs=4 * NOISE)


def test_a_rank_alone_of_its_kind_is_held_against_all_others() -> None:
    busy = [{"forward": seconds} for seconds in (1.2, 1.2, 1.0, 1.0, 1.5)]
    planned = [{"forward": 1.0}] * 5
    factors = straggler.against_others(busy, planned, ["forward"], ["tp", "tp", "dp", "dp", "alone"], [True] * 5)
    assert factors == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.25])


# -- real ranks --------------------------------------------------------------------------------------------------------

DELAY_SECONDS = 0.05  # far more than a tiny layer computes


def busy_behind_slow_sums(world: Any, case: Case) -> tuple[float, float]:
    """What a rank was busy with in a step whose collectives inside layers are slow, and how long those took it."""
    from hethub.runtime.model import tensor_parallel

    waited, all_reduce = [], tensor_parallel.dist.all_reduce

    def slow(*arguments: Any, **more: Any) -> Any:
        waited.append(DELAY_SECONDS)
        time.sleep(DELAY_SECONDS)
        return all_reduce(*arguments, **more)

    trainer = Trainer(case.layout(), world, random_tokens(case), TrainSpec(), pace=WatchedPace(world.device))
    trainer.initialise()
    trainer.run_step(1)  # warms up
    tensor_parallel.dist.all_reduce = slow
    try:
        busy = trainer.run_step(2).busy_seconds[world.rank]
    finally:
        tensor_parallel.dist.all_reduce = all_reduce
    assert busy is not None
    return sum(busy.values()), sum(waited)


def test_what_ranks_wait_for_each_other_inside_layers_is_not_their_work() -> None:
    case = Case(name="tp2 beside dp", stages=[stage((0, 4), replica([0, 1], 6, 3), replica([2], 2, 2))])
    results = run_ranks(3, busy_behind_slow_sums, case, timeout_seconds=120)
    for busy, waited in results[:2]:
        assert waited > 20 * DELAY_SECONDS
        assert busy < waited / 2
