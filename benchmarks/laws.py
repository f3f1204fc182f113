"""Laws that the planner's answers keep whatever the predictor says, over random clusters.

python benchmarks/laws.py [--first SEED] [--clusters N]

- No constraint makes the mean over the scenarios (J) smaller: every key of `constraints` but `reserve` and
  `time_limit_seconds`, one at a time. Where the constrained question has no plan, nothing is smaller.
- More memory, faster links, faster accelerators and more host memory make J no larger.
- Nor do more accelerators, which may stay unused: each node is taken out, and the plan for the others looked at in the
  whole cluster, over its scenarios.

A case that breaks a law by more than 0.1 % has a line; each law's cases, broken ones and worst are counted. Exits with 1
where one is broken. The clusters have three to six unlike accelerators, every third with so little memory that state has
to be sharded, moved or computed again.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hethub.commands.common import processors  # noqa: E402
from hethub.planner import plan  # noqa: E402
from hethub.planner.evaluate.outlook import Outlooks  # noqa: E402
from hethub.planner.problem.pose import pose  # noqa: E402
from hethub.planner.problem.problem import Batch  # noqa: E402
from hethub.planner.problem.scaled import Scale, scaled  # noqa: E402
from hethub.predictor import predict  # noqa: E402
from hethub.spec.cluster import ClusterSpec, NodeSpec  # noqa: E402
from hethub.spec.errors import BadInput  # noqa: E402
from hethub.spec.job import ConstraintsSpec  # noqa: E402
from hethub.spec.layout.bind import bind  # noqa: E402
from hethub.spec.plan import PlanSpec, ScheduleName  # noqa: E402
from tests.oracle.question import Question, random_question  # noqa: E402

SAME = 1e-3  # J that differs by less is equal
TIGHT = 3  # every so many clusters have a tight memory
HOST_GB = 32.0


class Case(NamedTuple):
    """What J was, without and with what a law is about; infinite where no plan fits."""

    law: str
    what: str
    seed: int
    larger: float  # should not be below `smaller`
    smaller: float

    @property
    def broken(self) -> float:
        """By which part the law is broken."""
        return self.smaller / self.larger - 1 if self.larger < float("inf") else 0.0


def question(seed: int) -> Question:
    """A random cluster of three to six accelerators."""
    size = random.Random(seed).choice((3, 4, 5, 6))
    own = random_question(seed, size, 2 * size)
    hosts = own.cluster.replace(nodes=tuple(node.replace(host_memory_gb=HOST_GB) for node in own.cluster.nodes))
    memory = 0.25 if seed % TIGHT == 0 else 1.0
    return Question(own.model, scaled(hosts, Scale(memory=memory)), own.global_batch, own.seq_len, own.precision)


def objective(asked: Question, cluster: ClusterSpec | None = None, **constraints: Any) -> float:
    """J of the answer; infinite where no plan fits."""
    batch = Batch(asked.global_batch, asked.seq_len, asked.precision)
    try:
        given = ConstraintsSpec(**constraints)
        found = plan(asked.model, cluster or asked.cluster, batch, given, with_bounds=False, top=0)
    except BadInput:
        return float("inf")
    return found.outlook.objective_seconds


def constraints(asked: Question) -> Iterator[dict[str, Any]]:
    """Every key with some values."""
    for key, values in (
        ("tp", (1, 2)), ("pp", (1, 2, 3)), ("dp", (1, 2)), ("micro_batch", (1, 2)), ("max_micro_batch", (1, 2)),
        ("schedule", get_args(ScheduleName)), ("recompute", ("none", "selective", "full")), ("zero", (0, 1, 2, 3)),
        ("keep_global_batch", (True,)), ("seed", (1,)),
    ):  # fmt: skip
        yield from ({key: value} for value in values)
    names = sorted({node.device.name for node in asked.cluster.nodes})
    yield {"forbid": ((names[0], names[-1]),)}


def better(cluster: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    """The cluster with more of something."""
    fastest = cluster.nodes[0].device.name
    yield "memory x 1.5", scaled(cluster, Scale(memory=1.5))
    yield "links x 2", scaled(cluster, Scale(in_node=2.0, network=2.0, bridge=2.0))
    yield "one accelerator x 1.5", scaled(cluster, Scale(compute={fastest: 1.5}))
    more = [node.replace(host_memory_gb=2 * HOST_GB) for node in cluster.nodes]
    yield "host memory x 2", cluster.replace(nodes=tuple(more))


def without(asked: Question, node: NodeSpec) -> float:
    """J of the plan for all other nodes, in the whole cluster; infinite where it fits there no more, beside communicators
    that one accelerator alone has none of."""
    cluster, batch = asked.cluster, Batch(asked.global_batch, asked.seq_len, asked.precision)
    others = cluster.replace(nodes=tuple(other for other in cluster.nodes if other is not node))
    ranks = [place.rank for place in cluster.places if place.node.name != node.name]
    try:
        found = plan(asked.model, others, batch, with_bounds=False, top=0).plan
    except BadInput:
        return float("inf")
    text = found.model_dump()
    for stage in text["stages"]:
        stage["state_shares"] = {ranks[rank]: share for rank, share in stage["state_shares"].items()}
        for replica in stage["replicas"]:
            replica["ranks"] = [ranks[rank] for rank in replica["ranks"]]
    used = {rank for stage in text["stages"] for replica in stage["replicas"] for rank in replica["ranks"]}
    placed = PlanSpec.model_validate(text | {"unused": [r for r in range(cluster.size) if r not in used]})
    if not predict(bind(placed, asked.model, cluster)).fits:
        return float("inf")
    return Outlooks(pose(asked.model, cluster, batch)).of(placed).objective_seconds


def cases(seed: int) -> list[Case]:
    """All laws on one cluster."""
    asked = question(seed)
    free, constrained = objective(asked), partial(objective, asked)
    found = [
        Case("constraint", f"{key}: {value}", seed, constrained(**given), free)
        for given in constraints(asked)
        for key, value in given.items()
    ]
    found += [Case("more", what, seed, free, objective(asked, own)) for what, own in better(asked.cluster)]
    nodes = asked.cluster.nodes if len(asked.cluster.nodes) > 1 else ()
    return found + [Case("node", f"without {node.name}", seed, without(asked, node), free) for node in nodes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=5000, help="from which seed")
    parser.add_argument("--clusters", type=int, default=40)
    options = parser.parse_args()
    found: list[Case] = []
    with ProcessPoolExecutor(processors()) as pool:
        for own in pool.map(cases, range(options.first, options.first + options.clusters)):
            found += own
            for case in own:
                if case.broken > SAME:
                    print(f"seed {case.seed}, {case.what}: {100 * case.broken:.2f} %, {case.larger:.5g} s", flush=True)
            print(f"seed {own[0].seed}: {len(own)} cases", flush=True)
    for law, text in (
        ("constraint", "no constraint makes J smaller"), ("more", "more makes J no larger"),
        ("node", "more accelerators make J no larger"),
    ):  # fmt: skip
        own = [case for case in found if case.law == law]
        broken = [case for case in own if case.broken > SAME]
        worst = max(own, key=lambda case: case.broken)
        print(
            f"{text}: {len(own)} cases over {options.clusters} clusters, {len(broken)} broken; at worst by "
            f"{100 * max(0.0, worst.broken):.2f} % (seed {worst.seed}, {worst.what})"
        )
    return 1 if any(case.broken > SAME for case in found) else 0


if __name__ == "__main__":
    sys.exit(main())
