"""Which cluster to rent: against an ideal evaluator whose throughput is known."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hethub.capacity.additions import rank_additions
from hethub.capacity.catalogue import CatalogueSpec, cluster_of
from hethub.capacity.options import LeftOut, Option, Question, best, mark_frontier, option_of
from hethub.capacity.sizing import size
from hethub.report.capacity import left_out_sentences, print_additions, print_sizing, write_sizing
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
        tokens_per_second=speed,
        ceiling_tokens_per_second=1.1 * speed,
        breakdown={"compute": 0.5},
        step_seconds=1.0,
        step_seconds_interval=(0.8, 1.25),
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
    """All there is takes 7 days, 5.6 to 8.75; "60 days: meets" was said of a figure that is off by 30 %."""
    question = Question(catalogue=CATALOGUE, tokens=(800 + 2400) * 8 * 86400 * 7, deadline_days=6.0)
    page = said_of(size(question, evaluate), question)
    assert "likely none of the options; maybe 8 fast + 8 slow nodes, 7.0 days (5.6 to 8.8)" in page
    shorter = Question(catalogue=CATALOGUE, tokens=question.tokens, deadline_days=5.0)
    assert ": none of the options; the fastest, " in said_of(size(shorter, evaluate), shorter)


def test_within_a_budget_the_fastest_is_the_answer() -> None:
    """The cheapest was, which where speed costs nothing is one node for years. Of slow ones 8 cost 15 % more than all in a day."""
    tokens = 800 * 8 * 86400 * 10  # eight slow nodes for ten days, 8 to 12.5: 19,200 EUR, 15,360 to 24,000
    options = options_of(tokens, budget=24001.0)
    found = best(options)
    assert found is not None
    assert found.nodes == {"slow": 8}
    assert found.meets == "likely"
    less = Question(catalogue=CATALOGUE, tokens=tokens, budget=100.0)
    assert ": none of the options; the cheapest, " in said_of(size(less, evaluate), less)


def test_counts_between_are_looked_at_for_a_budget_too() -> None:
    """Each node more is less efficient: five are within the budget, six are not, and only powers of two were looked at."""

    def crowded(on: ClusterSpec) -> Any:
        found = evaluate(on)
        found.tokens_per_second *= 0.95 ** (on.nodes[0].count - 1)
        return found

    only = CATALOGUE.replace(nodes=CATALOGUE.nodes[:1])
    budget = 40 * 24 * 1.25 / 0.95**4.5
    options = size(Question(catalogue=only, tokens=2400 * 86400, budget=budget), crowded).options
    found = best(options)
    assert found is not None
    assert found.nodes == {"fast": 5}


def test_a_type_without_a_price_is_left_out_of_a_budget_by_name() -> None:
    fast, slow = CATALOGUE.nodes
    question = Question(
        catalogue=CATALOGUE.replace(nodes=(fast.replace(price_per_hour=None), slow)), tokens=1e10, budget=1e5
    )
    found = size(question, evaluate)
    assert {name for option in found.options for name in option.nodes} == {"slow"}
    assert "left out 8 fast: it has no price_per_hour" in said_of(found, question)


def test_all_of_both_types_is_an_answer_where_less_is_none() -> None:
    """Mixtures went up to 6 and 6 of 8 and 8, the smallest first."""
    options = options_of((800 + 2400) * 8 * 86400 * 10, deadline_days=12.51)
    assert [option.nodes for option in options if option.meets == "likely"] == [{"fast": 8, "slow": 8}]
    late = Question(catalogue=CATALOGUE, tokens=1e13, deadline_days=1.0)
    assert "none of the options; the fastest, 8 fast + 8 slow nodes, takes " in said_of(size(late, evaluate), late)


def test_a_hundred_thousand_nodes_of_a_type_are_not_all_looked_at() -> None:
    """It went on doubling, and listed every count that it had not looked at."""
    many = CATALOGUE.replace(nodes=tuple(node.replace(count=100_000) for node in CATALOGUE.nodes))
    question = Question(catalogue=many, tokens=800 * 100 * 86400 * 10, deadline_days=12.51)
    found = size(question, evaluate)
    chosen = best(found.options)
    assert chosen is not None
    assert chosen.nodes == {"slow": 100}
    assert len(found.options) < 30
    assert max(sum(option.nodes.values()) for option in found.options) <= 200


def test_what_is_hopeless_even_at_its_ceiling_is_not_planned() -> None:
    options = options_of(800 * 8 * 86400 * 10, deadline_days=12.51)
    assert {"slow": 4} not in [option.nodes for option in options]


def test_short_and_absurd_times_can_be_read() -> None:
    for tokens, words in ((1e9, "0.3"), (1e300, "e+29")):
        question = Question(catalogue=CATALOGUE, tokens=tokens)
        page = said_of(size(question, evaluate), question)
        assert words in page
        assert "0.0 days" not in page
        assert re.search(r"\d{20}", page.split("</title>")[1]) is None


def test_owned_nodes_cost_nothing() -> None:
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")
    options = options_of(1e12, have=have)
    assert next(option for option in options if option.nodes == {}).cost == 0
    question = Question(catalogue=CATALOGUE, tokens=1e12, have=have)
    page = said_of(size(question, evaluate), question)
    assert "1 T tokens: the cheapest is what is owned, " in page
    assert "0 EUR" in page
    assert "0.0 EUR" not in page
    assert cluster_of(CATALOGUE, {"slow": 1}, have).size == 40


def test_where_no_type_can_be_added_the_first_reason_is_given() -> None:
    """The table had been empty, and the command content."""
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")

    def evaluate(on: ClusterSpec) -> SimpleNamespace:
        if on.size > have.size:
            raise BadInput("region of the new node is not given.")
        return SimpleNamespace(tokens_per_second=1.0)

    with pytest.raises(BadInput, match=r"none of the catalogue's 2 node types can be added.*region of the new node"):
        rank_additions(CATALOGUE, evaluate, have)


def test_additions_are_ranked_by_throughput_per_price() -> None:
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")
    assert [addition.node for addition in rank_additions(CATALOGUE, evaluate, have)[0]] == ["slow", "fast"]
    unpriced = CATALOGUE.replace(nodes=tuple(node.replace(price_per_hour=None) for node in CATALOGUE.nodes))
    assert [addition.node for addition in rank_additions(unpriced, evaluate, have)[0]] == ["fast", "slow"]


def test_what_brings_something_for_nothing_is_added_first() -> None:
    """A spare node at a price of 0 came last: what it brings for its price was taken for none."""
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")
    slow, fast = (CATALOGUE.nodes[1].replace(price_per_hour=0.0), CATALOGUE.nodes[0])
    free = CATALOGUE.replace(nodes=(fast, slow))
    assert [addition.node for addition in rank_additions(free, evaluate, have)[0]] == ["slow", "fast"]
    assert [addition.gained_per_price for addition in rank_additions(free, evaluate, have)[0]] == [None, 60.0]

    def only_fast(on: ClusterSpec) -> SimpleNamespace:
        return SimpleNamespace(tokens_per_second=float(sum(node.name == "fast" for node in on.nodes)))

    assert [addition.node for addition in rank_additions(free, only_fast, have)[0]] == ["fast", "slow"]


def test_a_machine_in_parts_fails_as_one_machine() -> None:
    """A machine told as two parts counted as two nodes, each with a time to failure of its own."""
    node = {"name": "n", "accelerator": "H100-SXM5-80GB", "accelerators": 8}
    parts = [{**node, "name": name, "accelerators": 4, "part_of": "n"} for name in ("a", "b")]
    whole, parted = (ClusterSpec.model_validate({"name": "ours", "nodes": nodes}) for nodes in ([node], parts))
    often = CATALOGUE.replace(assumptions={"node_mtbf_hours": 100.0})
    found = [size(Question(catalogue=often, tokens=1e12, have=have), evaluate) for have in (whole, parted)]
    goodputs = [{str(option.nodes): option.goodput_tokens_per_second for option in each.options} for each in found]
    assert goodputs[1] == pytest.approx(goodputs[0])


def test_one_node_more_is_never_slower_since_it_can_stay_unused(capsys: pytest.CaptureFixture[str]) -> None:
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")
    additions, left_out = rank_additions(CATALOGUE, lambda on: SimpleNamespace(tokens_per_second=9e6 / on.size), have)
    assert [addition.gained_tokens_per_second for addition in additions] == [0.0, 0.0]
    assert {addition.tokens_per_second for addition in additions} == {9e6 / 32}
    print_additions(additions, left_out, CATALOGUE, ["CPU-core"])
    said = " ".join(capsys.readouterr().out.split())
    assert "faster with 1 fast or 1 slow more than without. More of them may be: --nodes 2" in said
    assert "the speed of CPU-core is assumed" in said


def test_what_one_node_does_not_bring_several_may() -> None:
    """One MI300X node beside eight and eight H100 brings nothing, eight bring a third more; only one could be asked for."""
    have = cluster(("A100-SXM4-80GB", 4, 8), name="ours")

    def in_fours(on: ClusterSpec) -> SimpleNamespace:
        return SimpleNamespace(tokens_per_second=float(sum(node.count // 4 for node in on.nodes)))

    assert [each.gained_tokens_per_second for each in rank_additions(CATALOGUE, in_fours, have)[0]] == [0.0, 0.0]
    four, _ = rank_additions(CATALOGUE, in_fours, have, 4)
    assert {(each.node, each.count, each.gained_tokens_per_second) for each in four} == {
        ("slow", 4, 1.0),
        ("fast", 4, 1.0),
    }
    prices = {node.name: node.price_per_hour for node in CATALOGUE.nodes}
    assert all(each.gained_per_price == pytest.approx(1.0 / 4 / (prices[each.node] or 0.0)) for each in four)
    with pytest.raises(BadInput, match="the catalogue has 8 of them"):
        rank_additions(CATALOGUE, in_fours, have, 9)


def test_where_nothing_is_asked_no_option_is_said_to_meet_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row was "likely"."""
    question = Question(catalogue=CATALOGUE, tokens=1e12)
    found = size(question, evaluate)
    print_sizing(found, question, None)
    said = capsys.readouterr().out
    assert "meets" not in said
    assert "likely" not in said
    assert f"1 T tokens: the cheapest is {found.options[0].nodes['slow']} slow node" in said


def test_frontier_has_no_beaten_option() -> None:
    options = mark_frontier(options_of(1e12))
    front = [option for option in options if option.on_frontier]
    assert front
    for a in front:
        assert not any(b.days < a.days and (b.cost or 0.0) < (a.cost or 0.0) for b in options)


def test_of_equal_options_neither_beats_the_other() -> None:
    (one, *_) = options_of(1e12)
    assert [option.on_frontier for option in mark_frontier([one, replace(one, nodes={"another": 1})])] == [True, True]
    assert one.cost is not None
    for worse in (replace(one, cost=one.cost + 1), replace(one, days=one.days + 1)):
        assert [option.on_frontier for option in mark_frontier([one, worse])] == [True, False]


def test_deadline_and_budget_are_both_to_be_met() -> None:
    tokens = 800 * 8 * 86400 * 10  # eight slow nodes for ten days: 19,200 EUR
    assert best(options_of(tokens, deadline_days=1e3, budget=1e9)) is not None
    assert best(options_of(tokens, deadline_days=1e3, budget=1.0)) is None
    assert best(options_of(tokens, deadline_days=1e-3, budget=1e9)) is None


def test_energy_is_the_mean_power_over_all_hours() -> None:
    question = Question(catalogue=CATALOGUE, tokens=800 * 2 * 86400 * 10)
    on = cluster_of(CATALOGUE, {"slow": 2}, None)
    watts = CATALOGUE.assumptions.watts(on, 0.5)
    assert watts is not None
    assert option_of(question, {"slow": 2}, evaluate(on)).energy_kwh == pytest.approx(watts * 240 / 1000, rel=1e-3)


def test_the_smallest_count_that_meets_the_deadline_is_found_between_those_looked_at() -> None:
    tokens = 800 * 5 * 86400 * 10  # five slow nodes, ten days: counts looked at are 4 and 6
    found = best(options_of(tokens, deadline_days=12.51))
    assert found is not None
    assert found.nodes == {"slow": 5}


def test_what_cannot_train_is_left_out_with_its_reason() -> None:
    found = size(Question(catalogue=CATALOGUE, tokens=1e12), evaluate)
    assert [(cluster.nodes, cluster.why) for cluster in found.left_out] == [({"slow": 1}, "no plan fits")]
    assert all(option.nodes != {"slow": 1} for option in found.options)


def test_where_nothing_can_train_the_largest_says_why() -> None:
    """The smallest said how many nodes more it would need, of which there are too few."""

    def small(on: ClusterSpec) -> Any:
        raise BadInput(f"{on.size} are too few")

    with pytest.raises(BadInput, match=r"the largest, 8 fast \+ 8 slow: 128 are too few"):
        size(Question(catalogue=CATALOGUE, tokens=1e12), small)


def test_a_reason_that_is_no_cluster_s_is_given_alone() -> None:
    """Of a profile of another model, "no cluster of the 35 looked at can train this" was said."""

    def other(on: ClusterSpec) -> Any:
        raise BadInput("the profile is of another model.")

    with pytest.raises(BadInput, match=r"^the profile is of another model\.$"):
        size(Question(catalogue=CATALOGUE, tokens=1e12), other)


def test_where_failures_leave_no_time_no_figure_is_infinite() -> None:
    frail = CATALOGUE.replace(assumptions={"node_mtbf_hours": 0.01})
    with pytest.raises(BadInput, match=r"MTBF of 0.01 hours each fail faster than they train"):
        size(Question(catalogue=frail, tokens=1e12), evaluate)


def test_the_frontier_is_of_sizes_where_a_price_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """It was one of prices under the heading of sizes, and then of sizes with prices beside them."""
    fast, slow = CATALOGUE.nodes
    question = Question(catalogue=CATALOGUE.replace(nodes=(fast, slow.replace(price_per_hour=None))), tokens=1e12)
    found = size(question, evaluate)
    assert {name for option in found.options if option.on_frontier for name in option.nodes} == {"fast"}
    print_sizing(found, question, None)
    frontier = capsys.readouterr().out.split("the frontier of time and size:\n")[1].split("\n1 T tokens")[0]
    assert "EUR" not in frontier
    assert all(line.endswith(" accelerators") for line in frontier.splitlines())
    days = [float(said.replace(",", "")) for said in re.findall(r"([\d.,]+) days", frontier)]
    assert days == sorted(days)
    assert len(days) > 1


def test_of_what_costs_the_same_the_fastest_is_the_answer() -> None:
    """Nodes that cost nothing: the slowest was the answer, beside a frontier that it was not on."""
    free = CATALOGUE.replace(nodes=tuple(node.replace(price_per_hour=0.0) for node in CATALOGUE.nodes))
    for asked in ({}, {"deadline_days": 1e6}, {"budget": 1.0}):
        options = size(Question(catalogue=free, tokens=1e12, **asked), evaluate).options
        assert options[0].on_frontier
        assert {option.meets for option in options} == {"likely"}
        assert options[0].days == min(option.days for option in options)


def test_without_prices_nothing_is_said_to_cost_nothing() -> None:
    """What is owned had "150.0 days, 0", of no currency."""
    nodes = tuple(node.replace(price_per_hour=None) for node in CATALOGUE.nodes)
    unpriced = CatalogueSpec(nodes=nodes, assumptions=CATALOGUE.assumptions)
    question = Question(catalogue=unpriced, tokens=1e12, have=cluster(("A100-SXM4-80GB", 4, 8), name="ours"))
    found = size(question, evaluate)
    assert found.options[0].nodes == {}
    assert {option.cost for option in found.options} == {None}
    page = said_of(found, question)
    assert re.search(r"what is owned, [^<]* 32 accelerators", page)
    assert "<th>cost" not in page


def test_clusters_that_are_left_out_for_one_reason_share_a_sentence() -> None:
    """Every count of a type stood for itself, with the same reason again, and most were not shown."""

    def only_slow(on: ClusterSpec) -> Any:
        if any(node.device.name == "H100-SXM5-80GB" for node in on.nodes):
            raise BadInput("node 'fast' has no region.")
        return evaluate(on)

    question = Question(catalogue=CATALOGUE, tokens=1e12, have=cluster(("A100-SXM4-80GB", 4, 8), name="ours"))
    page = said_of(size(question, only_slow), question)
    assert "left out 1 fast, 2 fast, 4 fast, 8 fast, 8 fast + 8 slow: node &#x27;fast&#x27; has no region." in page
    assert "fixes a part" not in page  # `--have` was advised to who gave it


def said_of(found: Any, question: Question) -> str:
    """What the page of an answer says."""
    with tempfile.TemporaryDirectory() as folder:
        write_sizing(found, question, Path(folder) / "size.html")
        return (Path(folder) / "size.html").read_text()


def test_clusters_beyond_the_first_reasons_are_counted() -> None:
    """Five reasons are told; of a sixth and a seventh there are three clusters."""
    left_out = [LeftOut(nodes={"n": 1 + n}, why=f"reason {min(n, 6)}") for n in range(8)]
    sentences = left_out_sentences(left_out)
    assert len(sentences) == 6
    assert sentences[0] == "left out 1 n: reason 0"
    assert sentences[-1] == "and 3 more, for other reasons"
    alike = [LeftOut(nodes={"n": 1 + n}, why="it is") for n in range(7)]
    assert left_out_sentences(alike) == ["left out 1 n, 2 n, 3 n, 4 n, 5 n and 2 more: it is"]
