"""Capacity questions: which cluster trains so many tokens by a date or for a budget, and which node to add next.

Pure functions over a `judge`, which answers what a cluster's best plan delivers: the caller has the planner, this
module has the arithmetic. Nodes owned cost nothing; prices come from the user's catalogue and are never invented.
"""

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from hethub.predictor.predict import Prediction
from hethub.spec.base import Spec, load
from hethub.spec.cluster import ClusterSpec, LinksSpec, NodeSpec
from hethub.spec.errors import BadInput

SECONDS_PER_DAY = 86400.0
Judge = Callable[[ClusterSpec], Prediction]  # raises BadInput where no plan fits that cluster
Progress = Callable[[int, int, str], None]  # done, total, what is next


class Assumptions(Spec):
    """What goodput and energy rest on; printed with every answer, for none of it is measured.

    A catalogue states its own under the same names.
    """

    node_mtbf_hours: Annotated[float, Field(ge=1e-3, le=1e12)] = 20000.0  # mean time between failures of one node
    checkpoint_seconds: Annotated[float, Field(ge=0, le=1e9)] = 30.0
    restart_seconds: Annotated[float, Field(ge=0, le=1e9)] = 600.0
    idle_power_fraction: float = Field(default=0.35, ge=0, le=1)  # of rated power, drawn while waiting
    node_overhead_power_fraction: Annotated[float, Field(ge=0, le=100)] = (
        0.25  # hosts, network and cooling on top of the accelerators
    )

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


class CatalogueSpec(Spec):
    """Node types that can be had: `count` of each is how many there are, prices per node and hour in one currency."""

    currency: str | None = None
    date: str | datetime.date | None = None  # of the prices
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    links: LinksSpec = LinksSpec()
    assumptions: Assumptions = Assumptions()

    @model_validator(mode="after")
    def _prices_have_a_currency(self) -> "CatalogueSpec":
        priced = [node.name for node in self.nodes if node.price_per_hour is not None]
        if priced and not (self.currency and self.date):
            raise ValueError(
                f"node '{priced[0]}' has a price_per_hour; say its currency and the date of the prices too."
            )
        names = [node.name for node in self.nodes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two node types are named '{twice}'; give each its own name.")
        return self


def load_catalogue(path: str | Path) -> CatalogueSpec:
    """The catalogue in a YAML file. Raises BadInput."""
    return load(CatalogueSpec, path, "catalogue")


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


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained by when or for how much, with what at hand."""

    catalogue: CatalogueSpec
    tokens: float
    have: ClusterSpec | None = None
    deadline_days: float | None = None
    budget: float | None = None


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A cluster that cannot train the model, with the reason."""

    nodes: dict[str, int]
    why: str


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The answer: options in order of preference, clusters that are none, and how many mixtures were not looked at."""

    options: tuple[Option, ...]
    left_out: tuple[LeftOut, ...]
    not_looked_at: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def size(question: Question, judge: Judge, *, limit: int = 60, progress: Progress | None = None) -> Sizing:
    """All options looked at, those that meet deadline and budget first, cheapest then smallest; the frontier is marked.

    Where a deadline is first met between two counts of a type, the counts between are looked at too. Raises BadInput
    where no cluster can train the model.
    """
    wanted = candidates(question.catalogue, question.have)
    looked_at: list[Option] = []
    left_out: list[LeftOut] = []

    def look(counts: dict[str, int]) -> Option | None:
        if progress is not None:
            name = " + ".join(f"{count} {node}" for node, count in counts.items()) or "what is owned"
            progress(len(looked_at) + len(left_out), min(limit, len(wanted)), name)
        try:
            option = _option(question, counts, judge(cluster_of(question.catalogue, counts, question.have)))
        except BadInput as error:
            left_out.append(LeftOut(nodes=counts, why=str(error)))
            return None
        looked_at.append(option)
        return option

    for counts in wanted[:limit]:
        look(counts)
    if question.deadline_days is not None:
        for node in question.catalogue.nodes:
            _narrow(node.name, looked_at, look)
    if not looked_at:
        raise BadInput(f"no cluster of the {len(left_out)} looked at can train this; the first: {left_out[0].why}")
    ordered = sorted(
        mark_frontier(looked_at), key=lambda o: (not o.meets, _or_infinite(o.cost), o.accelerators, o.days)
    )
    return Sizing(options=tuple(ordered), left_out=tuple(left_out), not_looked_at=max(0, len(wanted) - limit))


def _narrow(name: str, options: Sequence[Option], look: Callable[[dict[str, int]], Option | None]) -> None:
    """Looks at counts of one type between the largest that is too few and the smallest that is enough."""
    known = {option.nodes[name]: option.meets for option in options if set(option.nodes) == {name}}
    enough = min((count for count, meets in known.items() if meets), default=0)
    few = max((count for count, meets in known.items() if not meets and count < enough), default=enough)
    while enough - few > 1:
        middle = (few + enough) // 2
        option = look({name: middle})
        if option is not None and option.meets:
            enough = middle
        else:
            few = middle


def _option(question: Question, counts: dict[str, int], prediction: Prediction) -> Option:
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
    cost = sum(count * (price or 0.0) for count, price in hourly) * days * 24.0 if known else None
    watts = assumptions.watts(cluster, prediction.breakdown["compute"] / prediction.step_seconds)
    in_time = question.deadline_days is None or days <= question.deadline_days
    return Option(
        nodes=counts,
        accelerators=cluster.size,
        tokens_per_second=prediction.tokens_per_second,
        goodput_tokens_per_second=goodput,
        days=days,
        cost=cost,
        energy_kwh=None if watts is None else watts / 1e3 * days * 24.0,
        meets=in_time and (question.budget is None or (cost is not None and cost <= question.budget)),
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


def rank_additions(
    catalogue: CatalogueSpec, judge: Judge, have: ClusterSpec, progress: Progress | None = None
) -> tuple[list[Addition], list[LeftOut]]:
    """Every node type added once to what is owned, best tokens/s per price first (per node where there is no price),
    and those that cannot be added. Raises BadInput where nothing fits the owned nodes themselves."""
    try:
        now = judge(have)
    except BadInput as error:
        raise BadInput(f"cluster '{have.name}' as it is: {error} Or ask for a size instead of an addition.") from None
    found, left_out = [], []
    for index, node in enumerate(catalogue.nodes):
        if progress is not None:
            progress(index, len(catalogue.nodes), f"one {node.name} more")
        try:
            rate = judge(cluster_of(catalogue, {node.name: 1}, have)).tokens_per_second
        except BadInput as error:
            left_out.append(LeftOut(nodes={node.name: 1}, why=str(error)))
            continue
        gained = rate - now.tokens_per_second
        per_price = gained / node.price_per_hour if node.price_per_hour else None
        found.append(
            Addition(
                node=node.name, tokens_per_second=rate, gained_tokens_per_second=gained, gained_per_price=per_price
            )
        )
    ranked = sorted(
        found, key=lambda a: (a.gained_per_price is None, -(a.gained_per_price or 0.0), -a.gained_tokens_per_second)
    )
    return ranked, left_out


def best(options: Iterable[Option]) -> Option | None:
    """The first option that meets what was asked, of options as `size` orders them."""
    return next((option for option in options if option.meets), None)


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value
