"""Random pipelines over slow links that they share: predicted, beside SimGrid's simulation of the same messages.

    python benchmarks/links.py [NUMBER] [--seed SEED]

SimGrid (simgrid.org) knows nothing of the predictor's shares: compute goes in the schedule's order, a message starts when
its microbatch is done and those before it on its connection are through, and its fluid model of TCP (CM02, without bounds
of windows) shares the links among all that are under way at every moment. Compared is the end of all compute, for links
with less to carry than the busiest replica has to compute (load below 1), as much, and more. `without pace` is every
message as if it were alone. The predictor's rule was chosen among four on the pipelines of seed 1, what it says of chunks
that take turns on those of 2, 5, 11 and 12; other seeds judge.

Needs SimGrid's Python module (Debian: python3-simgrid, for Debian's Python).
"""

import argparse
import multiprocessing
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `tests` is meant

import simgrid

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.resources import Resource
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.replay import NONE, TaskGraph, replay
from hethub.predictor.pipeline.task_graph import Compute
from hethub.predictor.pipeline.traffic.link_loads import Paces
from hethub.predictor.pipeline.wiring import Wiring
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import ScheduleName
from tests.predictor.plans import LLAMA_8B, under, uniform

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "zero_bubble", "interleaved", "ministages")
SETTINGS = {"network/model": "CM02", "network/TCP-gamma": 1e20, "network/crosstraffic": 0, "contexts/factory": "thread"}


def drawn(chance: random.Random, schedules: Sequence[ScheduleName]) -> Layout:
    """Two to four stages of one to four replicas on machines of one to four accelerators, some behind a rack's uplink."""
    pp, dp = chance.randint(2, 4), chance.choice((1, 2, 4))
    nodes, left = list[dict[str, Any]](), pp * dp
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
    schedule = chance.choice(schedules)
    chunks = chance.randint(2, 4) if schedule in ("interleaved", "ministages") else 1
    layers = chance.randint(1, 3)
    model = LLAMA_8B.replace(layers=pp * chunks * layers)
    batch = dp * chance.choice((8, 16, 32))
    plan = uniform(model, on, tp=1, pp=pp, micro_batch=1, batch=batch, seq=2048).plan
    return bind(under(schedule, plan, chunks), model, on)


def simulated(layout: Layout, costs: PlanCosts) -> float:
    """The end of all compute by SimGrid, in a process of its own: it has one simulation in each."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_simulate, args=(layout, costs, writer))
    process.start()
    writer.close()
    seconds: float = reader.recv()
    process.join()
    return seconds


def _simulate(layout: Layout, costs: PlanCosts, result: Connection) -> None:
    """Every resource is a link of SimGrid's, every replica an actor that computes in the schedule's order; each
    connection sends one message after the other."""
    engine = simgrid.Engine(
        ["links", *(f"--cfg={key}:{value}" for key, value in SETTINGS.items()), "--log=root.thres:error"]
    )
    unpaced = PlanCosts(layout, HETHUB, packaged())
    unpaced.paces = lambda *flow: (Paces(0.0, 0.0), Paces(0.0, 0.0))  # type: ignore[method-assign]
    compute = Compute(Wiring(layout, True), unpaced)
    graph, network = compute.graph, costs.network
    assert not any(graph.needs.values())
    zone = simgrid.NetZone.create_full_zone("all")
    hosts = [zone.create_host(f"{actor}", 1e9) for actor in range(len(graph.orders))]
    leader = {run.actor: layout.replica(*place).ranks[0] for place, run in compute.runs.items()}
    actor_of = {node: actor for actor, order in enumerate(graph.orders) for node in order}
    num_bytes = round(layout.plan.seq_len * layout.model.hidden * 2)
    connections = defaultdict[tuple[int, int], list[int]](list)  # the nodes that wait for its messages
    for node in sorted((node for order in graph.orders for node in order), key=lambda n: _place(graph, actor_of, n)):
        if graph.sources[node] != NONE:
            connections[actor_of[graph.sources[node]], actor_of[node]].append(node)
    _connect(zone, hosts, network, {pair: (leader[pair[0]], leader[pair[1]]) for pair in connections})
    zone.seal()
    done: defaultdict[int, Any] = defaultdict(lambda: simgrid.Semaphore(0))
    arrived: defaultdict[int, Any] = defaultdict(lambda: simgrid.Semaphore(0))

    def works(order: list[int]) -> None:
        for node in order:
            if graph.sources[node] != NONE:
                arrived[node].acquire()
            simgrid.this_actor.sleep_for(graph.seconds[node])
            for waiting in sent[node]:
                done[waiting].release()

    def sends(own: int, target: int) -> None:
        for node in connections[own, target]:
            done[node].acquire()
            simgrid.Mailbox.by_name(f"{own}-{target}").put(node, num_bytes)

    def receives(own: int, target: int) -> None:
        for node in connections[own, target]:
            assert simgrid.Mailbox.by_name(f"{own}-{target}").get() == node
            arrived[node].release()

    sent = defaultdict[int, list[int]](list)
    for node, source in enumerate(graph.sources):
        if source != NONE:
            sent[source].append(node)
    for actor, order in enumerate(graph.orders):
        simgrid.Actor.create(f"works {actor}", hosts[actor], works, order)
    for own, target in connections:
        simgrid.Actor.create(f"sends {own}-{target}", hosts[own], sends, own, target)
        simgrid.Actor.create(f"receives {own}-{target}", hosts[target], receives, own, target)
    engine.run()
    result.send(engine.clock)


def _connect(zone: Any, hosts: list[Any], network: Network, leaders: dict[tuple[int, int], tuple[int, int]]) -> None:
    """A route for each pair of actors: a wire of its own and the resources that it shares, as between their leaders."""
    links: dict[Resource, Any] = {}
    for (own, target), (source, sink) in leaders.items():
        alone, resources = network.path(source, sink)
        wire = (
            zone.create_link(f"{own}-{target}", 1.0 / alone.seconds_per_byte).set_latency(alone.latency_seconds).seal()
        )
        for resource in resources:
            if resource not in links:
                links[resource] = zone.create_link(str(resource), network.rate(resource)).set_latency(0.0).seal()
        route = [simgrid.LinkInRoute(link) for link in (wire, *(links[resource] for resource in resources))]
        zone.add_route(hosts[own].netpoint, hosts[target].netpoint, None, None, route, False)


def _place(graph: TaskGraph, actor_of: dict[int, int], node: int) -> int:
    """Where in its sender's order the message is, that a node waits for."""
    source = graph.sources[node]
    return -1 if source == NONE else graph.orders[actor_of[source]].index(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, default=400)
    parser.add_argument("--seed", type=int, default=4, help="of the pipelines")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, help="what is drawn from")
    options = parser.parse_args()
    number, chance = options.number, random.Random(options.seed)
    found = defaultdict[str, list[tuple[float, float]]](list)
    for _ in range(number):
        layout = drawn(chance, options.schedules)
        costs = PlanCosts(layout, HETHUB, packaged())
        compute, unpaced = Compute(Wiring(layout, True), costs), PlanCosts(layout, HETHUB, packaged())
        unpaced.paces = lambda *flow: (Paces(0.0, 0.0), Paces(0.0, 0.0))  # type: ignore[method-assign]
        truth = simulated(layout, costs)
        paced, before = (
            max(replay(own.graph)) / truth - 1 for own in (compute, Compute(Wiring(layout, True), unpaced))
        )
        busy = max(parts.total for parts in compute.spent.values())
        load = max(costs.loads.both_ways.values(), default=0.0) / busy
        loaded = "load below 0.8" if load < 0.8 else "load of 0.8 to 1.25" if load <= 1.25 else "load beyond"
        for name in (layout.plan.schedule, loaded, "all"):
            found[name].append((paced, before))
    print("| | pipelines | mean error | worst | within 5 % | without pace: mean error | worst |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in sorted(found.items()):
        with_pace, without = ([abs(100 * value) for value in own] for own in zip(*rows, strict=True))
        within = 100 * sum(value <= 5 for value in with_pace) / len(with_pace)
        print(
            f"| {name} | {len(rows)} | {statistics.mean(with_pace):.1f} % | {max(with_pace):.0f} % | {within:.0f} % "
            f"| {statistics.mean(without):.1f} % | {max(without):.0f} % |"
        )


if __name__ == "__main__":
    main()
