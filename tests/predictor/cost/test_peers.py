"""Links that join accelerators pair by pair, or in bridges of two, carry what one pair has, and no more."""

import pytest

from hethub.planner.candidate.candidate import ReplicaGroup
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.stage_times import StageTimes
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.planner.problem.scaled import Scale, scaled
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import Network
from hethub.runtime.emulate.cluster_network import ClusterNetwork
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from tests.predictor.plans import LLAMA_8B

BYTES = 1e10  # so many that latency does not count


def cluster(accelerator: str, **links: object) -> ClusterSpec:
    node = {"name": "n", "accelerator": accelerator, "accelerators": 8, "nics": 8, "gbps_per_nic": 400, "count": 2}
    return ClusterSpec.model_validate({"name": "test", "nodes": [node], "links": links})


def bus(on: ClusterSpec, *ranks: int) -> float:
    """GB/s that a ring over these ranks reaches, over the fitted fraction of dedicated links."""
    network = Network(on)
    seconds = network.reduce_scatter(network.group(ranks), BYTES)
    return BYTES * (len(ranks) - 1) / len(ranks) / seconds / 1e9 / packaged().links["in_node_fraction"]


def message(on: ClusterSpec, *ranks: int) -> float:
    return BYTES / Network(on).link(*ranks).seconds(BYTES) / 1e9 / packaged().links["in_node_fraction"]


@pytest.mark.parametrize(
    ("accelerator", "peer"),
    [("MI300X", 64), ("MI325X", 64), ("MI350X", 76.8), ("MI355X", 76.8), ("Gaudi2", 37.5), ("V100-SXM2-32GB", 50)],
)
def test_a_mesh_gives_a_pair_one_link(accelerator: str, peer: float) -> None:
    """Two of eight MI300X were priced as if they had all seven links between them: 448 GB/s."""
    on, link = cluster(accelerator), find_accelerator(accelerator).link_gbytes_per_second
    assert message(on, 0, 5) == pytest.approx(peer, rel=0.01)
    for ranks in (2, 4, 8):
        assert bus(on, *range(ranks)) == pytest.approx(min(link, (ranks - 1) * peer), rel=0.01)


def test_a_switch_gives_a_pair_all_of_their_links() -> None:
    on = cluster("H100-SXM5-80GB")
    assert message(on, 0, 5) == pytest.approx(450, rel=0.01)
    assert bus(on, 0, 1) == pytest.approx(bus(on, *range(8)), rel=0.01)


@pytest.mark.parametrize(("accelerator", "link", "pcie"), [("RTX-A6000", 56.25, 32), ("H100-NVL-94GB", 300, 64)])
def test_a_bridge_joins_two_and_pcie_the_others(accelerator: str, link: float, pcie: float) -> None:
    on, fit = cluster(accelerator), packaged().links
    hosted = pcie * fit["pcie_fraction"] / fit["in_node_fraction"]
    for ranks, expected in (((2, 3), link), ((1, 2), hosted)):
        assert message(on, *ranks) == pytest.approx(expected, rel=0.01)
        assert bus(on, *ranks) == pytest.approx(expected, rel=0.01)
    assert bus(on, 0, 1, 2, 3) == pytest.approx(hosted, rel=0.01)


def test_what_a_cluster_file_gives_of_a_mesh_is_no_pcie() -> None:
    """64 GB/s, which MI300X's own note names, is as slow as PCIe 5: its fraction was taken."""
    given = cluster("MI300X", in_node={"gbytes_per_second": 64})
    assert message(given, 0, 1) == pytest.approx(64, rel=0.01)
    assert bus(given, *range(8)) == pytest.approx(64, rel=0.01)


def test_a_replica_is_told_over_all_its_links() -> None:
    """A broadcast inside a replica goes along a ring of all; rehearsals take as long."""
    on = cluster("MI300X")
    network, ranks = Network(on), range(8)
    seconds = network.broadcast(ranks).seconds(BYTES)
    assert seconds == pytest.approx(network.link(0, 1).seconds(BYTES) / 7, rel=0.01)
    rehearsed = ClusterNetwork(on).collective("broadcast", ranks, int(BYTES))
    assert rehearsed.hold_seconds == pytest.approx(seconds, rel=0.01)


def test_a_replica_over_machines_is_told_over_their_cards() -> None:
    """It took as long as its first two ranks' way, 450 GB/s."""
    seconds = Network(cluster("H100-SXM5-80GB")).broadcast(range(6, 10)).seconds(BYTES)
    card = 400e9 / 8 * packaged().links["between_nodes_fraction"]
    assert seconds == pytest.approx(BYTES / card, rel=0.01)


def test_a_rank_alone_on_its_machine_slows_no_ring() -> None:
    """It has no peer there; the other two have the pair's link."""
    assert bus(cluster("MI300X"), 0, 1, 8) == pytest.approx(64, rel=0.01)


def test_slow_links_of_a_scenario_slow_pairs_too() -> None:
    on = cluster("MI300X")
    assert message(scaled(on, Scale(in_node=0.6)), 0, 1) == pytest.approx(0.6 * 64, rel=0.01)


def test_the_search_estimates_bridges_of_two_as_plans_have_them() -> None:
    problem = pose(LLAMA_8B, cluster("H100-NVL-94GB"), Batch(16, 4096, "bf16"))
    costs = UnitCosts(problem)
    times, network = StageTimes(problem, costs), costs.network
    for tp, number, ranks in ((1, 2, (0, 1)), (2, 2, (0, 2)), (1, 4, (0, 1, 2, 3))):
        group = network.group(ranks)
        one, two = (network.reduce_scatter(group, num_bytes, network.sharing(group)) for num_bytes in (1e9, 2e9))
        assert times.collective((ReplicaGroup(0, tp, 1, number),))[1] == pytest.approx((two - one) / 1e9, rel=1e-3)
