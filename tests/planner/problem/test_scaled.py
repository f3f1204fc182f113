"""Clusters with better figures."""

import pytest

from hethub.planner.problem.scaled import Scale, scaled, scaled_profile
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.node_links import NodeLinks
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from tests.planner.problems import answer, mixed
from tests.planner.test_profiled import profile


def test_faster_links_and_compute_never_make_the_best_plan_slower():
    problem = mixed()
    best = answer(problem)
    better = problem.on(
        scaled(problem.cluster, Scale(compute={k.accelerator.name: 1.1 for k in problem.device_types}, in_node=1.1))
    )
    assert answer(better).seconds <= best.seconds


def test_every_figure_is_scaled_by_its_own_factor_and_by_no_other() -> None:
    own = {**find_accelerator("A100-SXM4-80GB").to_dict(), "name": "own", "peer_gbytes_per_second": 50}
    node = {"name": "a", "accelerator": own, "accelerators": 8, "nics": 2, "gbps_per_nic": 100, "count": 2}
    links = {
        "in_node": {"gbytes_per_second": 200},
        "between_islands": {"gbps_per_node": 40},
        "racks": [{"name": "west", "nodes": ["a"], "gbps": 400}],
        "staging": {"gbytes_per_second": 12, "per_host_gbytes_per_second": 40},
        "regions": {"names": ["x"], "of_node": {"a": "x"}, "gbps": [[100]]},
    }
    cluster = ClusterSpec.model_validate({"name": "all", "nodes": [node], "links": links})
    name, of = (
        cluster.nodes[0].device.name,
        {"compute": 3.0, "memory": 5.0, "in_node": 7.0, "network": 11.0, "bridge": 13.0},
    )
    found = scaled(cluster, Scale(**{**of, "compute": {name: of["compute"]}}))  # type: ignore[arg-type]

    def figures(at: ClusterSpec) -> dict[str, list[float]]:
        device, own = at.nodes[0].device, at.links
        assert own.in_node.gbytes_per_second
        assert own.between_islands.gbps_per_node
        assert own.staging.gbytes_per_second
        assert own.staging.per_host_gbytes_per_second
        assert own.regions
        assert at.nodes[0].gbps_per_nic
        return {
            "compute": [device.peak_flops("bf16") or 0.0, device.memory_gbytes_per_second],
            "memory": [device.memory_gb],
            "in_node": [
                device.link_gbytes_per_second,
                device.peer_gbytes_per_second or 0.0,
                own.in_node.gbytes_per_second,
            ],
            "network": [at.nodes[0].gbps_per_nic, own.racks[0].gbps, own.regions.gbps[0][0]],
            "bridge": [
                own.between_islands.gbps_per_node,
                own.staging.gbytes_per_second,
                own.staging.per_host_gbytes_per_second,
            ],
        }

    for key, before in figures(cluster).items():
        assert figures(found)[key] == pytest.approx([of[key] * own for own in before]), key


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


def test_measurements_are_scaled_by_the_factor_of_what_was_measured() -> None:
    """An optimizer that was not measured goes by the cluster's figures, and is scaled with these."""
    measured = profile({"A100-PCIe-40GB": 3e-3, "A100-PCIe-80GB": 1e-3})
    one, other = measured.devices
    levels = ("in_node", "between_nodes", "between_islands")
    links = [{"level": each, "operation": "send", "latency_seconds": 1e-5, "gbytes_per_second": 1.0} for each in levels]
    given = {**measured.to_dict(), "links": links}
    given["devices"] = [one.to_dict(), other.replace(optimizer_seconds_per_parameter=1e-9).to_dict()]
    scale = Scale(compute={own.accelerator: 2.0 for own in (one, other)}, in_node=3.0, network=5.0, bridge=7.0)
    found = scaled_profile(type(measured).model_validate(given), scale)
    for before, now in zip((one, other), found.devices, strict=True):
        assert [own.forward_seconds for own in now.layers] == [own.forward_seconds / 2 for own in before.layers]
    assert [own.optimizer_factor for own in found.devices] == [1.0, 0.5]
    assert [link.gbytes_per_second for link in found.links] == [3.0, 5.0, 7.0]
    assert {link.latency_seconds for link in found.links} == {1e-5}
