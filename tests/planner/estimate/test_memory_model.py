"""A rank's bytes in closed form, beside the predictor's."""

import pytest

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.memory_model import ONLY, Coefficients
from hethub.planner.estimate.memory_probes import Mode
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor import rank_memory
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Offload, ReplicaSpec, StageSpec
from tests.planner.problems import TINY, cluster, every_plan, kind_of


def bytes_of(own: Coefficients, layers: int, held: int, place: int, shards: float = 1.0) -> float:
    at = Coefficients(*(part[place] for part in own))
    kept = at.once + at.layer * layers + held * (at.microbatch + at.layer_microbatch * layers)
    return kept + (at.state_once + at.state_layer * layers) / shards


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_the_memory_model_is_the_predictors_memory(tied, depth):
    model = ModelSpec(
        name="m", layers=9, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=1024, max_seq_len=256, tied_head=tied
    )
    problem = pose(
        model,
        cluster(("amd", 4, 0.05, 4.0), ("nvidia", 4, 0.1, 4.0)),
        Batch(16, 128, "bf16"),
        ConstraintsSpec(pp=depth),
    )
    costs, plans = UnitCosts(problem), every_plan(problem)
    assert len(plans) == 40
    for evaluation in plans:
        stages = evaluation.plan.stages
        found = rank_memory(bind(evaluation.plan, model, problem.cluster))
        in_flight = bind(evaluation.plan, model, problem.cluster).in_flight
        for s, stage in enumerate(stages):
            replica = stage.replicas[0]
            place = 3 if len(stages) == 1 else 0 if s == 0 else 2 if s == len(stages) - 1 else 1
            device_type = kind_of(problem, replica)
            coefficients = costs.coefficients(
                device_type, replica.tp, replica.micro_batch, Mode(stage.recompute, problem.usual_zero)
            )
            shards = len(stage.ranks) / replica.tp if stage.zero else 1
            mine = bytes_of(coefficients, stage.num_layers, in_flight[s][0], place, shards)
            assert mine == pytest.approx(found[replica.ranks[0]].bytes, rel=0.03)


@pytest.mark.parametrize("others", [[], [{"name": "m", "accelerator": "MI250X-GCD", "accelerators": 2}]])
def test_an_accelerator_alone_on_its_island_has_no_communicator(others):
    """Probes have several ranks of one; what their communicators take was once counted for it."""
    alone = ClusterSpec.model_validate(
        {"name": "one", "nodes": [{"name": "n", "accelerator": "T4", "accelerators": 1}, *others]}
    )
    problem = pose(TINY, alone, Batch(4, 64, "fp16"))
    plan = problem.plan(
        "1f1b", [StageSpec(layers=((0, 6),), replicas=(ReplicaSpec(ranks=(0,), micro_batch=1, samples=4),), zero=1)]
    )
    (found,) = rank_memory(bind(plan, TINY, alone))
    device_type = next(index for index, own in enumerate(problem.device_types) if own.accelerator.name == "T4")
    coefficients = UnitCosts(problem).coefficients(device_type, 1, 1, Mode("none", problem.usual_zero))
    mine = bytes_of(coefficients, 6, 1, ONLY)
    assert mine == pytest.approx(found.bytes, rel=0.01)


@pytest.mark.parametrize("micro_batch", [2, 3, 16, 33])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("offload", [(), ("optimizer",)])
def test_between_probed_micro_batches_and_without_the_optimizers_state_a_rank_holds_what_the_predictor_says(
    micro_batch: int, zero: int, offload: tuple[Offload, ...]
) -> None:
    """A model whose state and whose activations are both many times what the framework takes."""
    model = TINY.replace(layers=8, hidden=2048, heads=16, kv_heads=16, ffn=5632, vocab=32000, max_seq_len=2048)
    on = ClusterSpec.model_validate(
        {"name": "two", "nodes": [{"name": "n", "accelerator": "A100-SXM4-80GB", "accelerators": 2}]}
    )
    problem = pose(model, on, Batch(80, 1024, "bf16"))
    replicas = tuple(ReplicaSpec(ranks=(rank,), micro_batch=micro_batch, samples=40) for rank in range(2))
    plan = problem.plan("1f1b", [StageSpec(layers=((0, 8),), replicas=replicas, zero=zero, offload=offload)])
    (found, _) = rank_memory(bind(plan, model, on))
    coefficients = UnitCosts(problem).coefficients(0, 1, micro_batch, Mode("none", zero, offload))
    mine = bytes_of(coefficients, 8, 1, ONLY, 2 if zero else 1)
    assert mine == pytest.approx(found.bytes, rel=0.01)
