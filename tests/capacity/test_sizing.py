"""Which cluster to rent: against an ideal evaluator whose throughput is known."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hethub.capacity.additions import rank_additions
from hethub.capacity.catalogue import CatalogueSpec, cluster_of
from hethub.capacity.options import Option, Question, best, mark_frontier
from hethub.capacity.sizing import size
from hethub.report.capacity import write_sizing
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
    """Perfect scaling, times a fifth less or a quarter more; a single slow node cannot hold the model."""
    if [(node.device.name, node.count) for node in on.nodes] == [("A100-SXM4-80GB", 1)]:
        raise BadInput("no plan fits")
    speed = sum(node.count * node.accelerators * SPEED[node.device.name] for node in on.nodes)
    return SimpleNamespace(
        tokens_per_second=speed, breakdown={"compute": 0.5}, step_seconds=1.0, step_seconds_interval=(0.8, 1.25)
    )


def test_the_cheapest_that_likely_meets_the_deadline() -> None:
    tokens = 800 * 4 * 86400 * 10  # four slow nodes, ten days, 8 to 12.5
    options = options_of(tokens, deadline_days=12.51)
    found = best(options)
    assert found is not None
    assert found.nodes == {"slow": 4}
    assert found.cost == pytest.approx(4 * 10 * 24 * 10, rel=1e-3)
    assert found.days_interval == pytest.approx((8.0, 12.5), rel=1e-3)
    assert {option.meets for option in options} == {"likely", "maybe", "no"}
    for option in options:
        low, high = option.days_interval
        assert option.meets == ("likely" if high <= 12.51 else "maybe" if low <= 12.51 else "no")
    assert [option.meets for option in options] == sorted(
        option.meets for option in options if option.meets != "no"
    ) + ["no"] * sum(option.meets == "no" for option in options)


def test_an_answer_says_that_it_is_only_maybe() -> None:
    """The most that is looked at takes 7 days, 5.6 to 8.75; "60 days: meets" was said of a figure that is off by 30 %."""
    question = Question(catalogue=CATALOGUE, tokens=(800 + 2400) * 6 * 86400 * 7, deadline_days=6.0)
    page = said_of(size(question, evaluate), question)
    assert "likely none of the options; maybe 6 fast + 6 slow, 7.0 days (5.6 to 8.8)" in page
    shorter = Question(catalogue=CATALOGUE, tokens=question.tokens, deadline_days=5.0)
    assert ": none of the options; the fastest, " in said_of(size(shorter, evaluate), shorter)


def test_the_fastest_within_a_budget_is_on_the_frontier() -> None:
    options = options_of(1e10, budget=1e5)
    assert all(option.cost is not None and option.cost <= 1e5 for option in options if option.meets == "likely")
    assert any(option.on_frontier for option in options if option.meets == "likely")


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
    found = best(options_of(tokens, deadline_days=12.51))
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


def test_every_count_that_was_skipped_is_named() -> None:
    question = Question(catalogue=CATALOGUE, tokens=1e12)
    found = size(question, evaluate)
    assert found.skipped_counts == {"fast": [5, 7], "slow": [5, 7]}  # powers of two and their halves are looked at
    mixtures = sum(len(each.nodes) == 2 for each in (*found.options, *found.left_out))
    assert found.not_looked_at == 8 * 8 - mixtures
    page = said_of(found, question)
    assert "not looked at: fast alone by 5, 7" in page
    assert f"{found.not_looked_at} mixtures of two node types" in page


def said_of(found: Any, question: Question) -> str:
    """What the page of an answer says."""
    with tempfile.TemporaryDirectory() as folder:
        write_sizing(found, question, Path(folder) / "size.html")
        return (Path(folder) / "size.html").read_text()
