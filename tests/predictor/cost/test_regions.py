"""Links between regions: what crosses them is no faster than they are, what stays inside does not notice them."""

from hethub.predictor.cost.links import Network
from hethub.spec.cluster import ClusterSpec


def regional(gbps: float | None) -> Network:
    nodes = [
        {"name": name, "count": 2, "accelerator": "T4", "accelerators": 1, "gbps_per_nic": 50}
        for name in ("east", "west")
    ]
    regions = None
    if gbps is not None:
        regions = {
            "names": ["a", "b"], "of_node": {"east": "a", "west": "b"}, "gbps": [[400, gbps], [gbps, 400]],
            "latency_seconds": [[0, 0.03], [0.03, 0]],
        }  # fmt: skip
    return Network(ClusterSpec.model_validate({"name": "c", "nodes": nodes, "links": {"regions": regions}}))


def test_what_crosses_regions_pays_for_it() -> None:
    plain, slow = regional(None), regional(1.0)
    assert slow.link(0, 1) == plain.link(0, 1)
    assert slow.link(0, 2).latency_seconds == 0.03
    assert slow.link(0, 2).seconds_per_byte == 8e-9
    inside, across = slow.group([0, 1]), slow.group([0, 1, 2, 3])
    assert slow.all_reduce(inside, 1e6) == plain.all_reduce(inside, 1e6)
    assert slow.all_reduce(across, 1e9) >= 2 * 1e9 * 0.75 * 8e-9


def test_fast_regions_change_no_rate() -> None:
    assert regional(1000.0).link(0, 2).seconds_per_byte == regional(None).link(0, 2).seconds_per_byte
