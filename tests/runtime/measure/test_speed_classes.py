"""Ranks of one accelerator that differ by more than noise become device types of their own."""

import pytest

from hethub.predictor.cost.links import Network
from hethub.runtime.measure.speed_classes import (
    SLOW_MARK,
    combine,
    keep_forbidden,
    seconds_per_sample,
    speed_classes,
    tell_apart,
)
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


@pytest.mark.parametrize("host_memory_gb", [None, 100.0])
def test_a_machine_that_was_split_stays_one_machine(host_memory_gb):
    """Its parts had a machine each: as many network interfaces and as much host memory, and the network between them."""
    node = {**NODE, "accelerator": "L4", "gbps_per_nic": 10, "nics": 2, "host_memory_gb": host_memory_gb}
    cluster = ClusterSpec.model_validate({"name": "two", "nodes": [{**node, "count": 2}]})
    told = tell_apart(cluster, [0, 1, 0, 0, 0, 0])
    assert [(p.machine, p.local) for p in told.places] == [(p.machine, p.local) for p in cluster.places]
    assert [each.host_memory_bytes for each in told.machines] == [each.host_memory_bytes for each in cluster.machines]
    for ranks in ([0, 2], [0, 1, 2], [0, 1, 3], range(6)):
        networks = Network(told), Network(cluster)
        assert len({each.all_reduce(each.group(ranks), 1e8, each.sharing(each.group(ranks))) for each in networks}) == 1
    assert ClusterSpec.model_validate(told.to_dict()) == told


@pytest.mark.parametrize("parts", ["measured", "written"])
def test_a_machine_that_is_in_parts_already_stays_one_machine(parts):
    """Each part became a machine: where a rank of those told apart turned out slow, say, messages inside the machine counted as
    the network's, and its host memory twice."""
    node = {**NODE, "accelerator": "L4", "accelerators": 4, "gbps_per_nic": 10, "host_memory_gb": 100.0}
    whole = ClusterSpec.model_validate({"name": "one", "nodes": [node]})
    written = [{**node, "name": name, "accelerators": 2, "part_of": "box"} for name in ("left", "right")]
    before = {"measured": tell_apart(whole, [0, 0, 1, 1]), "written": ClusterSpec(name="parts", nodes=tuple(written))}
    told = tell_apart(before[parts], [0, 1, 0, 0], SLOW_MARK)
    assert [(p.machine, p.local) for p in told.places] == [(p.machine, p.local) for p in whole.places]
    assert [each.host_memory_bytes for each in told.machines] == [each.host_memory_bytes for each in whole.machines]
    assert Network(told).path(0, 3) == Network(whole).path(0, 3)
    assert told.places[1].accelerator.name == "L4!1"


def test_parts_of_a_machine_have_it_in_common():
    parts = [{**NODE, "name": name, "part_of": "one"} for name in ("fast", "slow")]
    apart = [parts[0], {**NODE, "name": "between"}, parts[1]]
    with pytest.raises(ValueError, match="part_of 'one' stand apart, as those of two machines; put"):  # on one host
        ClusterSpec.model_validate({"name": "c", "nodes": apart})
    for other in ({"nics": 2}, {"host_memory_gb": 8}, {"vendor": "amd"}):
        with pytest.raises(ValueError, match="part_of 'one' are one machine"):
            ClusterSpec.model_validate({"name": "two", "nodes": [parts[0], {**parts[1], **other}]})
    for links in (
        {"racks": [{"name": "a", "nodes": ["fast"], "gbps": 100}]},
        {"regions": {"names": ["a", "b"], "of_node": {"fast": "a", "slow": "b"}, "gbps": [[9, 9], [9, 9]]}},
    ):
        with pytest.raises(ValueError, match=r"one machine, but differ in (rack|region)"):
            ClusterSpec.model_validate({"name": "two", "nodes": parts, "links": links})
    with pytest.raises(ValueError, match="differ in count"):
        ClusterSpec.model_validate({"name": "two", "nodes": [parts[0], {**parts[1], "count": 2}]})
    with pytest.raises(ValueError, match="have a count above 1"):
        ClusterSpec.model_validate({"name": "two", "nodes": [{**parts[0], "count": 2}]})


def test_what_is_forbidden_of_an_accelerator_is_of_those_told_apart_from_it():
    told = tell_apart(CLUSTER, [1, 0, 1])
    given = ConstraintsSpec(forbid=(("CPU-core", "amd"), ("H100", "cpu")))
    assert keep_forbidden(given, CLUSTER) == given
    assert keep_forbidden(given, told).forbid == (("CPU-core~1", "amd"), ("CPU-core", "amd"), ("H100", "cpu"))


def test_a_machine_that_was_split_keeps_its_own_links():
    found = combine(TINY, CLUSTER, [curve(3.0), curve(1.0), curve(1.0)], fresh=True)
    assert {device.accelerator for device in found.profile.devices} == {"CPU-core", "CPU-core~1"}
    assert Network(found.cluster, profile=found.profile).path(0, 1) == Network(CLUSTER).path(0, 1)
    assert (
        "rank 0 (CPU-core~1) measured itself: 3e+03 ms a layer and sample, largest micro-batch 8, slower than others of CPU-core"
        in found.lines
    )


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
