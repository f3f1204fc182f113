"""Plans that the laws' random draws found to break one, each a test of its own."""

import random
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch, which the random layouts' module imports: pip install hethub[train]")

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.resources import Resource
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.predictor.pipeline.test_laws import bytes_per_second, node, seconds, sent_bytes


def bound(model: ModelSpec, nodes: list[dict[str, Any]], links: dict[str, Any], **plan: Any) -> Layout:
    spec = PlanSpec.model_validate({"model": "m", "cluster": "c", "seq_len": 16, "precision": "fp32", **plan})
    return bind(spec, model, ClusterSpec.model_validate({"name": "c", "nodes": nodes, "links": links}))


def needed_seconds(layout: Layout, kind: str, owner: int) -> float:
    """What a link needs for all that passes it in a step."""
    return sent_bytes(layout)[kind, owner] / bytes_per_second(layout, kind, owner)


SMALL = ModelSpec(name="m", layers=2, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=64, max_seq_len=32)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_rings_over_repeated_heads_carry_more_than_those_over_replicas(zero: int) -> None:
    """Replicas of two and four ranks with two KV heads: found by a draw whose step was 1 % shorter than its cards need.
    From ZeRO 2 on both rounds count; under 3 a pass gathers most of the weights, and twice as much is surely carried."""
    model = ModelSpec(name="m", layers=2, hidden=64, heads=8, kv_heads=2, ffn=128, vocab=64, max_seq_len=32)
    device = node("n", None, 2, random.Random(0))
    nodes = [{**device, "name": name, "accelerators": size} for name, size in (("a", 2), ("b", 4), ("c", 2))]
    starts = [(0, 2), (2, 6), (6, 8)]
    replicas = [{"ranks": [*range(*own)], "samples": 2, "micro_batch": 1} for own in starts]
    stages = [{"layers": [[0, 2]], "zero": zero, "replicas": replicas}]
    layout = bound(model, nodes, {}, global_batch=6, stages=stages)
    needed = sent_bytes(layout)
    carried = PlanCosts(layout, HETHUB, packaged()).loads.traffic.by_resource()
    for machine in range(3):
        own = carried[Resource("cards", machine)]
        assert needed["cards", machine] <= own
        assert zero == 3 or own <= 1.05 * needed["cards", machine]


def test_staging_carries_a_ranks_messages_and_its_sums() -> None:
    """A replica alone of its maker in its stage: found by a draw whose step was 5 % shorter than staging needs."""
    device = {**node("n", None, 2, random.Random(0)), "gbps_per_nic": 100.0}
    nodes = [
        {**device, "name": name, "vendor": name, "accelerators": size} for name, size in (("one", 2), ("other", 1))
    ]
    replicas = [{"ranks": [rank], "samples": size, "micro_batch": 2} for rank, size in ((1, 16), (2, 4))]
    stages = [
        {"layers": [[0, 1]], "replicas": [{"ranks": [0], "samples": 20, "micro_batch": 2}]},
        {"layers": [[1, 2]], "zero": 1, "replicas": replicas},
    ]
    staging = {"staging": {"gbytes_per_second": 1e-4}}
    layout = bound(SMALL, nodes, staging, global_batch=20, schedule="layered", stages=stages)
    assert seconds(layout) >= needed_seconds(layout, "staging", 2)


def test_sums_take_as_long_as_at_their_slowest_position() -> None:
    """First shards on two machines with fast cards, second ones on one with a slow bus: found by a draw."""
    device = {**node("n", None, 2, random.Random(0)), "gbps_per_nic": 100.0}
    device["accelerator"]["link_gbytes_per_second"] = 1e-4
    nodes = [{**device, "name": name, "accelerators": size} for name, size in (("a", 1), ("b", 3))]
    replicas = [{"ranks": [*own], "samples": 1, "micro_batch": 1} for own in ((0, 1), (2, 3))]
    stages = [{"layers": [[0, 2]], "zero": 1, "replicas": replicas}]
    layout = bound(SMALL, nodes, {}, global_batch=2, stages=stages)
    assert seconds(layout) >= needed_seconds(layout, "port", 1)
