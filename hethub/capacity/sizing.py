"""Which cluster trains so many tokens by a date or for a budget.

Pure functions over an `Evaluator`, which answers what a cluster's best plan delivers: the caller has the planner, this
room has the arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise, product
from typing import Any

from hethub.capacity.catalogue import cluster_of
from hethub.capacity.options import (
    LeftOut,
    Meets,
    Option,
    Question,
    mark_frontier,
    named,
    option_of,
    rank,
    spread_of,
    taken,
)
from hethub.predictor.predict import Prediction
from hethub.spec.cluster import ClusterSpec, NodeSpec
from hethub.spec.errors import BadInput

Evaluator = Callable[[ClusterSpec], Prediction]  # raises BadInput where no plan fits that cluster
Progress = Callable[[int, int, str], None]  # done, total, what is next

MIXTURES = 4  # of two node types, planned at most: those that would be the best answers if their plans were good
LEAST = 1e-9  # tokens/s that a cluster is taken to do where it does nothing
EVERY_COUNT = 32  # up to so many nodes of a type every count of it is thought of in mixtures; beyond, steps


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The answer: options in order of preference, clusters that are none, and what was not looked at."""

    options: tuple[Option, ...]
    left_out: tuple[LeftOut, ...]
    not_looked_at: int  # mixtures of two node types
    # Of these, if every node did what it does where its type alone does best; at least, beyond `EVERY_COUNT` of a type.
    might_be_better: int

    @property
    def node_types(self) -> set[str]:
        """Those that an option takes."""
        return {name for option in self.options for name in option.nodes}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def size(
    question: Question, evaluate: Evaluator, *, mixtures: int = MIXTURES, progress: Progress | None = None
) -> Sizing:
    """All options looked at, those that likely meet deadline and budget first, then those that may, each in the order
    of `rank`; the frontier is marked. Raises BadInput where no cluster can train the model."""
    search = _Search(question, evaluate, mixtures, progress)
    if question.have is not None:
        search.look({})
    for node in search.nodes:
        search.look_at_one_type(node)
    for node in search.nodes:
        search.narrow(node.name)
    search.look_at_types_that_fit_in_mixtures_only()
    unknown = search.look_at_mixtures()
    if not search.options:
        left_out = search.left_out
        if len(left_out) > 1 and len({cluster.why for cluster in left_out}) == 1:  # it is no cluster's
            raise BadInput(left_out[0].why)
        largest = max(left_out, key=lambda cluster: sum(cluster.nodes.values()))
        raise BadInput(
            f"no cluster of the {len(left_out)} looked at can train this; the largest, {named(largest.nodes)}: {largest.why}"
        )
    pairs = sum(len(counts) == 2 for counts in search.seen)
    return Sizing(
        options=tuple(sorted(mark_frontier(search.options), key=lambda o: rank(question, o, o.accelerators))),
        left_out=tuple(search.left_out),
        not_looked_at=sum(a.count * b.count for a, b in combinations(search.nodes, 2)) - pairs,
        might_be_better=unknown,
    )


class _Search:
    """What was looked at, and what it says of other clusters: no plan exceeds its ceiling, which adds up over nodes."""

    def __init__(self, question: Question, evaluate: Evaluator, mixtures: int, progress: Progress | None) -> None:
        self.question, self.evaluate, self.mixtures, self.progress = question, evaluate, mixtures, progress
        self.options: list[Option] = []
        self.left_out: list[LeftOut] = []
        self.seen: list[dict[str, int]] = []
        self.ceilings: dict[str, float] = {}  # tokens/s by node type, of one node
        self.speeds: dict[str, float] = {}  # the same, of one node where a type alone does best
        self.owned_ceiling = self.owned_speed = 0.0
        self.spread = (1.0, float("inf"))  # the ends of the 80 % interval, the smallest seen
        self.nodes: list[NodeSpec] = []
        for node in question.catalogue.nodes:
            if question.budget is not None and node.price_per_hour is None:
                why = "it has no price_per_hour, so that nobody can say whether it is within a budget"
                self.left_out.append(LeftOut(nodes={node.name: node.count}, why=why))
            else:
                self.nodes.append(node)

    def look(self, counts: dict[str, int]) -> Option | None:
        """The option of the counts; None where it is left out."""
        if self.progress is not None:
            name = named(counts)
            expected = sum(len(_doublings(node.count)) for node in self.nodes) + self.mixtures
            self.progress(len(self.seen), max(expected, len(self.seen) + 1), name)
        self.seen.append(counts)
        try:
            prediction = self.evaluate(cluster_of(self.question.catalogue, counts, self.question.have))
            option = option_of(self.question, counts, prediction)
        except BadInput as error:
            self.left_out.append(LeftOut(nodes=counts, why=str(error)))
            return None
        self.options.append(option)
        self._learn(counts, prediction)
        return option

    def _learn(self, counts: dict[str, int], prediction: Prediction) -> None:
        """What a node of each type does at its ceiling and at best, and how wide the interval is."""
        ceiling, speed = prediction.ceiling_tokens_per_second, prediction.tokens_per_second
        low, high = spread_of(prediction)
        self.spread = min(self.spread[0], low), min(self.spread[1], high)
        if not counts:
            self.owned_ceiling, self.owned_speed = ceiling, speed
        for known, total, owned in (
            (self.ceilings, ceiling, self.owned_ceiling),
            (self.speeds, speed, self.owned_speed),
        ):
            new = [name for name in counts if len(counts) == 1 or name not in known]
            rest = total - owned - sum(count * known[name] for name, count in counts.items() if name not in new)
            for name in new:
                known[name] = max(known.get(name, 0.0), rest / sum(counts[each] for each in new))

    def look_at_one_type(self, node: NodeSpec) -> None:
        """1, 2, 4, 8 … nodes, as long as more are faster and a deadline is not met."""
        fastest = 0.0
        for count in _doublings(node.count):
            if count < node.count and self._too_slow({node.name: count}):
                continue
            option = self.look({node.name: count})
            if option is None and not fastest:
                continue
            if option is None or option.goodput_tokens_per_second <= fastest:
                break
            fastest = option.goodput_tokens_per_second
            if self.question.deadline_days is not None and option.meets == "likely":
                break

    def narrow(self, name: str) -> None:
        """Between two counts of a type of which one meets what was asked and the other does not, looks at those between
        by halves; where no option is likely to, one that may counts. Where none is within a budget, so for the fewest that
        can train, which cost least."""
        own = self._options_of(name)
        if own and self.question.budget is not None and all(option.meets == "no" for option in own):
            self._halve(name, ("likely", "maybe", "no"))
        wanted: tuple[Meets, ...] = ("likely",)
        if not any(option.meets == "likely" for option in self.options):
            wanted = ("likely", "maybe")
        self._halve(name, wanted)

    def _options_of(self, name: str) -> list[Option]:
        """Those of a type alone."""
        return [option for option in self.options if set(option.nodes) == {name}]

    def _halve(self, name: str, wanted: Sequence[Meets]) -> None:
        """Looks for the counts of a type at which options that meet what was asked as is `wanted` begin and end."""
        met = {0: False} | {counts[name]: False for counts in self.seen if set(counts) == {name}}
        met |= {option.nodes[name]: option.meets in wanted for option in self._options_of(name)}
        for (low, begins), (high, ends) in pairwise(sorted(met.items())):
            while begins != ends and high - low > 1:
                middle = (low + high) // 2
                option = None if self._too_slow({name: middle}) else self.look({name: middle})
                if (option is not None and option.meets in wanted) == begins:
                    low = middle
                else:
                    high = middle

    def look_at_types_that_fit_in_mixtures_only(self) -> None:
        """All nodes of a type that cannot train the model alone, with all of another."""
        for one, other in combinations(self.nodes, 2):
            if one.name not in self.ceilings or other.name not in self.ceilings:
                self.look({one.name: one.count, other.name: other.count})

    def look_at_mixtures(self) -> int:
        """Mixtures of two types that would be a better answer if every node did what it does where its type alone does
        best, that first which would be the best where they reach the part of it that mixtures of these types have
        reached; how many are left."""
        pairs = self._pairs() if self.options else []
        reached: dict[frozenset[str], float] = {}
        for looked_at in range(self.mixtures + 1):
            best = min(rank(self.question, option, option.accelerators) for option in self.options) if pairs else ()
            pairs = [counts for counts in pairs if self._hoped(counts, 1.0)[:3] < best[:3]]
            if not pairs or looked_at == self.mixtures:
                break
            ranked = [(self._hoped(counts, reached.get(frozenset(counts), 1.0)), i) for i, counts in enumerate(pairs)]
            counts = pairs.pop(min(ranked)[1])
            option, types = self.look(counts), frozenset(counts)
            part = 0.0 if option is None else option.goodput_tokens_per_second / self._goodput(counts, *self._alone)
            reached[types] = max(part, reached.get(types, 0.0))
        return len(pairs)

    def _pairs(self) -> list[dict[str, int]]:
        known = [node for node in self.nodes if node.name in self.ceilings]
        pairs = [
            {one.name: m, other.name: n}
            for one, other in combinations(known, 2)
            for m, n in product(_counts(one.count), _counts(other.count))
        ]
        return [counts for counts in pairs if counts not in self.seen]

    def _hoped(self, counts: dict[str, int], reached: float) -> tuple[float, ...]:
        """The rank of counts whose nodes reach this part of what they do where their type alone does best."""
        have = self.question.have
        each = {node.name: node.accelerators for node in self.nodes}
        accelerators = sum(count * each[name] for name, count in counts.items()) + (have.size if have else 0)
        goodput = max(reached * self._goodput(counts, *self._alone), LEAST)
        return rank(self.question, taken(self.question, counts, goodput, self.spread), accelerators)

    @property
    def _alone(self) -> tuple[dict[str, float], float]:
        return self.speeds, self.owned_speed

    def _too_slow(self, counts: dict[str, int]) -> bool:
        """Whether no plan for the counts can meet the deadline."""
        if self.question.deadline_days is None or not {*counts} <= {*self.ceilings}:
            return False
        goodput = self._goodput(counts, self.ceilings, self.owned_ceiling)
        return taken(self.question, counts, goodput, self.spread).meets == "no"

    def _goodput(self, counts: dict[str, int], of_node: dict[str, float], of_owned: float) -> float:
        """Where each node has its own tokens/s."""
        num_owned = len(self.question.have.machines) if self.question.have else 0
        efficiency = self.question.catalogue.assumptions.efficiency(num_owned + sum(counts.values()))
        speed = of_owned + sum(count * of_node[name] for name, count in counts.items())
        return max(speed * efficiency, LEAST)


def _doublings(available: int) -> list[int]:
    """1, 2, 4, 8 … and all."""
    return [1 << power for power in range((available - 1).bit_length())] + [available]


def _counts(available: int) -> list[int]:
    """Every count of a type, or of many powers of two with their halves between, and all."""
    if available <= EVERY_COUNT:
        return list(range(1, available + 1))
    return sorted({count for power in _doublings(available) for count in (power, min(available, power * 3 // 2))})
