"""Which counts and mixtures are planned: against an ideal evaluator, and against all there are."""

from itertools import product
from typing import Any

import pytest

from hethub.capacity.catalogue import CatalogueSpec, cluster_of
from hethub.capacity.options import Option, Question, option_of, rank
from hethub.capacity.sizing import size
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from tests.capacity.test_sizing import CATALOGUE, SPEED, evaluate, said_of
from tests.predictor.plans import cluster


@pytest.mark.parametrize("asked", [{"budget": 28_000.0}, {"budget": 31_000.0}, {"deadline_days": 8.0}])
def test_the_answer_is_the_best_of_all_counts_and_mixtures(asked: dict[str, float]) -> None:
    """Or it says that there may be better ones. Mixtures lose more with every fast node: the most promising are none."""

    def unlike(on: ClusterSpec) -> Any:
        found = evaluate(on)
        if len(on.nodes) == 2:
            found.tokens_per_second *= 1.0 - 0.05 * on.nodes[0].count
        return found

    question = Question(catalogue=CATALOGUE, tokens=800 * 8 * 86400 * 10, **asked)
    expected, found = best_of_all(question, unlike), size(question, unlike)
    assert found.options[0].nodes == expected.nodes or found.might_be_better
    assert found.options[0].nodes == expected.nodes or asked == {"budget": 31_000.0}


def best_of_all(question: Question, evaluator: Any) -> Option:
    """Of every count and mixture of the two types."""
    counts = [
        {name: count for name, count in (("fast", fast), ("slow", slow)) if count}
        for fast, slow in product(range(9), range(9))
    ]
    options = [
        option_of(question, each, evaluator(cluster_of(question.catalogue, each, question.have)))
        for each in counts
        if each not in ({}, {"slow": 1})
    ]
    return min(options, key=lambda option: rank(question, option, option.accelerators))


OURS = cluster(("A100-SXM4-80GB", 4, 8), name="ours")


def crowded(on: ClusterSpec) -> Any:
    """Fast nodes lose a fifth with every one more."""
    found = evaluate(on)
    found.tokens_per_second = sum(
        node.count
        * node.accelerators
        * SPEED[node.device.name]
        * (0.8 ** (node.count - 1) if node.name == "fast" else 1.0)
        for node in on.nodes
    )
    return found


def unsure_of_fast(on: ClusterSpec) -> Any:
    found = evaluate(on)
    found.step_seconds_interval = (0.5, 2.0) if on.nodes[-1].name == "fast" else (0.9, 1.1)
    return found


def best_by_four(on: ClusterSpec) -> Any:
    """Fewer nodes of a type do little, and more do hardly more."""
    found = evaluate(on)
    of_type = {1: 0.3, 2: 0.6, 3: 1.0, 4: 4.0}
    found.tokens_per_second = sum(
        node.accelerators * SPEED[node.device.name] * of_type.get(node.count, 4.0 + 0.01 * node.count)
        for node in on.nodes
    )
    return found


@pytest.mark.parametrize(
    ("evaluator", "asked"),
    [
        (evaluate, {"deadline_days": 13.0, "have": OURS}),
        (crowded, {"deadline_days": 8.0}),
        (unsure_of_fast, {"deadline_days": 2.0}),
        (best_by_four, {"deadline_days": 25.01}),
    ],
)
def test_the_answer_is_the_best_of_all_whatever_nodes_add(evaluator: Any, asked: dict[str, Any]) -> None:
    question = Question(catalogue=CATALOGUE, tokens=800 * 8 * 86400 * 10, **asked)
    assert size(question, evaluator).options[0].nodes == best_of_all(question, evaluator).nodes


@pytest.mark.parametrize("name", ["slow", "fast"])
def test_what_the_deadline_finds_its_own_price_finds(name: str) -> None:
    """Three nodes are the fewest that hold the model, and cost least: of 2 and 4, neither was within the budget, and the
    answer was none."""

    def heavy(on: ClusterSpec) -> Any:
        if sum(node.count for node in on.nodes) < 3:
            raise BadInput("no plan fits.")
        found = evaluate(on)
        found.tokens_per_second *= 0.6 ** sum(node.count for node in on.nodes)
        return found

    catalogue = CATALOGUE.replace(nodes=tuple(node for node in CATALOGUE.nodes if node.name == name))
    asked = Question(catalogue=catalogue, tokens=800 * 8 * 86400 * 10, deadline_days=1000.0)
    cheapest = size(asked, heavy).options[0]
    assert cheapest.cost is not None
    most = cheapest.cost * cheapest.days_interval[1] / cheapest.days
    found = size(Question(catalogue=catalogue, tokens=asked.tokens, budget=most * (1 + 1e-9)), heavy).options[0]
    assert cheapest.nodes == found.nodes == {name: 3}
    assert found.meets == "likely"


@pytest.mark.parametrize("priced", [True, False])
def test_where_the_answer_is_the_best_nothing_may_be_better(priced: bool) -> None:
    """Two slow nodes beside what is owned are the cheapest and the smallest: what a node adds is without what is owned."""
    unpriced = CatalogueSpec(
        nodes=tuple(node.replace(price_per_hour=None) for node in CATALOGUE.nodes), assumptions=CATALOGUE.assumptions
    )
    tokens = 800 * 6 * 86400 * 10
    question = Question(catalogue=CATALOGUE if priced else unpriced, tokens=tokens, have=OURS, deadline_days=12.51)
    found = size(question, evaluate)
    if priced:
        assert found.options[0].nodes == {"slow": 2}
    assert found.options[0].nodes == best_of_all(question, evaluate).nodes
    assert found.might_be_better == 0


def test_mixtures_of_types_that_disappoint_come_behind_others() -> None:
    """Fast and slow nodes reach half of what they promise together; fast and older ones promise a little less, and keep it."""
    fast, slow = CATALOGUE.nodes
    older = slow.replace(name="older", price_per_hour=13.0)

    def unlike(on: ClusterSpec) -> Any:
        found = evaluate(on)
        if {node.name for node in on.nodes} == {"fast", "slow"}:
            found.tokens_per_second /= 2
        return found

    question = Question(
        catalogue=CATALOGUE.replace(nodes=(fast, slow, older)), tokens=800 * 20 * 86400 * 10, deadline_days=12.51
    )
    assert set(size(question, unlike).options[0].nodes) == {"fast", "older"}


def test_no_more_nodes_of_a_type_are_planned_than_make_it_faster() -> None:
    def alone(on: ClusterSpec) -> Any:
        found = evaluate(on)
        found.tokens_per_second = 2400.0
        return found

    only = CATALOGUE.replace(nodes=(CATALOGUE.nodes[0].replace(count=100_000),))
    assert [option.nodes for option in size(Question(catalogue=only, tokens=1e12), alone).options] == [
        {"fast": 1},
        {"fast": 2},
    ]


def test_all_nodes_of_a_type_are_planned_where_even_they_are_too_slow() -> None:
    """And where they are no power of two."""
    only = CATALOGUE.replace(nodes=(CATALOGUE.nodes[0].replace(count=6),))
    for asked in ({}, {"deadline_days": 0.001}):
        options = size(Question(catalogue=only, tokens=1e12, **asked), evaluate).options
        assert {"fast": 6} in [option.nodes for option in options]


def test_types_that_only_together_hold_the_model_are_looked_at() -> None:
    def large(on: ClusterSpec) -> Any:
        if len(on.nodes) == 1:
            raise BadInput("no plan fits")
        return evaluate(on)

    found = size(Question(catalogue=CATALOGUE, tokens=1e12, deadline_days=1000.0), large)
    nodes = [option.nodes for option in found.options]
    assert {"fast": 8, "slow": 8} in nodes
    assert len(nodes) > 1


def test_no_mixture_is_planned_twice() -> None:
    """Large nodes train beside weak ones alone; what they do there would make them good beside slow ones, where they do not."""
    fast, slow = CATALOGUE.nodes
    three = CATALOGUE.replace(nodes=(fast.replace(name="large"), slow, slow.replace(name="weak")))

    def beside_weak(on: ClusterSpec) -> Any:
        names = {node.name for node in on.nodes}
        if "large" in names and "weak" not in names:
            raise BadInput("no plan fits")
        found = evaluate(on)
        found.tokens_per_second /= 2 if names == {"weak"} else 1
        return found

    found = size(Question(catalogue=three, tokens=1e13, deadline_days=0.1), beside_weak)
    nodes = [each.nodes for each in (*found.options, *found.left_out)]
    assert all(nodes.count(each) == 1 for each in nodes)


def test_mixtures_that_were_not_looked_at_are_counted() -> None:
    question = Question(catalogue=CATALOGUE, tokens=1e12, budget=1e6)
    found = size(question, evaluate, mixtures=1)
    mixtures = sum(len(each.nodes) == 2 for each in (*found.options, *found.left_out))
    assert found.not_looked_at == 8 * 8 - mixtures
    page = said_of(found, question)
    assert f"{found.not_looked_at} mixtures of two node types were not planned" in page
    assert "counts planned of one node type alone: slow 1, 2, 4, 8 (of 8); fast 1, 2, 4, 8 (of 8)" in page
    assert "three node types" not in page  # there are two
    together = Question(catalogue=CATALOGUE, tokens=800 * 20 * 86400 * 10, deadline_days=12.51)
    assert size(together, evaluate, mixtures=1).not_looked_at == 8 * 8 - 1


def test_of_many_nodes_the_mixtures_that_may_be_better_are_at_least_so_many() -> None:
    """Of 40 nodes of a type not every count is thought of: 40 slow and 5 fast are better, and "0 may be" was said."""
    many = CATALOGUE.replace(nodes=tuple(node.replace(count=40) for node in CATALOGUE.nodes))
    question = Question(catalogue=many, tokens=(800 * 40 + 2400 * 5) * 86400 * 10, deadline_days=12.51)
    found = size(question, evaluate)
    assert found.options[0].nodes == {"fast": 6, "slow": 40}
    assert f"at least {found.might_be_better} of them would be a better answer" in said_of(found, question)
