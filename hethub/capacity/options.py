"""Clusters that answer a capacity question: what each takes in time, money and energy, and which are on the frontier."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hethub.capacity.catalogue import CatalogueSpec, cluster_of
from hethub.predictor.predict import Prediction
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput

SECONDS_PER_DAY = 86400.0
Meets = Literal["likely", "maybe", "no"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained by when or for how much, with what at hand."""

    catalogue: CatalogueSpec
    tokens: float
    have: ClusterSpec | None = None
    deadline_days: float | None = None
    budget: float | None = None

    @property
    def has_limit(self) -> bool:
        return self.deadline_days is not None or self.budget is not None


@dataclass(frozen=True, kw_only=True)
class Option:
    """One cluster and what it takes: time, money, energy. Costs are None where a price is missing.

    `days_interval` is where four of five should lie (the step's 80 % interval). An option meets what was asked likely
    where all of it does, maybe where a part does.
    """

    nodes: dict[str, int]
    accelerators: int
    tokens_per_second: float
    goodput_tokens_per_second: float
    days: float
    days_interval: tuple[float, float]
    cost: float | None
    energy_kwh: float | None
    meets: Meets
    on_frontier: bool = False


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A cluster that cannot train the model, with the reason."""

    nodes: dict[str, int]
    why: str


class Taken(NamedTuple):
    """What a cluster takes; `days_interval` and `meets` as of an `Option`."""

    days: float
    days_interval: tuple[float, float]
    cost: float | None
    meets: Meets


def taken(question: Question, counts: dict[str, int], goodput: float, spread: tuple[float, float]) -> Taken:
    """What the counts take at a goodput whose steps, four times of five, lie in `spread` times the one expected."""
    days = question.tokens / goodput / SECONDS_PER_DAY
    prices = {node.name: node.price_per_hour for node in question.catalogue.nodes}
    hourly = [(count, prices[name]) for name, count in counts.items()]
    known = question.catalogue.currency is not None and all(price is not None for _, price in hourly)
    a_day = sum(count * (price or 0.0) for count, price in hourly) * 24.0 if known else None
    low, high = days * spread[0], days * spread[1]
    return Taken(days, (low, high), None if a_day is None else a_day * days, _meets(question, low, high, a_day))


def spread_of(prediction: Prediction) -> tuple[float, float]:
    """The ends of a step's 80 % interval over the step."""
    low, high = prediction.step_seconds_interval
    return low / prediction.step_seconds, high / prediction.step_seconds


def option_of(question: Question, counts: dict[str, int], prediction: Prediction) -> Option:
    """What the counts take. Raises BadInput where failures leave no time to train."""
    assumptions, cluster = question.catalogue.assumptions, cluster_of(question.catalogue, counts, question.have)
    num_nodes = len(cluster.machines)
    goodput = prediction.tokens_per_second * assumptions.efficiency(num_nodes)
    if goodput <= 0:
        raise BadInput(
            f"{num_nodes} nodes with an MTBF of {assumptions.node_mtbf_hours:g} hours each fail faster than they train; "
            "correct the catalogue's assumptions, or take fewer nodes."
        )
    takes = taken(question, counts, goodput, spread_of(prediction))
    watts = assumptions.watts(cluster, prediction.breakdown["compute"] / prediction.step_seconds)
    return Option(
        nodes=counts,
        accelerators=cluster.size,
        tokens_per_second=prediction.tokens_per_second,
        goodput_tokens_per_second=goodput,
        energy_kwh=None if watts is None else watts / 1e3 * takes.days * 24.0,
        **takes._asdict(),
    )


def _meets(question: Question, low: float, high: float, a_day: float | None) -> Meets:
    """Whether days from `low` to `high`, at a price a day, are within deadline and budget."""
    most = or_infinite(question.deadline_days)
    if question.budget is not None:
        most = min(most, -1.0 if a_day is None else question.budget / a_day if a_day else float("inf"))
    return "likely" if high <= most else "maybe" if low <= most else "no"


def rank(question: Question, takes: Taken | Option, accelerators: int) -> tuple[float, ...]:
    """What answers are ordered by, the best first: likely ones, then those that may be. Of these within a budget the
    fastest, else the cheapest, of equal prices the fastest (where no price is known the smallest). Of what is none the
    nearest: over a budget the cheapest, behind a deadline the fastest."""
    price = or_infinite(takes.cost)
    fastest_first = (question.budget is not None) != (takes.meets == "no")
    by_price = (price, takes.days, accelerators) if takes.cost is not None else (price, accelerators, takes.days)
    order = (takes.days, price, accelerators) if fastest_first else by_price
    return (("likely", "maybe", "no").index(takes.meets), *order)


def mark_frontier(options: Sequence[Option]) -> list[Option]:
    """The options with `on_frontier` set where no other is at least as fast and as cheap, and better in one.

    Where one has no price the number of accelerators stands for it.
    """
    priced = have_prices(options)

    def beaten(option: Option) -> bool:
        mine = (option.days, height(option, priced))
        others = [(other.days, height(other, priced)) for other in options if other is not option]
        return any(days <= mine[0] and cost <= mine[1] and (days, cost) != mine for days, cost in others)

    return [replace(option, on_frontier=not beaten(option)) for option in options]


def have_prices(options: Sequence[Option]) -> bool:
    return all(option.cost is not None for option in options)


def height(option: Option, priced: bool) -> float:
    """What the frontier weighs against days."""
    return option.cost or 0.0 if priced else option.accelerators


def best(options: Iterable[Option]) -> Option | None:
    """The first option that meets what was asked, likely or maybe, of options as `size` orders them."""
    return next((option for option in options if option.meets != "no"), None)


def or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value


def named(counts: dict[str, int]) -> str:
    """`3 H200 + 4 H100`."""
    return " + ".join(f"{count} {name}" for name, count in counts.items()) or "what is owned"


def in_words(counts: dict[str, int]) -> str:
    """`3 H200 + 4 H100 nodes`: H200 alone is also the name of one accelerator."""
    return f"{named(counts)} node{'' if sum(counts.values()) == 1 else 's'}" if counts else named(counts)
