"""Which cluster trains so many tokens by a date or for a budget.

Pure functions over an `Evaluator`, which answers what a cluster's best plan delivers: the caller has the planner, this
room has the arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from hethub.capacity.catalogue import cluster_of
from hethub.capacity.options import LeftOut, Option, Question, candidates, mark_frontier, option_of, or_infinite
from hethub.predictor.predict import Prediction
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput

Evaluator = Callable[[ClusterSpec], Prediction]  # raises BadInput where no plan fits that cluster
Progress = Callable[[int, int, str], None]  # done, total, what is next


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The answer: options in order of preference, clusters that are none, and what was not looked at."""

    options: tuple[Option, ...]
    left_out: tuple[LeftOut, ...]
    not_looked_at: int  # mixtures of two node types
    skipped_counts: dict[str, list[int]]  # by node type, of those that can be had: it alone was not looked at

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def size(question: Question, evaluate: Evaluator, *, limit: int = 60, progress: Progress | None = None) -> Sizing:
    """All options looked at, those that likely meet deadline and budget first, then those that may, cheapest then
    smallest; the frontier is marked.

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
            option = option_of(question, counts, evaluate(cluster_of(question.catalogue, counts, question.have)))
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
    order = ("likely", "maybe", "no")
    ordered = sorted(
        mark_frontier(looked_at), key=lambda o: (order.index(o.meets), or_infinite(o.cost), o.accelerators, o.days)
    )
    seen = [option.nodes for option in looked_at] + [cluster.nodes for cluster in left_out]
    skipped = {
        node.name: [count for count in range(1, node.count + 1) if {node.name: count} not in seen]
        for node in question.catalogue.nodes
    }
    return Sizing(
        options=tuple(ordered),
        left_out=tuple(left_out),
        not_looked_at=_num_mixtures(question) - sum(len(nodes) == 2 for nodes in seen),
        skipped_counts={name: counts for name, counts in skipped.items() if counts},
    )


def _num_mixtures(question: Question) -> int:
    """How many mixtures of two node types there are."""
    return sum(a.count * b.count for a, b in combinations(question.catalogue.nodes, 2))


def _narrow(name: str, options: Sequence[Option], look: Callable[[dict[str, int]], Option | None]) -> None:
    """Looks at counts of one type between the largest that is too few and the smallest that is likely enough, or where
    none is, may be."""
    known = {option.nodes[name]: option.meets for option in options if set(option.nodes) == {name}}
    wanted = ("likely",) if "likely" in known.values() else ("likely", "maybe")
    enough = min((count for count, meets in known.items() if meets in wanted), default=0)
    few = max((count for count, meets in known.items() if meets not in wanted and count < enough), default=enough)
    while enough - few > 1:
        middle = (few + enough) // 2
        option = look({name: middle})
        if option is not None and option.meets in wanted:
            enough = middle
        else:
            few = middle
