"""The answers of `hethub size`: options, their frontier, and what to add next; on the terminal and as a page."""

from collections.abc import Container, Sequence
from html import escape
from pathlib import Path

from hethub.capacity.additions import Addition
from hethub.capacity.catalogue import CatalogueSpec
from hethub.capacity.options import LeftOut, Option, Question, best, have_prices, height, in_words, named
from hethub.capacity.sizing import EVERY_COUNT, Sizing
from hethub.report.drawing import scatter
from hethub.report.page import html_table, section, write_html
from hethub.report.tables import assumed_sentence
from hethub.runtime.console import make_console, make_table
from hethub.spec.cluster import ClusterSpec

MOST_OPTIONS, BAR, MOST_LEFT_OUT = 20, 40, 5


def print_sizing(found: Sizing, question: Question, out: Path | None, measured: Container[str] = ()) -> None:
    """The options that meet what was asked first, and a plot of the frontier of time and price (or size)."""
    console = make_console()
    head, rows = _table(found.options[:MOST_OPTIONS], question)
    table = make_table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if (number := len(found.options)) > MOST_OPTIONS:
        console.print(f"the first {MOST_OPTIONS} of {number} options; --out and --json have all")
    frontier, priced = _frontier(found), have_prices(found.options)
    console.print("the frontier of time and price:" if priced else "the frontier of time and size:")
    for option in frontier:
        length = max(1, round(BAR * option.days / frontier[-1].days))
        weighed = _price(option, question.catalogue) if priced else _size(option)
        console.print(f"{named(option.nodes):28}{'█' * length} {_figure(option.days)} days, {weighed}")
    for sentence in _sentences(found, question, measured):
        console.print(sentence)
    if out is not None:
        console.print(f"written to {out}")


def write_sizing(found: Sizing, question: Question, out: Path, measured: Container[str] = ()) -> None:
    """Return the answer as a self-contained page, with a plot of days and price (accelerators if a price is missing)."""
    priced = have_prices(found.options)
    points = [
        (option.days, height(option, priced), named(option.nodes), option.on_frontier) for option in found.options
    ]
    against = f"cost, {question.catalogue.currency}" if priced else "accelerators"
    body = [
        *(f"<p>{escape(sentence)}</p>" for sentence in _sentences(found, question, measured)),
        section("Frontier", scatter(points, "days", against)),
        section("Options", html_table(*_table(found.options, question))),
    ]  # fmt: skip
    write_html(out, f"{_tokens(question.tokens)} tokens", body)


def _table(options: Sequence[Option], question: Question) -> tuple[list[str], list[list[str]]]:
    """Head and rows, without the columns that nobody has a figure for, and without `meets` where nothing was to be met."""
    cost = f"cost {question.catalogue.currency or ''}".strip()
    head = ["nodes", "accelerators", "goodput\ntokens/s", "days\n(80 %)", cost, "MWh (assumed)"]
    head += ["meets"] if question.has_limit else []
    columns = zip(head, *(_cells(option)[: len(head)] for option in options), strict=True)
    names, *rows = map(list, zip(*(column for column in columns if any(column[1:])), strict=True))
    return names, rows


def _cells(option: Option) -> list[str]:
    return [
        named(option.nodes), str(option.accelerators), f"{option.goodput_tokens_per_second:,.0f}",
        f"{_figure(option.days)}\n({_interval(option, '-')})", "" if option.cost is None else _money(option.cost),
        "" if option.energy_kwh is None else _figure(option.energy_kwh / 1e3), option.meets,
    ]  # fmt: skip


def _interval(option: Option, to: str = " to ") -> str:
    return to.join(map(_figure, option.days_interval))


def _figure(value: float) -> str:
    """19.6; two digits where there is less than one, and three where nobody reads so many."""
    return f"{value:,.1f}" if value == 0 or 1 <= value < 1e9 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def _days(value: float) -> str:
    return f"{value:g} day{'' if value == 1 else 's'}"


def _tokens(value: float) -> str:
    """1 T, 1.5 B, 300 M: as they are asked for."""
    size, unit = next(
        ((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if value >= size), (1.0, "")
    )
    return f"{value / size:,.4g} {unit}".strip()


def _money(value: float) -> str:
    return f"{value:,.0f}" if value == 0 or 100 <= value < 1e12 else _figure(value)


def _frontier(found: Sizing) -> list[Option]:
    return sorted((option for option in found.options if option.on_frontier), key=lambda option: option.days)


def _price(option: Option, catalogue: CatalogueSpec) -> str:
    return _size(option) if option.cost is None else f"{_money(option.cost)} {catalogue.currency}"


def _size(option: Option) -> str:
    return f"{option.accelerators} accelerators"


def _sentences(found: Sizing, question: Question, measured: Container[str]) -> list[str]:
    """What was asked and found, what was left out, and what the figures rest on."""
    catalogue, wanted = question.catalogue, []
    wanted += [] if question.deadline_days is None else [f"within {_days(question.deadline_days)}"]
    wanted += [] if question.budget is None else [f"for {question.budget:,.0f} {catalogue.currency}"]
    asked = f"{_tokens(question.tokens)} tokens {' and '.join(wanted)}".strip()
    chosen = best(found.options)
    asked += ", beside what is owned" if question.have and (chosen is None or chosen.nodes) else ""
    if chosen is None:
        nearest = found.options[0]
        what, takes = ("fastest", "takes") if question.budget is None else ("cheapest", "costs")
        figure = f"{_figure(nearest.days)} days" if question.budget is None else _price(nearest, catalogue)
        answer = f"none of the options; the {what}, {in_words(nearest.nodes)}, {takes} {figure}"
    else:
        answer = (
            f"{in_words(chosen.nodes)}, {_figure(chosen.days)} days ({_interval(chosen)}), {_price(chosen, catalogue)}"
        )
        if wanted:
            answer = f"likely {answer}" if chosen.meets == "likely" else f"likely none of the options; maybe {answer}"
        else:
            answer = f"the {'smallest' if chosen.cost is None else 'cheapest'} is {answer}"
    sentences = [f"{asked}: {answer}", *left_out_sentences(found.left_out)]
    if alone := _alone(found, catalogue):
        sentences.append(f"counts planned of one node type alone: {alone}")
    if found.not_looked_at:
        least = "at least " if any(node.count > EVERY_COUNT for node in catalogue.nodes) else ""
        sentences.append(
            f"{found.not_looked_at:,} mixtures of two node types were not planned; {least}{found.might_be_better:,} of them would be a "
            "better answer if every node did what it does in its type's best count alone"
        )
    if len(catalogue.nodes) > 2:
        sentences.append("mixtures of three node types or more are never planned, unless --have names a part of one")
    if assumed := assumed_speeds_of(found.node_types, catalogue, question.have, measured):
        sentences.append(assumed_sentence(assumed))
    if catalogue.date:
        sentences.append(f"prices of {catalogue.date}")
    if question.have is not None:
        sentences.append("nodes owned cost nothing, whatever price_per_hour their cluster file gives")
    stated = ", ".join(f"{key} {value:g}" for key, value in catalogue.assumptions.model_dump().items())
    return [*sentences, f"assumed, not measured (the catalogue's `assumptions` change it): {stated}"]


def assumed_speeds_of(
    used: Container[str], catalogue: CatalogueSpec, have: ClusterSpec | None, measured: Container[str]
) -> list[str]:
    """The accelerators of unknown speed among what is owned and the node types `used`; `measured` ones are known."""
    rented = [node for node in catalogue.nodes if node.name in used]
    owned = () if have is None else have.nodes
    assumed = {node.device.name for node in (*owned, *rented) if node.device.source == "assumed"}
    return sorted(name for name in assumed if name not in measured)


def _alone(found: Sizing, catalogue: CatalogueSpec) -> str:
    """`H200 1, 4, 8 (of 16); A100 16 (of 16)`: of each type the counts that were planned without another."""
    seen: dict[str, list[int]] = {}
    for nodes in [option.nodes for option in found.options] + [cluster.nodes for cluster in found.left_out]:
        if len(nodes) == 1:
            [(name, count)] = nodes.items()
            seen.setdefault(name, []).append(count)
    available = {node.name: node.count for node in catalogue.nodes}
    return "; ".join(
        f"{name} {', '.join(map(str, sorted(counts)))} (of {available[name]:,})" for name, counts in seen.items()
    )


def left_out_sentences(left_out: Sequence[LeftOut]) -> list[str]:
    """The first clusters that cannot train the model, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for cluster in left_out:
        by_reason.setdefault(cluster.why, []).append(named(cluster.nodes))
    shown = list(by_reason.items())[:MOST_LEFT_OUT]
    sentences = [f"left out {_some(names)}: {why}" for why, names in shown]
    rest = len(left_out) - sum(len(names) for _, names in shown)
    return [*sentences, f"and {rest} more, for other reasons"] if rest else sentences


def _some(names: Sequence[str]) -> str:
    """All names, or the first of them and how many there are beside."""
    more = len(names) - MOST_LEFT_OUT
    return ", ".join(names[:MOST_LEFT_OUT]) + (f" and {more} more" if more > 0 else "")


def print_additions(
    additions: Sequence[Addition], left_out: Sequence[LeftOut], catalogue: CatalogueSpec, assumed: Sequence[str]
) -> None:
    """Node types, best gain per price first, those that cannot be added, and the accelerators whose speed is `assumed`."""
    priced = [f"gained per {catalogue.currency}\nan hour"] if catalogue.currency else []
    table = make_table("nodes added", "tokens/s then", "tokens/s gained", *priced)
    for addition in additions:
        per_price = "" if addition.gained_per_price is None else f"{addition.gained_per_price:,.1f}"
        table.add_row(
            named({addition.node: addition.count}), f"{addition.tokens_per_second:,.0f}",
            f"{addition.gained_tokens_per_second:,.0f}", *([per_price] if priced else []),
        )  # fmt: skip
    console = make_console()
    console.print(table)
    if idle := [addition for addition in additions if not addition.gained_tokens_per_second]:
        more = " or ".join(named({addition.node: addition.count}) for addition in idle)
        console.print(
            f"no plan was found that is faster with {more} more than without. More of them may be: --nodes {2 * idle[0].count}; "
            "a higher constraints.time_limit_seconds searches longer"
        )
    for sentence in left_out_sentences(left_out):
        console.print(sentence)
    if assumed:
        console.print(assumed_sentence(assumed))
    if catalogue.date:
        console.print(f"prices of {catalogue.date}")
