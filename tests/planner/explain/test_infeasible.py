"""What is said where nothing fits."""

import re

import pytest

from hethub.planner import plan
from hethub.planner.explain.infeasible import _free_constraints, _less_reserve, _more_nodes, _shorter
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from tests.predictor.plans import TINY


@pytest.mark.parametrize("card", [{}, {"gbps_per_nic": 100}], ids=["no card", "a card"])
def test_a_machine_alone_that_is_too_small_is_told_by_how_much(card: dict[str, float]) -> None:
    """More of such machines are a remedy only where it is known what would join them."""
    model = TINY.replace(name="wide", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    node = {"name": "a", "accelerator": "RTX-4090", "accelerators": 2, **card}
    cluster = ClusterSpec.model_validate({"name": "alone", "nodes": [node]})
    with pytest.raises(BadInput, match=r"exceeds the memory .* of 2 RTX-4090 by up to [\d,]+ bytes"):
        plan(model, cluster, Batch(8, 64, "bf16"), with_bounds=False)


def test_more_of_nodes_with_host_names_are_a_remedy_too() -> None:
    """Three nodes have no two host names: a traceback took the place of the answer."""
    model = TINY.replace(name="wide", layers=20, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    node = {
        "name": "a",
        "accelerator": "RTX-4090",
        "accelerators": 2,
        "count": 2,
        "hosts": ["a1", "a2"],
        "gbps_per_nic": 100,
    }
    for host_memory_gb, said in (
        (1024, r"\d more of node 'a'"),
        (None, "more than their accelerators, as is assumed, raise"),
    ):
        nodes = [{**node, "host_memory_gb": host_memory_gb}]
        with pytest.raises(BadInput, match=said):
            plan(
                model,
                ClusterSpec.model_validate({"name": "named", "nodes": nodes}),
                Batch(64, 64, "bf16"),
                with_bounds=False,
            )


def test_host_memory_that_is_too_small_is_told_by_how_much_and_how_much_is_enough() -> None:
    """It was said without any figure, and that a smaller model was the only remedy."""
    model = TINY.replace(name="wide", layers=24, hidden=5120, heads=40, kv_heads=1, ffn=13760, vocab=50257)
    node = {"name": "a", "accelerator": "RX-7900-XTX", "accelerators": 5, "host_memory_gb": 16, "gbps_per_nic": 100}
    cluster = ClusterSpec.model_validate({"name": "few hosts", "nodes": [node]})
    question = Batch(48, 128, "fp32")
    with pytest.raises(BadInput, match=r"of 1 x node 'a' by up to [\d,]+ bytes .* A plan fits with") as refused:
        plan(model, cluster, question, with_bounds=False)
    (gb,) = re.findall(r"with host_memory_gb (\d+) of node 'a'", str(refused.value))
    larger = cluster.replace(nodes=(cluster.nodes[0].replace(host_memory_gb=float(gb)),))
    assert plan(model, larger, question, with_bounds=False).prediction.fits


def test_a_remedy_may_leave_what_has_no_room_for_anything_unused() -> None:
    """A plan was looked for with every device type alone: 'take a smaller model', where a constraint left free did."""
    small = {**find_accelerator("RTX-4090").to_dict(), "name": "small", "memory_gb": 1}
    nodes = [
        {"name": name, "accelerator": accelerator, "accelerators": 2, "gbps_per_nic": 10}
        for name, accelerator in (("small", small), ("large", "RTX-4090"))
    ]
    cluster = ClusterSpec.model_validate({"name": "both", "nodes": nodes})
    with pytest.raises(BadInput, match=r"A plan fits with constraints\.reserve: 0\.06"):
        plan(TINY, cluster, Batch(8, 64, "bf16"), ConstraintsSpec(reserve=0.99), with_bounds=False)


def test_where_only_a_part_has_places_it_is_told_by_how_much_too() -> None:
    """Of six accelerators three can take a replica of the only layer each: where they had no room, the answer was that every
    accelerator needs a layer and a sample, and to raise global_batch or use fewer accelerators, of which neither helps."""
    small = {**find_accelerator("RTX-4090").to_dict(), "name": "small", "memory_gb": 5}
    node = {"name": "a", "count": 2, "accelerator": small, "accelerators": 3, "gbps_per_nic": 10, "host_memory_gb": 64}
    cluster = ClusterSpec.model_validate({"name": "two", "nodes": [node]})
    model = TINY.replace(layers=1, hidden=2560, heads=20, kv_heads=10, ffn=5120, vocab=32000)
    with pytest.raises(BadInput, match=r"exceeds .* of 3 small by up to .* A plan fits with constraints\.dp left free"):
        plan(model, cluster, Batch(16, 64, "fp32"), ConstraintsSpec(dp=3), with_bounds=False)


def test_a_search_that_time_ended_says_so_and_not_that_nothing_fits() -> None:
    """Its only plan so far was 0.04 GiB over memory: no plan was said to fit, where the search finds one if it is let."""
    card = {**find_accelerator("V100-SXM2-32GB").to_dict(), "name": "small", "memory_gb": 4.618682}
    node = {"name": "a", "accelerator": card, "accelerators": 2, "gbps_per_nic": 25, "host_memory_gb": 55}
    cluster = ClusterSpec.model_validate({"name": "one", "nodes": [node]})
    model = TINY.replace(layers=2, hidden=256, heads=8, kv_heads=1, ffn=512, vocab=128256, tied_head=True)
    question, given = (model, cluster, Batch(3, 128, "fp32")), ConstraintsSpec(tp=1, micro_batch=2)
    with pytest.raises(BadInput, match="time_limit_seconds 1e-09 ended the search before a plan that fits was found"):
        plan(*question, given.replace(time_limit_seconds=1e-9), with_bounds=False)
    assert plan(*question, given, with_bounds=False).prediction.fits


def test_host_memory_that_is_too_small_is_told_without_the_accelerators_reserve() -> None:
    model = TINY.replace(name="wide", layers=16, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    node = {"name": "a", "accelerator": "MI300X", "accelerators": 8, "host_memory_gb": 1, "gbps_per_nic": 100}
    cluster = ClusterSpec.model_validate({"name": "few hosts", "nodes": [node]})
    with pytest.raises(
        BadInput, match=r"comes closest exceeds the hosts' memory, which holds [^%]* raise host_memory_gb"
    ):
        plan(model, cluster, Batch(8, 64, "bf16"), with_bounds=False)


def test_the_usual_reserve_is_named_where_it_helps() -> None:
    """It was 0.02, whatever was needed."""
    node = {"name": "a", "accelerator": "RTX-4090", "accelerators": 2}
    cluster = ClusterSpec.model_validate({"name": "alone", "nodes": [node]})
    with pytest.raises(BadInput, match=r"A plan fits with constraints\.reserve: 0\.06"):
        plan(TINY, cluster, Batch(8, 64, "bf16"), ConstraintsSpec(reserve=0.99), with_bounds=False)


def test_the_changes_tried_are_the_smallest_first() -> None:
    nodes = [
        {"name": name, "accelerator": accelerator, "accelerators": own, "count": count, "gbps_per_nic": 100}
        for name, accelerator, own, count in (("few", "MI300X", 2, 1), ("many", "A100-SXM4-80GB", 8, 8))
    ]
    cluster = ClusterSpec.model_validate({"name": "both", "nodes": nodes})
    given = ConstraintsSpec(reserve=0.5, pp=2, zero=1)
    problem = pose(TINY, cluster, Batch(256, 64, "bf16"), given)
    assert [change.words for change in _free_constraints(problem)] == [
        "constraints.zero left free", "constraints.pp left free",
    ]  # fmt: skip
    assert [change.problem.constraints for change in _free_constraints(problem)] == [
        given.replace(zero=None), given.replace(pp=None),
    ]  # fmt: skip
    assert [change.problem.constraints.reserve for change in _less_reserve(problem)] == [0.06, 0.02]
    little = problem.with_constraints(ConstraintsSpec(reserve=0.05))
    assert [change.problem.constraints.reserve for change in _less_reserve(little)] == [0.02]
    assert [change.problem.batch.seq_len for change in _shorter(problem)] == [48, 32, 24, 16, 8]
    more = list(_more_nodes(problem))  # of those with the most memory an eighth, a quarter, … up to four times as many
    assert [change.problem.size for change in more] == [66 + 8 * own for own in (1, 2, 4, 8, 16, 24)]
    assert more[0].words == "1 more of node 'many' (8 A100-SXM4-80GB each)"


def test_a_machine_in_parts_is_not_asked_to_come_twice() -> None:
    """One of its parts was counted up, which no cluster file may do: ranks without a place, and a traceback for an answer."""
    own = {"part_of": "box", "accelerators": 2, "gbps_per_nic": 100}
    nodes = [{"name": name, "accelerator": name, **own} for name in ("H100-SXM5-80GB", "A100-SXM4-80GB")]
    nodes += [{"name": "whole", "accelerator": "T4", "accelerators": 2, "gbps_per_nic": 100}]
    for given, sizes in ((nodes, [6 + 2 * more for more in (1, 2, 3)]), (nodes[:2], [])):
        cluster = ClusterSpec.model_validate({"name": "parts", "nodes": given})
        more = [change.problem.cluster for change in _more_nodes(pose(TINY, cluster, Batch(8, 64, "fp32")))]
        assert [larger.size for larger in more] == [len(larger.places) for larger in more] == sizes


def test_what_is_forbidden_together_is_among_what_a_plan_needs() -> None:
    """One stage of both makers: that every accelerator needs a layer and a sample was all that was said."""
    nodes = [
        {"name": maker, "vendor": maker, "accelerator": "CPU-core", "accelerators": 1, "gbps_per_nic": 8}
        for maker in ("amd", "nvidia")
    ]
    cluster = ClusterSpec.model_validate({"name": "two", "nodes": nodes})
    given = ConstraintsSpec(pp=1, dp=2, forbid=(("nvidia", "amd"),))
    with pytest.raises(BadInput, match="a layer and a sample, and no stage holds nvidia and amd together"):
        plan(TINY, cluster, Batch(4, 16, "fp32"), given, with_bounds=False)


def test_constraints_are_to_be_relaxed_only_where_some_are_given() -> None:
    """Without any it was said to relax them."""
    node = {"name": "a", "accelerator": "CPU-core", "accelerators": 3, "gbps_per_nic": 8}
    cluster = ClusterSpec.model_validate({"name": "one", "nodes": [node]})
    model = TINY.replace(layers=1)
    with pytest.raises(BadInput, match=r"without any constraint: .* Raise global_batch, use fewer"):
        plan(model, cluster, Batch(1, 16, "fp32"), strategy="zorse", with_bounds=False)
    with pytest.raises(BadInput, match=r"under constraints .* Raise global_batch, relax the constraints, use fewer"):
        plan(model, cluster, Batch(1, 16, "fp32"), ConstraintsSpec(tp=2), strategy="zorse", with_bounds=False)
