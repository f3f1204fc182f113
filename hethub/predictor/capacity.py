"""Capacity questions: which cluster trains so many tokens by a date or for a budget, and which node to add next.

Pure functions over a `judge`, which answers what a cluster's best plan delivers: the caller has the planner, this
module has the arithmetic. Nodes owned cost nothing; prices come from the user's catalogue and are never invented.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from hethub.predictor.prediction import Prediction
from hethub.spec.accelerator import Positive
from hethub.spec.base import Spec, load
from hethub.spec.cluster import ClusterSpec, LinksSpec, NodeSpec, NonNegative
from hethub.spec.errors import BadInput

SECONDS_PER_DAY = 86400.0
Judge = Callable[[ClusterSpec], Prediction | None]  # None: no plan fits that cluster


class CatalogueSpec(Spec):
    """Node types that can be had: `count` of each is how many there are, prices per node and hour in one currency."""

    currency: str | None = None
    date: str | None = None  # of the prices
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    links: LinksSpec = LinksSpec()

    @model_validator(mode="after")
    def _prices_have_a_currency(self) -> "CatalogueSpec":
        priced = [node.name for node in self.nodes if node.price_per_hour is not None]
        if priced and not (self.currency and self.date):
            raise ValueError(
                f"node '{priced[0]}' has a price_per_hour; say its currency and the date of the prices too."
            )
        return self


def load_catalogue(path: str | Path) -> CatalogueSpec:
    """The catalogue in a YAML file. Raises BadInput."""
    return load(CatalogueSpec, path, "catalogue")


class Assumptions(Spec):
    """What goodput and energy rest on; printed with every answer, for none of it is measured."""

    node_mtbf_hours: Positive = 20000.0  # mean time between failures of one node
    checkpoint_seconds: NonNegative = 30.0
    restart_seconds: NonNegative = 600.0
    idle_power_fraction: float = Field(default=0.35, ge=0, le=1)  # of rated power, drawn while waiting
    node_overhead_power_fraction: NonNegative = 0.25  # hosts, network and cooling on top of the accelerators

    def efficiency(self, num_nodes: int) -> float:
        """The part of the time that trains: checkpoints at Young's interval, lost work and restarts (Young 1974)."""
        mtbf = self.node_mtbf_hours * 3600.0 / num_nodes
        every = sqrt(2.0 * max(self.checkpoint_seconds, 1e-3) * mtbf)
        lost = self.checkpoint_seconds / every + (every / 2.0 + self.restart_seconds) / mtbf
        return max(0.0, 1.0 - lost)

    def watts(self, cluster: ClusterSpec, busy_fraction: float) -> float | None:
        """Mean power of a cluster; None where an accelerator's rated power is unknown."""
        rated = [node.device.tdp_watts for node in cluster.nodes]
        if None in rated:
            return None
        total = sum(
            node.count * node.accelerators * (watts or 0.0) for node, watts in zip(cluster.nodes, rated, strict=True)
        )
        used = self.idle_power_fraction + (1.0 - self.idle_power_fraction) * busy_fraction
        return total * used * (1.0 + self.node_overhead_power_fraction)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One cluster and what it takes: time, money, energy. Costs are None where a price is missing."""

    nodes: dict[str, int]
    accelerators: int
    tokens_per_second: float
    goodput_tokens_per_second: float
    days: float
    cost: float | None
    energy_kwh: float | None
    meets: bool
    on_frontier: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One more node of a type: what it brings per hour and per price."""

    node: str
    tokens_per_second: float
    gained_tokens_per_second: float
    gained_per_price: float | None


def cluster_of(catalogue: CatalogueSpec, counts: dict[str, int], have: ClusterSpec | None) -> ClusterSpec:
    """The owned nodes and `counts` of the catalogue's, as one cluster."""
    owned = list(have.nodes) if have else []
    taken = {node.name for node in owned}
    rented = [
        node.replace(count=counts[node.name], name=f"{node.name} (rented)" if node.name in taken else node.name)
        for node in catalogue.nodes
        if counts.get(node.name)
    ]
    name = have.name if have and not rented else "capacity"
    return ClusterSpec(name=name, nodes=tuple(owned + rented), links=have.links if have else catalogue.links)


def steps_of(available: int) -> list[int]:
    """The counts of a node type that are looked at: powers of two and their halves between, and all of them."""
    counts = {available}
    power = 1
    while power <= available:
        counts |= {power, min(available, power * 3 // 2)}
        power *= 2
    return sorted(counts - {0})


def candidates(catalogue: CatalogueSpec, have: ClusterSpec | None, limit: int) -> list[dict[str, int]]:
    """Counts to try: each type alone, then pairs of types; the cheapest first where prices are known, `limit` at most."""
    found: list[dict[str, int]] = [{}] if have else []
    found += [{node.name: count} for node in catalogue.nodes for count in steps_of(node.count)]
    for index, a in enumerate(catalogue.nodes):
        for b in catalogue.nodes[index + 1 :]:
            found += [{a.name: m, b.name: n} for m in steps_of(a.count)[::2] for n in steps_of(b.count)[::2]]
    singles = [counts for counts in found if len(counts) < 2]
    pairs = sorted((counts for counts in found if len(counts) == 2), key=lambda counts: sum(counts.values()))
    return (singles + pairs)[:limit]


def size(
    catalogue: CatalogueSpec,
    judge: Judge,
    tokens: float,
    *,
    have: ClusterSpec | None = None,
    deadline_days: float | None = None,
    budget: float | None = None,
    assumptions: Assumptions | None = None,
    limit: int = 60,
) -> list[Option]:
    """All options looked at, those that meet deadline and budget first, cheapest then smallest; the frontier is marked.

    An option is on the frontier if none is both faster and cheaper.
    """
    assumptions = assumptions or Assumptions()
    options = []
    for counts in candidates(catalogue, have, limit):
        cluster = cluster_of(catalogue, counts, have)
        prediction = judge(cluster)
        if prediction is not None:
            options.append(_option(catalogue, counts, cluster, prediction, tokens, deadline_days, budget, assumptions))
    return sorted(mark_frontier(options), key=lambda o: (not o.meets, _or_infinite(o.cost), o.accelerators, o.days))


def _option(
    catalogue: CatalogueSpec,
    counts: dict[str, int],
    cluster: ClusterSpec,
    prediction: Prediction,
    tokens: float,
    deadline_days: float | None,
    budget: float | None,
    assumptions: Assumptions,
) -> Option:
    num_nodes = sum(node.count for node in cluster.nodes)
    goodput = prediction.tokens_per_second * assumptions.efficiency(num_nodes)
    days = tokens / goodput / SECONDS_PER_DAY if goodput > 0 else float("inf")
    prices = {node.name: node.price_per_hour for node in catalogue.nodes}
    hourly = [(count, prices[name]) for name, count in counts.items()]
    known = all(price is not None for _, price in hourly)
    cost = sum(count * (price or 0.0) for count, price in hourly) * days * 24.0 if known else None
    watts = assumptions.watts(cluster, prediction.breakdown["compute"] / prediction.step_seconds)
    within_budget = budget is None or (cost is not None and cost <= budget)
    return Option(
        nodes=counts,
        accelerators=cluster.size,
        tokens_per_second=prediction.tokens_per_second,
        goodput_tokens_per_second=goodput,
        days=days,
        cost=cost,
        energy_kwh=None if watts is None else watts / 1e3 * days * 24.0,
        meets=(deadline_days is None or days <= deadline_days) and within_budget,
    )


def mark_frontier(options: Sequence[Option]) -> list[Option]:
    """The options with `on_frontier` set where no other is at least as fast and as cheap, and better in one.

    Without prices the number of accelerators stands for them.
    """
    priced = any(option.cost is not None for option in options)

    def price(option: Option) -> float:
        return _or_infinite(option.cost) if priced else option.accelerators

    def beaten(option: Option) -> bool:
        mine = (option.days, price(option))
        others = [(other.days, price(other)) for other in options if other is not option]
        return any(days <= mine[0] and cost <= mine[1] and (days, cost) != mine for days, cost in others)

    return [Option(**{**asdict(option), "on_frontier": not beaten(option)}) for option in options]


def rank_additions(catalogue: CatalogueSpec, judge: Judge, have: ClusterSpec) -> list[Addition]:
    """Every node type added once to what is owned, best tokens/s per price first (per node where there is no price).

    Raises BadInput where nothing fits the owned nodes themselves.
    """
    now = judge(have)
    if now is None:
        raise BadInput(f"no plan fits cluster '{have.name}' as it is; ask for a size instead of an addition.")
    found = []
    for node in catalogue.nodes:
        after = judge(cluster_of(catalogue, {node.name: 1}, have))
        if after is not None:
            gained = after.tokens_per_second - now.tokens_per_second
            per_price = gained / node.price_per_hour if node.price_per_hour else None
            rate = after.tokens_per_second
            found.append(
                Addition(
                    node=node.name, tokens_per_second=rate, gained_tokens_per_second=gained, gained_per_price=per_price
                )
            )
    return sorted(found, key=lambda a: (-(a.gained_per_price or float("-inf")), -a.gained_tokens_per_second))


def best(options: Iterable[Option]) -> Option | None:
    """The first option that meets what was asked, of options as `size` orders them."""
    return next((option for option in options if option.meets), None)


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value
