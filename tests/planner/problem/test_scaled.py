"""Clusters with better figures."""

import pytest

from hethub.planner.problem.scaled import Scale, scaled
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.node_links import NodeLinks
from hethub.spec.cluster import ClusterSpec
from tests.planner.problems import answer, mixed


def test_faster_links_and_compute_never_make_the_best_plan_slower():
    problem = mixed()
    best = answer(problem)
    better = problem.on(
        scaled(problem.cluster, Scale(compute={k.accelerator.name: 1.1 for k in problem.device_types}, in_node=1.1))
    )
    assert answer(better).seconds <= best.seconds


def test_the_fastest_link_that_a_file_may_name_can_be_faster() -> None:
    """Twice as much is no mistaken unit: `plan --explain` ended with a traceback."""
    node = {"name": "a", "accelerator": "H100-SXM5-80GB", "accelerators": 8, "gbps_per_nic": 1e5}
    cluster = ClusterSpec.model_validate({"name": "fast", "nodes": [node]})
    assert scaled(cluster, Scale(network=2.0)).nodes[0].gbps == 2e5


@pytest.mark.parametrize(("link", "given"), [(32.0, None), (33.0, None), (300.0, 31.9), (32.0, 33.0)])
@pytest.mark.parametrize("factor", [0.6, 0.9, 1.1, 2.0])
def test_a_link_inside_a_node_is_scaled_and_stays_of_its_sort(link: float, given: float | None, factor: float) -> None:
    """PCIe of 32 GB/s, 10 % better, was taken for a dedicated link, 3.9 times as fast: `plan --explain` said so."""
    own = {"name": "card", "vendor": "nvidia", "memory_gb": 48, "memory_gbytes_per_second": 864, "fp32_tflops": 91.6,
           "link_gbytes_per_second": link, "pcie_generation": 4}  # fmt: skip
    node = {"name": "a", "accelerator": own, "accelerators": 4}
    links = {"in_node": {"gbytes_per_second": given}}
    cluster = ClusterSpec.model_validate({"name": "cards", "nodes": [node], "links": links})

    def rate(at: ClusterSpec) -> float:
        inside = NodeLinks(at.nodes[0].device, at.links.in_node.gbytes_per_second)
        return inside.bytes_per_second(packaged().links)

    assert rate(scaled(cluster, Scale(in_node=factor))) == pytest.approx(factor * rate(cluster))
