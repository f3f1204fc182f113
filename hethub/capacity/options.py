"""Clusters that answer a capacity question: what each takes in time, money and energy, and which are on the frontier."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A cluster that cannot train the model, with the reason."""

    nodes: dict[str, int]
    why: str


def steps_of(available: int) -> list[int]:
    """The counts of a node type that are looked at: powers of two and their halves between, and all of them."""
    counts = {available}
    power = 1
    while power <= available:
        counts |= {power, min(available, power * 3 // 2)}
        power *= 2
    return sorted(counts - {0})


def candidates(catalogue: CatalogueSpec, have: ClusterSpec | None) -> list[dict[str, int]]:
    """Counts to try: what is owned, each type alone, then pairs of types, the smallest first."""
    found: list[dict[str, int]] = [{}] if have else []
    found += [{node.name: count} for node in catalogue.nodes for count in steps_of(node.count)]
    pairs = [
        {a.name: m, b.name: n}
        for a, b in combinations(catalogue.nodes, 2)
        for m in steps_of(a.count)[::2]
        for n in steps_of(b.count)[::2]
    ]
    return found + sorted(pairs, key=lambda counts: sum(counts.values()))


def option_of(question: Question, counts: dict[str, int], prediction: Prediction) -> Option:
    """What the counts take. Raises BadInput where failures leave no time to train."""
    catalogue = question.catalogue
    cluster, assumptions = cluster_of(catalogue, counts, question.have), catalogue.assumptions
    num_nodes = sum(node.count for node in cluster.nodes)
    goodput = prediction.tokens_per_second * assumptions.efficiency(num_nodes)
    if goodput <= 0:
        raise BadInput(
            f"{num_nodes} nodes with an MTBF of {assumptions.node_mtbf_hours:g} hours each fail faster than they train; "
            "correct the catalogue's assumptions, or take fewer nodes."
        )
    days = question.tokens / goodput / SECONDS_PER_DAY
    prices = {node.name: node.price_per_hour for node in catalogue.nodes}
    hourly = [(count, prices[name]) for name, count in counts.items()]
    known = all(price is not None for _, price in hourly)
    a_day = sum(count * (price or 0.0) for count, price in hourly) * 24.0 if known else None
    low, high = (days * seconds / prediction.step_seconds for seconds in prediction.step_seconds_interval)
    watts = assumptions.watts(cluster, prediction.breakdown["compute"] / prediction.step_seconds)
    return Option(
        nodes=counts,
        accelerators=cluster.size,
        tokens_per_second=prediction.tokens_per_second,
        goodput_tokens_per_second=goodput,
        days=days,
        days_interval=(low, high),
        cost=None if a_day is None else a_day * days,
        energy_kwh=None if watts is None else watts / 1e3 * days * 24.0,
        meets=_meets(question, low, high, a_day),
    )


def _meets(question: Question, low: float, high: float, a_day: float | None) -> Meets:
    """Whether days from `low` to `high`, at a price a day, are within deadline and budget."""
    most = or_infinite(question.deadline_days)
    if question.budget is not None:
        most = min(most, -1.0 if a_day is None else question.budget / a_day if a_day else float("inf"))
    return "likely" if high <= most else "maybe" if low <= most else "no"


def mark_frontier(options: Sequence[Option]) -> list[Option]:
    """The options with `on_frontier` set where no other is at least as fast and as cheap, and better in one.

    Without prices the number of accelerators stands for them.
    """
    priced = any(option.cost is not None for option in options)

    def price(option: Option) -> float:
        return or_infinite(option.cost) if priced else option.accelerators

    def beaten(option: Option) -> bool:
        mine = (option.days, price(option))
        others = [(other.days, price(other)) for other in options if other is not option]
        return any(days <= mine[0] and cost <= mine[1] and (days, cost) != mine for days, cost in others)

    return [Option(**{**asdict(option), "on_frontier": not beaten(option)}) for option in options]


def best(options: Iterable[Option]) -> Option | None:
    """The first option that meets what was asked, likely or maybe, of options as `size` orders them."""
    return next((option for option in options if option.meets != "no"), None)


def or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value
