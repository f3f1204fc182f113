"""What a machine's ranks offload shares what its host carries in all."""

import pytest

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.stage_times import StageTimes
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.planner.problem.scaled import Scale, scaled
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import step_times
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from tests.predictor.plans import LLAMA_8B, TINY, cluster, uniform


def offloading(per_host: float | None, stages: tuple[int, ...]) -> PlanCosts:
    """Two stages on the two halves of a machine of eight, of which these offload their optimizer."""
    staging = {"per_host_gbytes_per_second": per_host} if per_host else {}
    node = {"name": "n", "accelerator": "H100-SXM5-80GB", "accelerators": 8}
    on = ClusterSpec.model_validate({"name": "host", "nodes": [node], "links": {"staging": staging}})
    layout = uniform(LLAMA_8B, on, tp=1, pp=2, micro_batch=1, batch=8, seq=4096)
    changed = [
        stage.replace(offload=("optimizer",) if index in stages else ())
        for index, stage in enumerate(layout.plan.stages)
    ]
    return PlanCosts(Layout(layout.plan.replace(stages=changed), layout.model, on), HETHUB, packaged())


@pytest.mark.parametrize(("stages", "at_once"), [((0,), 4), ((0, 1), 8)])
def test_ranks_that_offload_share_their_host(stages: tuple[int, ...], at_once: int) -> None:
    """Each copied at its own PCIe, 52 GB/s, whatever the host carries."""
    free, limited = (offloading(per_host, stages) for per_host in (None, 100.0))
    place = free.layout.cluster.places[0]
    assert free.state.host_copies.seconds_per_byte(place) == pytest.approx(
        1e-9 / (64 * packaged().links["host_copy_fraction"])
    )
    assert limited.state.host_copies.seconds_per_byte(place) == pytest.approx(1e-9 * at_once / 100)
    assert limited.optimizer(0, 0) > 1.5 * free.optimizer(0, 0)
    # A master copy and two moments in fp32 of every parameter go both ways beside the step, which is shorter. The first
    # eight million come alone.
    first, copies = 12 * 2**23, limited.state.host_copies
    rest = 12 * limited.state.most_parameters(0) - first
    expected = first * copies.seconds_per_byte(place) + rest * copies.passing_seconds_per_byte(place)
    assert limited.optimizer(0, 0) == pytest.approx(expected)


def test_a_rank_alone_on_its_machine_has_the_host_to_itself() -> None:
    """Beside equal replicas, two of which share theirs. So little state is brought before any of it is stepped: it was
    priced as if copied beside that, and rehearsed steps were up to 4 % longer."""
    on = cluster(("H100-SXM5-80GB", 1, 1), ("H100-SXM5-80GB", 1, 2))
    on = on.replace(links=on.links.replace(staging=on.links.staging.replace(per_host_gbytes_per_second=10.0)))
    layout = uniform(TINY, on, tp=1, pp=1, micro_batch=1, batch=3, seq=64, offload=["optimizer"])
    costs = PlanCosts(layout, HETHUB, packaged())
    step = costs.layer_cost(0).optimizer(costs.state.owned(0, layout.stages[0].replicas[0], 0, None))
    alone, *others = (costs.optimizer(0, replica) - step for replica in range(3))
    assert others == [pytest.approx(2 * alone)] * 2
    assert alone > 0


def test_what_is_fetched_passes_what_is_stored() -> None:
    """PCIe carries both at once; what a host carries in all is for both."""
    free, limited = (offloading(per_host, (0, 1)) for per_host in (None, 100.0))
    place = free.layout.cluster.places[0]
    assert free.state.host_copies.passing_seconds_per_byte(place) == free.state.host_copies.seconds_per_byte(place)
    assert limited.state.host_copies.passing_seconds_per_byte(place) == pytest.approx(1e-9 * 2 * 8 / 100)


@pytest.mark.parametrize("emulated", [False, True])
def test_cpus_that_copy_themselves_do_one_after_the_other(emulated: bool) -> None:
    on = cluster(("CPU-core", 1, 2)).replace(emulated=emulated)
    layout = uniform(TINY, on, tp=1, pp=1, micro_batch=1, batch=2, seq=64, precision="fp32", offload=["optimizer"])
    state, place = PlanCosts(layout, HETHUB, packaged()).state, on.places[0]
    times = 1 if emulated else 2
    assert state.host_copies.passing_seconds_per_byte(place) == times * state.host_copies.seconds_per_byte(place)


def test_a_host_that_carries_enough_limits_nobody() -> None:
    free, wide = (offloading(per_host, (0,)) for per_host in (None, 1000.0))
    assert wide.optimizer(0, 0) == free.optimizer(0, 0)


def test_the_search_estimates_offloading_so() -> None:
    on = offloading(100.0, (0, 1)).layout.cluster
    problem = pose(LLAMA_8B, on, Batch(8, 4096, "bf16"))
    assert StageTimes(problem, UnitCosts(problem)).host_seconds == [pytest.approx(1e-9 * 8 / 100)]


@pytest.mark.parametrize("schedule", ["zero_bubble", "1f1b"])
def test_collectives_go_on_while_a_pass_waits_for_its_copies(schedule: str) -> None:
    """They were counted beside the compute alone, so that a step took up to 7 % longer with faster compute."""
    on = cluster(("MI300X", 1, 2))
    plan = uniform(LLAMA_8B.replace(layers=2), on, tp=1, pp=1, micro_batch=2, batch=12, seq=2048, zero=2).plan
    plan = plan.replace(schedule=schedule, stages=(plan.stages[0].replace(offload=("activations",)),))
    faster = [scaled(on, Scale(compute={"MI300X": times})) for times in (1, 1.2, 1.5, 2, 3, 5)]
    layouts = [bind(plan, LLAMA_8B.replace(layers=2), each) for each in faster]
    steps = [step_times(layout, PlanCosts(layout, HETHUB, packaged())).seconds for layout in layouts]
    assert steps == sorted(steps, reverse=True)
