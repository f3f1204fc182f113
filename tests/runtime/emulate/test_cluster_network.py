"""Messages and collectives of an emulated cluster: which interfaces they take, and for how long."""

import pytest

from hethub.runtime.emulate.cluster_network import ClusterNetwork
from hethub.spec.cluster import ClusterSpec
from tests.support.emulated import EMULATED, NODES


def test_messages_take_interfaces_of_their_own_kind():
    network = ClusterNetwork(ClusterSpec.model_validate(EMULATED))
    inside, across = network.message(0, 1, 10**6), network.message(1, 2, 10**6)
    assert not {slot for slots in inside.interfaces for slot in slots} & {
        s for slots in across.interfaces for s in slots
    }
    assert across.hold_seconds > inside.hold_seconds
    one_maker = ClusterSpec.model_validate({**EMULATED, "nodes": [{**NODES[0], "count": 2}]})
    inside, between_nodes = (ClusterNetwork(one_maker).message(1, other, 10**6) for other in (0, 2))
    assert [len(choices) for choices in inside.interfaces] == [1, 1]  # the rank's own
    assert [len(choices) for choices in between_nodes.interfaces] == [2, 2]  # either of the node's two


def test_an_all_reduce_costs_what_the_predictor_says():
    cluster = ClusterSpec.model_validate(EMULATED)
    network = ClusterNetwork(cluster)
    way = network.collective("all_reduce", [0, 1, 2, 3], 10**7)
    expected = network._network.all_reduce(network._network.group([0, 1, 2, 3]), 10**7)
    assert way.hold_seconds + way.latency_seconds == pytest.approx(expected)
    twice = network.collective("all_reduce", [0, 1, 2, 3], 2 * 10**7)
    assert twice.hold_seconds == pytest.approx(2 * way.hold_seconds)  # only bytes hold the interfaces
    assert twice.latency_seconds == pytest.approx(way.latency_seconds)
    assert way.latency_seconds > 0


@pytest.mark.parametrize("parts", [(250, 250, 250, 253), (400, 200, 200, 203)])
def test_what_ranks_own_unevenly_takes_longer_as_predicted(parts):
    """An island of two owns half or 60 %, and only what cannot be divided counts as even."""
    network = ClusterNetwork(ClusterSpec.model_validate(EMULATED))
    way = network.collective("reduce_scatter_by_ranges", [0, 1, 2, 3], 10**7, parts)
    group = network._network.group([0, 1, 2, 3], dict(enumerate(parts)))
    uneven = 1.25 if parts[0] == 400 else 1.0
    assert way.hold_seconds + way.latency_seconds == pytest.approx(
        uneven * network._network.reduce_scatter(group, 10**7)
    )


@pytest.mark.parametrize(("gbps", "shared"), [(1000, False), (1, True)])
def test_ranks_of_a_machine_stage_side_by_side_and_share_a_slow_bridge(gbps, shared):
    """They waited for each other whatever was slow, and so did the collectives of pairs of them. One of all takes what
    all of them take."""
    links = {"staging": {"gbytes_per_second": 1.0}, "between_islands": {"gbps_per_node": gbps}}
    network = ClusterNetwork(ClusterSpec.model_validate({**EMULATED, "links": links}))

    def taken(transfer):
        return {slot for slots in transfer.interfaces for slot in slots}

    one, other = taken(network.message(0, 2, 10**6)), taken(network.message(1, 3, 10**6))
    assert bool(one & other) == shared
    for name, parts in (("all_reduce", ()), ("all_gather", (1, 1)), ("reduce_scatter_by_ranges", (400, 100))):
        pair, beside = (taken(network.collective(name, ranks, 10**7, parts)) for ranks in ([0, 2], [1, 3]))
        assert bool(pair & beside) == shared
        assert one <= pair
        assert other <= beside
    assert one | other <= taken(network.collective("all_reduce", [0, 1, 2, 3], 10**7))
