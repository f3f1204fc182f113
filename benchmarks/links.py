"""Random pipelines over slow links that they share: predicted, beside a fluid simulation of the same messages.

    python benchmarks/links.py [NUMBER] [--seed SEED]

The simulation knows nothing of the predictor's shares. Compute goes in the schedule's order; a message starts when its
microbatch is done and those before it on its connection are through, and all that are under way get max-min fair rates of the
links on their paths at every moment: how SimGrid prices flows, and what TCP comes near to. Compared is the end of all
compute, for links with less to carry than the busiest replica has to compute (load below 1), as much, and more. `without
pace` is every message as if it were alone. The predictor's rule was chosen among four on the pipelines of seed 1, and the
simulation's order of messages on one connection after a look at them: other seeds judge.
"""

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `tests` is meant

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import Network, Path, Resource
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.replay import NONE, replay
from hethub.predictor.pipeline.task_graph import Compute
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from tests.predictor.plans import LLAMA_8B, uniform

EPSILON = 1e-12


def drawn(chance: random.Random) -> Layout:
    """Two to four stages of one to four replicas on machines of one to four accelerators, some behind a rack's uplink."""
    pp, dp = chance.randint(2, 4), chance.choice((1, 2, 4))
    nodes, left = [], pp * dp
    while left:
        count = min(left, chance.choice((1, 2, 4)))
        left -= count
        nodes.append({
            "name": f"n{len(nodes)}", "accelerator": "A100-SXM4-80GB", "accelerators": count,
            "nics": chance.choice((1, count)), "gbps_per_nic": 2 ** chance.uniform(0, 6),
        })  # fmt: skip
    links = {}
    if len(nodes) > 2 and chance.random() < 0.5:
        half = len(nodes) // 2
        names = [node["name"] for node in nodes]
        links["racks"] = [
            {"name": name, "nodes": own, "gbps": 2 ** chance.uniform(1, 6)}
            for name, own in (("east", names[:half]), ("west", names[half:]))
        ]
    on = ClusterSpec.model_validate({"name": "random", "nodes": nodes, "links": links})
    model = LLAMA_8B.replace(layers=pp * chance.randint(1, 3))
    batch = dp * chance.choice((8, 16, 32))
    layout = uniform(model, on, tp=1, pp=pp, micro_batch=1, batch=batch, seq=2048)
    return bind(layout.plan.replace(schedule=chance.choice(("1f1b", "gpipe", "zero_bubble"))), model, on)


def simulated(layout: Layout, costs: PlanCosts) -> float:
    """The end of all compute in the fluid simulation."""
    unpaced = PlanCosts(layout, HETHUB, packaged())
    unpaced.pace = lambda flow: 0.0  # type: ignore[method-assign]
    compute = Compute(layout, unpaced, True)
    graph, network = compute.graph, costs.network
    leader = {run.actor: layout.replica(*place).ranks[0] for place, run in compute.runs.items()}
    actor_of = {node: actor for actor, order in enumerate(graph.orders) for node in order}
    num_bytes = layout.plan.seq_len * layout.model.hidden * 2
    sent: dict[int, list[int]] = {}  # by node, those that wait for its message
    missing = [0] * len(graph.seconds)
    for node, source in enumerate(graph.sources):
        if source != NONE:
            sent.setdefault(source, []).append(node)
            missing[node] = 1
    assert not any(graph.needs.values())
    position, running = [0] * len(graph.orders), dict[int, float]()  # running: node, when it ends
    flows: dict[int, list[float]] = {}  # by the waiting node, bytes left and when its latency is over
    paths, between = dict[int, Path](), dict[int, object]()
    now = 0.0

    def start(actor: int) -> None:
        if position[actor] < len(graph.orders[actor]):
            node = graph.orders[actor][position[actor]]
            if not missing[node] and node not in running:
                running[node] = now + graph.seconds[node]

    for actor in range(len(graph.orders)):
        start(actor)
    while running or flows:
        first: dict[object, int] = {}  # a connection sends its messages in order
        for node in flows:
            first.setdefault(between[node], node)
        active = {node: paths[node] for node in first.values() if flows[node][1] <= now + EPSILON}
        rates = fair_rates(active, network)
        moments = [*running.values(), *(begins for _, begins in flows.values() if begins > now + EPSILON)]
        moments += [now + flows[node][0] / rates[node] for node in active]
        then = min(moments)
        for node in active:
            flows[node][0] -= rates[node] * (then - now)
        now = then
        for node in [node for node in active if flows[node][0] <= 1e-6 * num_bytes]:
            del flows[node]
            missing[node] = 0
            start(actor_of[node])
        for node in [node for node, ends in running.items() if ends <= now + EPSILON]:
            del running[node]
            actor = actor_of[node]
            position[actor] += 1
            for waiting in sent.get(node, ()):
                between[waiting] = (actor, actor_of[waiting])
                paths[waiting] = network.path(leader[actor], leader[actor_of[waiting]])
                flows[waiting] = [num_bytes, now + paths[waiting].alone.latency_seconds]
            start(actor)
    assert position == [len(order) for order in graph.orders]
    return now


def fair_rates(active: dict[int, Path], network: Network) -> dict[int, float]:
    """Max-min fair bytes a second of flows by their paths, none above what it gets alone (progressive filling)."""
    left = {resource: network.rate(resource) for path in active.values() for resource in path.resources}
    open_flows, rates = dict(active), dict[int, float]()
    while open_flows:
        count: dict[Resource, int] = {}
        for path in open_flows.values():
            for resource in path.resources:
                count[resource] = count.get(resource, 0) + 1
        share = {
            node: min([1 / path.alone.seconds_per_byte, *(left[r] / count[r] for r in path.resources)])
            for node, path in open_flows.items()
        }
        least = min(share.values())
        for node in [node for node, own in share.items() if own <= least * (1 + 1e-9)]:
            rates[node] = least
            for resource in open_flows.pop(node).resources:
                left[resource] -= least
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=2, help="of the pipelines; the predictor's rule was chosen on seed 1"
    )
    options = parser.parse_args()
    number, chance = options.number, random.Random(options.seed)
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(number):
        layout = drawn(chance)
        costs = PlanCosts(layout, HETHUB, packaged())
        compute, unpaced = Compute(layout, costs, True), PlanCosts(layout, HETHUB, packaged())
        unpaced.pace = lambda flow: 0.0  # type: ignore[method-assign]
        truth = simulated(layout, costs)
        paced, before = (max(replay(own.graph)) / truth - 1 for own in (compute, Compute(layout, unpaced, True)))
        busy = max(parts.total for parts in compute.spent.values())
        load = max(costs.loads.messages.values(), default=0.0) / busy
        name = "load below 0.8" if load < 0.8 else "0.8 to 1.25" if load <= 1.25 else "beyond"
        found.setdefault(name, []).append((paced, before))
    print("| load | pipelines | mean error | worst | within 5 % | without pace: mean error | worst |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in [*sorted(found.items()), ("all", [row for own in found.values() for row in own])]:
        paced, before = ([abs(100 * value) for value in own] for own in zip(*rows, strict=True))
        within = 100 * sum(value <= 5 for value in paced) / len(paced)
        print(
            f"| {name} | {len(rows)} | {statistics.mean(paced):.1f} % | {max(paced):.0f} % | {within:.0f} % "
            f"| {statistics.mean(before):.1f} % | {max(before):.0f} % |"
        )


if __name__ == "__main__":
    main()
