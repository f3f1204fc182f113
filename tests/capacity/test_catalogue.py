"""What a catalogue must say, and what its assumptions cost."""

from typing import Any

import pytest

from hethub.capacity.catalogue import Assumptions, CatalogueSpec, cluster_of
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput

NODE = {"name": "fast", "accelerator": "H100-SXM5-80GB", "accelerators": 8, "count": 8, "price_per_hour": 40.0}


def test_failures_cost_more_on_more_nodes() -> None:
    assumptions = Assumptions(node_mtbf_hours=1000)
    assert 1 > assumptions.efficiency(1) > assumptions.efficiency(100) > 0


def test_what_does_not_train_is_checkpoints_lost_work_and_restarts() -> None:
    """Two nodes of 2 hours fail every hour: of 2 s each, checkpoints are best sqrt(2 x 2 x 3600) = 120 s apart, and half of
    that is lost, and 36 s to start again."""
    found = Assumptions(node_mtbf_hours=2, checkpoint_seconds=2, restart_seconds=36).efficiency(2)
    assert found == pytest.approx(1 - 2 / 120 - (60 + 36) / 3600)


def test_power_is_that_of_all_machines_idle_and_busy_and_of_what_is_beside_them() -> None:
    """Three machines of four at 100 W: half of the time busy, else at a fifth, with half as much on top."""
    node = {"name": "n", "count": 3, "accelerators": 4}
    device = find_accelerator("T4").replace(name="mine", tdp_watts=100.0)
    assumed = Assumptions(idle_power_fraction=0.2, node_overhead_power_fraction=0.5)
    known, unknown = (
        ClusterSpec.model_validate({"name": "c", "nodes": [{**node, "accelerator": device.replace(tdp_watts=watts)}]})
        for watts in (100.0, None)
    )
    assert assumed.watts(known, 0.5) == pytest.approx(3 * 4 * 100 * (0.5 + 0.5 * 0.2) * 1.5)
    assert assumed.watts(unknown, 0.5) is None


@pytest.mark.parametrize("said", [{}, {"currency": "EUR"}, {"date": "2026"}])
def test_prices_need_a_currency_and_a_date(said: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="currency and the date"):
        CatalogueSpec.model_validate({"nodes": [NODE], **said})


def test_a_type_that_is_owned_too_is_told_apart() -> None:
    have = ClusterSpec.model_validate({"name": "ours", "nodes": [{**NODE, "price_per_hour": None, "count": 1}]})
    found = cluster_of(catalogue(), {"fast": 2}, have)
    assert [(node.name, node.count) for node in found.nodes] == [("fast", 1), ("fast (rented)", 2)]


def test_node_types_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="two node types are named 'fast'"):
        CatalogueSpec.model_validate({"currency": "EUR", "date": "2026", "nodes": [NODE, NODE]})


def catalogue(**keys: Any) -> CatalogueSpec:
    nodes = [
        {**NODE, "price_per_hour": None, "hosts": [f"h{n}" for n in range(8)]},
        {**NODE, "name": "other", "price_per_hour": None},
    ]
    return CatalogueSpec.model_validate({"nodes": nodes, **keys})


def test_some_of_a_rack_may_be_taken() -> None:
    """And some machines of those that have host names: both ended with a traceback."""
    racks = [
        {"name": "west", "nodes": ["fast", "other"], "gbps": 400},
        {"name": "east", "nodes": ["other"], "gbps": 400},
    ]
    with pytest.raises(ValueError, match="node 'other' is in rack 'west' and in rack 'east'"):
        catalogue(links={"racks": racks})
    found = cluster_of(catalogue(links={"racks": racks[:1]}), {"fast": 2}, None)
    assert [(rack.name, rack.nodes) for rack in found.links.racks] == [("west", ("fast",))]
    assert [(node.count, node.hosts) for node in found.nodes] == [(2, None)]
    assert cluster_of(catalogue(links={"racks": racks[1:]}), {"fast": 1}, None).links.racks == ()


def test_nodes_owned_stay_emulated() -> None:
    """Emulated ones need no gbps_per_nic: `size` refused those that `plan` answers for."""
    have = ClusterSpec.model_validate(
        {"name": "ours", "emulated": True, "nodes": [{"name": "ours", "accelerator": "T4", "accelerators": 1}]}
    )
    assert cluster_of(catalogue(), {}, have) == have
    assert cluster_of(catalogue(), {"fast": 1}, have).emulated


@pytest.mark.parametrize(
    ("links", "count", "told"),
    [
        ({"regions": {"of_node": {"ours": "x"}, "names": ["x"], "gbps": [[10]]}}, 1, "node 'fast' has no region"),
        ({}, 200_000, "hethub plans 1,000,000 at most"),
    ],
)
def test_what_makes_no_cluster_is_bad_input(links: dict[str, Any], count: int, told: str) -> None:
    have = ClusterSpec.model_validate(
        {
            "name": "ours",
            "nodes": [{"name": "ours", "accelerator": "A100-SXM4-80GB", "accelerators": 8}],
            "links": links,
        }
    )
    with pytest.raises(
        BadInput, match=rf"beside those of cluster 'ours' \(--have\), whose links count for all: .*{told}"
    ):
        cluster_of(catalogue(), {"fast": count}, have)
