"""Ranks of one accelerator that differ by more than noise become device types of their own."""

import pytest

from hethub.predictor.cost.links import Network
from hethub.runtime.measure.speed_classes import combine, keep_forbidden, seconds_per_sample, speed_classes, tell_apart
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from tests.support.curves import TINY, curve

NODE = {"name": "cpu", "accelerator": "CPU-core", "accelerators": 3}
CLUSTER = ClusterSpec.model_validate({"name": "three", "nodes": [NODE]})


def test_ranks_are_told_apart_where_they_differ_by_more_than_noise():
    assert speed_classes(CLUSTER.places, [1.0, 1.1, 1.05]) == [0, 0, 0]
    assert speed_classes(CLUSTER.places, [2.5, 1.0, 2.6]) == [1, 0, 1]
    assert speed_classes(CLUSTER.places, [4.0, 2.0, 1.0]) == [2, 1, 0]


def test_one_lucky_micro_batch_makes_no_rank_faster():
    """Ranks that share cores have one to themselves now and then, for as long as a micro-batch is measured."""
    alike = curve(1.0)
    assert len(alike.layers) >= 3
    lucky = alike.replace(layers=(curve(0.5).layers[0], *alike.layers[1:]))
    found = combine(TINY, CLUSTER, [alike, lucky, alike], fresh=True)
    assert [device.accelerator for device in found.profile.devices] == ["CPU-core"]


def test_ranks_are_compared_by_whole_layers_whatever_shards_they_measured():
    shards = [timing.replace(tp=2, forward_seconds=1e-3) for timing in curve(1.0).layers]
    more = curve(1.0).replace(layers=(*curve(1.0).layers, *shards))
    assert seconds_per_sample(CLUSTER.places, [curve(1.0), more, more]) == pytest.approx([1.0] * 3)


def test_ranks_are_compared_by_the_micro_batches_that_all_of_them_measured():
    small = curve(1.0).replace(layers=curve(1.0).layers[:1])
    (found,) = {*seconds_per_sample(CLUSTER.places, [curve(1.0), small, curve(1.0)])}
    assert found == pytest.approx(1.0)


def test_told_apart_ranks_keep_their_place():
    told = tell_apart(CLUSTER, [1, 0, 1])
    assert [place.accelerator.name for place in told.places] == ["CPU-core~1", "CPU-core", "CPU-core~1"]
    assert [place.rank for place in told.places] == [0, 1, 2]
    assert [node.accelerators for node in told.nodes] == [1, 1, 1]
    assert tell_apart(CLUSTER, [0, 0, 0]) is CLUSTER


def test_what_is_forbidden_of_an_accelerator_is_of_those_told_apart_from_it():
    told = tell_apart(CLUSTER, [1, 0, 1])
    given = ConstraintsSpec(forbid=(("CPU-core", "amd"), ("H100", "cpu")))
    assert keep_forbidden(given, CLUSTER) == given
    assert keep_forbidden(given, told).forbid == (("CPU-core~1", "amd"), ("CPU-core", "amd"), ("H100", "cpu"))


def test_a_machine_that_was_split_keeps_its_own_links():
    found = combine(TINY, CLUSTER, [curve(3.0), curve(1.0), curve(1.0)], fresh=True)
    assert {device.accelerator for device in found.profile.devices} == {"CPU-core", "CPU-core~1"}
    assert {link.operation for link in found.profile.links} == {"send", "all_reduce"}
    assert Network(found.cluster, profile=found.profile).link(0, 1) == pytest.approx(Network(CLUSTER).link(0, 1))
    (gbps,) = {node.gbps_per_nic for node in found.cluster.nodes}
    assert gbps == 8 * CLUSTER.nodes[0].device.link_gbytes_per_second  # Gbit/s of what is told in GB/s
    assert "rank 0 (CPU-core~1) measured itself: 3e+03 ms a layer and sample, largest micro-batch 8" in found.lines


def test_of_alike_ranks_the_slowest_counts():
    found = combine(TINY, CLUSTER, [curve(1.0), curve(1.1), curve(1.05)], fresh=False)
    (device,) = found.profile.devices
    assert seconds_per_sample(CLUSTER.places, [device] * 3) == pytest.approx([1.1] * 3)
    assert "remembers" in found.lines[0]


def test_of_alike_ranks_the_smallest_micro_batch_counts():
    found = combine(TINY, CLUSTER, [curve(1.0, 2), curve(1.1, 8), curve(3.0, 4)], fresh=True)
    assert {d.accelerator: d.largest_micro_batch for d in found.profile.devices} == {"CPU-core": 2, "CPU-core~1": 4}
    unfitting = curve(1.0).replace(largest_micro_batch=None)
    found = combine(TINY, CLUSTER, [unfitting] * 3, fresh=True)
    assert found.profile.devices[0].largest_micro_batch is None
    assert "no room for the whole model" in found.lines[0]
