"""Which cluster to rent: against an ideal evaluator whose throughput is known."""

from types import SimpleNamespace
from typing import Any

import pytest

from hethub.capacity.additions import rank_additions
from hethub.capacity.catalogue import CatalogueSpec, cluster_of
from hethub.capacity.options import Option, Question, best, mark_frontier
from hethub.capacity.sizing import size
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from tests.predictor.plans import cluster

CATALOGUE = CatalogueSpec.model_validate(
    {
        "currency": "EUR", "date": "2026-01-01",
        "nodes": [
            {"name": "fast", "accelerator": "H100-SXM5-80GB", "accelerators": 8, "count": 8, "price_per_hour": 40.0, "gbps_per_nic": 400},
            {"name": "slow", "accelerator": "A100-SXM4-80GB", "accelerators": 8, "count": 8, "price_per_hour": 10.0, "gbps_per_nic": 200},
        ],
    }
)  # fmt: skip
NO_FAILURES = {"node_mtbf_hours": 1e12, "checkpoint_seconds": 0.0, "restart_seconds": 0.0}
CATALOGUE = CATALOGUE.replace(assumptions=NO_FAILURES)
SPEED = {"H100-SXM5-80GB": 300.0, "A100-SXM4-80GB": 100.0}


def options_of(tokens: float, **more: Any) -> tuple[Option, ...]:
    return size(Question(catalogue=CATALOGUE, tokens=tokens, **more), evaluate).options


def evaluate(on: ClusterSpec) -> Any:
    """Perfect scaling: tokens/s add up; a single slow node cannot hold the model."""
    if [(node.device.name, node.count) for node in on.nodes] == [("A100-SXM4-80GB", 1)]:
        raise BadInput("no plan fits")
    speed = sum(node.count * node.accelerators * SPEED[node.device.name] for node in on.nodes)
    return SimpleNamespace(tokens_per_second=speed, breakdown={"compute": 0.5}, step_seconds=1.0)


def test_the_cheapest_that_meets_the_deadline() -> None:
    tokens = 800 * 4 * 86400 * 10  # four slow nodes, ten days
    options = options_of(tokens, deadline_days=10.01)
    found = best(options)
    assert found is not None
    assert found.nodes == {"slow": 4}
    assert found.cost == pytest.approx(4 * 10 * 24 * 10, rel=1e-3)
    assert all(option.days <= 10.01 for option in options if option.meets)


def test_the_fastest_within_a_budget_is_on_the_frontier() -> None:
    options = options_of(1e10, budget=1e5)
    assert all(option.cost is not None and option.cost <= 1e5 for option in options if option.meets)
    assert any(option.on_frontier for option in options if option.meets)


def test_owned_nodes_cost_nothing() -> None:
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")
    options = options_of(1e12, have=have)
    assert next(option for option in options if option.nodes == {}).cost == 0
    assert cluster_of(CATALOGUE, {"slow": 1}, have).size == 40


def test_additions_are_ranked_by_throughput_per_price() -> None:
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")
    assert [addition.node for addition in rank_additions(CATALOGUE, evaluate, have)[0]] == ["slow", "fast"]


def test_frontier_has_no_beaten_option() -> None:
    options = mark_frontier(options_of(1e12))
    front = [option for option in options if option.on_frontier]
    assert front
    for a in front:
        assert not any(b.days < a.days and (b.cost or 0.0) < (a.cost or 0.0) for b in options)


def test_the_smallest_count_that_meets_the_deadline_is_found_between_those_looked_at() -> None:
    tokens = 800 * 5 * 86400 * 10  # five slow nodes, ten days: counts looked at are 4 and 6
    found = best(options_of(tokens, deadline_days=10.01))
    assert found is not None
    assert found.nodes == {"slow": 5}


def test_what_cannot_train_is_left_out_with_its_reason() -> None:
    found = size(Question(catalogue=CATALOGUE, tokens=1e12), evaluate)
    assert [(cluster.nodes, cluster.why) for cluster in found.left_out] == [({"slow": 1}, "no plan fits")]
    assert all(option.nodes != {"slow": 1} for option in found.options)


def test_where_failures_leave_no_time_no_figure_is_infinite() -> None:
    frail = CATALOGUE.replace(assumptions={"node_mtbf_hours": 0.01})
    with pytest.raises(BadInput, match=r"MTBF of 0.01 hours each fail faster than they train"):
        size(Question(catalogue=frail, tokens=1e12), evaluate)
