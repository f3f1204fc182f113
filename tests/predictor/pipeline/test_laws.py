"""What holds for every plan on every cluster, whatever the figures: links carry no more than they can, faster is never
slower, and a profile with the same numbers gives the same answer. `make evidence` draws ten thousand."""

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch, which the random layouts' module imports: pip install hethub[train]")

from hethub.predictor import predict
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import LayerCost
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.profile import DeviceProfile, LayerTiming, LinkTiming, PartTiming, ProfileSpec
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import step_times
from hethub.predictor.pipeline.traffic import link_loads
from hethub.predictor.pipeline.wiring import Wirings
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import PlanSpec, ScheduleName
from tests.predictor.link_bytes import bytes_per_second, sent_bytes
from tests.predictor.plans import LLAMA_8B, cluster, under, uniform
from tests.spec.random_plans import any_cases

DRAWS, SEED, MOST = int(os.environ.get("LAWS", "60")), int(os.environ.get("LAWS_SEED", "0")), 500
PARTS = [(SEED + 1000 * part, min(MOST, DRAWS - MOST * part)) for part in range(-(-DRAWS // MOST))]  # seed, draws


def of_all_draws(law: Callable[["Draw"], None]) -> Callable[[int, int], None]:
    """A test of the law for each part of the draws."""

    @pytest.mark.parametrize(("own_seed", "number"), PARTS)
    def test(own_seed: int, number: int) -> None:
        quiet = settings(
            max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )  # fmt: skip
        seed(own_seed)(quiet(given(drawn=draws())(law)))()

    return test


RATES = ("memory_gbytes_per_second", "fp32_tflops", "fp64_tflops", "link_gbytes_per_second")


class Draw(NamedTuple):
    """A plan on a cluster of random figures, and what else the test draws from."""

    layout: Layout
    description: dict[str, Any]
    random: random.Random

    def on(self, description: dict[str, Any]) -> Layout:
        return bind(self.layout.plan, self.layout.model, ClusterSpec.model_validate(description))


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """Any plan; its ranks on machines of one to four, some behind rack uplinks, rates over five orders of magnitude."""
    case, chance = draw(any_cases(max_batch=24)), random.Random(draw(st.integers(0, 2**32)))
    case = case.__class__(**{**case.__dict__, "precision": "fp32"})
    plain = case.layout()
    vendors, nodes = [node.vendor for node in plain.cluster.nodes], list[dict[str, Any]]()
    while (first := sum(node["accelerators"] for node in nodes)) < len(vendors):
        alike = next((i for i in range(first, len(vendors)) if vendors[i] != vendors[first]), len(vendors)) - first
        nodes.append(node(f"n{len(nodes)}", vendors[first], chance.randint(1, min(4, alike)), chance))
    names, links = [node["name"] for node in nodes], dict[str, Any]()
    if len(names) > 2 and chance.random() < 0.5:
        half = len(names) // 2
        links["racks"] = [
            {"name": rack, "nodes": own, "gbps": _spread(chance, 1e-4, 10.0)}
            for rack, own in (("east", names[:half]), ("west", names[half:]))
        ]
    if chance.random() < 0.3:
        links["between_islands"] = {"gbps_per_node": _spread(chance, 1e-4, 10.0)}
    if len(names) > 1 and chance.random() < 0.2:
        of_node = {name: chance.choice(("here", "there")) for name in names}
        between = [[_spread(chance, 1e-4, 10.0) for _ in range(2)] for _ in range(2)]
        links["regions"] = {"names": ["here", "there"], "of_node": of_node, "gbps": between}
    links["staging"] = {"gbytes_per_second": _spread(chance, 1e-5, 1.0)}
    if chance.random() < 0.3:
        links["staging"]["per_host_gbytes_per_second"] = _spread(chance, 1e-5, 1.0)
    description = {"name": "test", "nodes": nodes, "links": links}
    return Draw(bind(plain.plan, plain.model, ClusterSpec.model_validate(description)), description, chance)


def _spread(chance: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** chance.random())


def node(name: str, vendor: str | None, accelerators: int, chance: random.Random) -> dict[str, Any]:
    tflops = _spread(chance, 0.01, 1.0)
    device = {
        "name": f"made-{name}", "vendor": "made", "memory_gb": 1, "memory_gbytes_per_second": 100 * tflops,
        "fp32_tflops": tflops, "fp64_tflops": tflops / 2, "link_gbytes_per_second": _spread(chance, 0.001, 10.0),
    }  # fmt: skip
    nics = chance.choice((1, 1, 2, 4))
    return {
        "name": name, "accelerator": device, "accelerators": accelerators, "vendor": vendor, "nics": nics,
        "gbps_per_nic": _spread(chance, 1e-4, 10.0),
    }  # fmt: skip


def seconds(layout: Layout) -> float:
    """`predict`'s step without its memory, which takes longer to count."""
    return step_times(layout, PlanCosts(layout, HETHUB, packaged())).seconds


@of_all_draws
def test_links_and_ranks_do_no_more_than_they_can_and_nothing_faster_makes_a_plan_slower(drawn: Draw) -> None:
    step = seconds(drawn.layout)
    check_links(drawn.layout, step)
    check_ranks(drawn.layout, step)
    check_faster(drawn, step)


@of_all_draws
def test_messages_that_cannot_meet_may_be_left_out_of_a_replay(drawn: Draw) -> None:
    """Their flows' nodes are: with a node for every message all is the same."""

    def times() -> Any:
        return step_times(drawn.layout, PlanCosts(drawn.layout, HETHUB, packaged()))

    few = times()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_loads, "SAME_MOMENT", -1.0)
        every = times()
    assert few.seconds == pytest.approx(every.seconds, rel=1e-12)
    assert few.breakdown == pytest.approx(every.breakdown, rel=1e-9, abs=1e-9 * every.seconds)


@of_all_draws
def test_a_plan_priced_anew_costs_what_the_figures_alone_say(drawn: Draw) -> None:
    """As the planner asks for every scenario: nothing that the figures before had priced is left."""
    costs, wirings = PlanCosts(drawn.layout, HETHUB, packaged()), Wirings(drawn.layout)
    step_times(drawn.layout, costs, wirings=wirings)
    for factor in (0.1, 3.0):
        other = drawn.on(faster(drawn.description, factor, lambda *_: drawn.random.random() < 0.5))
        anew = costs.with_figures(other.cluster, packaged(), None)
        assert step_times(anew.layout, anew, wirings=wirings).seconds == pytest.approx(seconds(other), rel=1e-12)


def check_links(layout: Layout, step: float) -> None:
    """No step is shorter than a link needs for what passes it. Where replicas are cut unlike, ranks own whole elements of
    every bucket, which so tiny models cannot divide as their plans do: to 1 %."""
    slack = 1e-9 if all(stage.cut_alike for stage in layout.stages) else 0.01
    for link, num_bytes in sent_bytes(layout).items():
        assert step >= num_bytes / bytes_per_second(layout, *link) * (1 - slack), link


def check_ranks(layout: Layout, step: float) -> None:
    """No step is shorter than what a rank computes."""
    costs = PlanCosts(layout, HETHUB, packaged())
    for stage, spec in enumerate(layout.stages):
        for r, replica in enumerate(spec.replicas):
            whole, rest = divmod(replica.samples, replica.micro_batch)
            sizes = [replica.micro_batch] * whole + [rest] * (rest > 0)
            passes = [part for size in sizes for part in costs.microbatch(stage, r, size)]
            assert step >= sum(part.compute for part in passes) * (1 - 1e-9)


def check_faster(drawn: Draw, before: float) -> None:
    """All rates up by one factor; then one link or one kind of accelerator alone."""
    factor = drawn.random.choice((1.01, 1.3, 3.0, 20.0))
    every = faster(drawn.description, factor, lambda *_: True)
    assert seconds(drawn.on(every)) <= before * (1 + 1e-9)
    paths = [(key, owner) for key, owner in figures(drawn.description)]
    for _ in range(2):
        chosen = drawn.random.choice(paths)
        one = faster(drawn.description, factor, lambda *path, chosen=chosen: path == chosen)
        assert seconds(drawn.on(one)) <= before * 1.01, chosen


def figures(description: dict[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    faster(description, 1.0, lambda key, owner: bool(found.append((key, owner))))
    return found


def faster(description: dict[str, Any], factor: float, chosen: Any) -> dict[str, Any]:
    """The cluster with chosen rates (key, owner) times a factor; of an accelerator, all that it computes with."""

    def times(own: dict[str, Any], owner: str, *keys: str, called: str | None = None) -> dict[str, Any]:
        scaled = {key: own[key] * factor for key in keys if key in own and chosen(called or key, owner)}
        return {**own, **scaled}

    nodes = []
    for node in description["nodes"]:
        device = times(node["accelerator"], node["name"], *RATES[:3], called="compute")
        device = times(device, node["name"], RATES[3])
        nodes.append({**times(node, node["name"], "gbps_per_nic"), "accelerator": device})
    links = dict(description["links"])
    links["staging"] = times(links["staging"], "", "gbytes_per_second", "per_host_gbytes_per_second")
    if "between_islands" in links:
        links["between_islands"] = times(links["between_islands"], "", "gbps_per_node")
    if "regions" in links:
        links["regions"] = dict(links["regions"])
        rows = links["regions"]["gbps"]
        links["regions"]["gbps"] = [
            [g * factor for g in row] if chosen("regions", i) else row for i, row in enumerate(rows)
        ]
    if "racks" in links:
        links["racks"] = [times(rack, rack["name"], "gbps") for rack in links["racks"]]
    return {**description, "nodes": nodes, "links": links}


@of_all_draws
def test_a_profile_of_the_same_numbers_gives_the_same_answer(drawn: Draw) -> None:
    """On a cluster of equal nodes, where a level has one rate. Messages only: a profile tells collectives of one size of
    group, so plans with several kinds of them are left out."""
    first = drawn.description["nodes"][0]
    nodes = [
        {**first, "name": n["name"], "accelerators": n["accelerators"], "vendor": n["vendor"]}
        for n in drawn.description["nodes"]
    ]
    layout = drawn.on({**drawn.description, "nodes": nodes, "links": {}})
    network, places = Network(layout.cluster), layout.cluster.places
    found: dict[str, LinkTiming] = {}
    for a in places:
        for b in places:
            level = (
                "between_islands" if a.island != b.island else "in_node" if a.machine == b.machine else "between_nodes"
            )
            if a.rank == b.rank or (level == "between_islands" and a.machine == b.machine) or level in found:
                continue
            alone = network.path(a.rank, b.rank).alone
            rate = 1e-9 / alone.seconds_per_byte
            found[level] = LinkTiming(
                level=level, operation="send", latency_seconds=alone.latency_seconds, gbytes_per_second=rate
            )  # type: ignore[arg-type]
    profile = profile_of(layout, tuple(found.values()))
    assert predict(layout, profile=profile).step_seconds == pytest.approx(seconds(layout), rel=1e-9)


def profile_of(layout: Layout, links: tuple[LinkTiming, ...]) -> ProfileSpec:
    """The predictor's own figures, as if they had been measured."""
    import hethub

    plan, model, devices = layout.plan, layout.model, []
    for name, device in {place.accelerator.name: place.accelerator for place in layout.cluster.places}.items():
        cost = LayerCost(model, device, plan.seq_len, plan.precision)
        sizes = sorted(
            {
                size
                for spec in plan.stages
                for r in spec.replicas
                for size in (r.micro_batch, r.samples % r.micro_batch)
                if size
            }
        )
        layers = tuple(
            LayerTiming(
                micro_batch=b, seq_len=plan.seq_len, forward_seconds=once.forward, backward_seconds=once.backward
            )
            for b in sizes
            for once in [cost.layer(b)]
        )
        ends = tuple(
            PartTiming(
                part=part,
                micro_batch=b,
                seq_len=plan.seq_len,
                forward_seconds=once.forward,
                backward_seconds=once.backward,
            )  # type: ignore[arg-type]
            for b in sizes
            for part, once in (("embedding", cost.embedding(b)), ("head", cost.head(b)))
        )
        devices.append(DeviceProfile(accelerator=name, precision=plan.precision, layers=layers, parts=ends))
    return ProfileSpec(
        date="2026-01-01", hethub=hethub.__version__, software="none", model=model, devices=tuple(devices), links=links
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved", "ministages"])
@pytest.mark.parametrize("gbps", [2.0, 8.0, 40.0])
def test_replicas_that_share_slow_links_are_replayed_once(schedule: ScheduleName, gbps: float) -> None:
    """And few of their microbatches: eight replicas of two makers on machines whose cards all of them share."""
    on = cluster(("A100-SXM4-80GB", 2, 4), ("MI250X-GCD", 2, 4), gbps=gbps)
    layout = uniform(LLAMA_8B.replace(layers=8), on, tp=1, pp=4, micro_batch=1, batch=4 * 60, seq=2048, zero=1)
    chunks = 2 if schedule in ("interleaved", "ministages") else 1
    layout = bind(under(schedule, layout.plan, chunks), layout.model, on)
    costs = PlanCosts(layout, HETHUB, packaged())
    assert costs.is_paced
    folded, full = (step_times(layout, costs, full=full).seconds for full in (False, True))
    assert folded == pytest.approx(full, rel=2e-3)


def test_a_leader_of_unlike_shares_relays_what_it_holds() -> None:
    """Three quarters of a stage's matrices where its rank of two has them, beside a replica that cuts them in four: their sum
    and the gather pass its staging, of two islands half of each."""
    names = ("A100-SXM4-80GB", "MI250X-GCD", "A100-SXM4-80GB")
    on = cluster(*((name, 1, count) for name, count in zip(names, (4, 2, 1), strict=True)))
    slow = on.links.staging.replace(gbytes_per_second=1e-3)
    on, model = on.replace(links=on.links.replace(staging=slow)), LLAMA_8B.replace(layers=2, vocab=512, kv_heads=32)
    replicas = [{"ranks": [0, 1, 2, 3], "micro_batch": 1, "samples": 1}]
    replicas += [{"ranks": [4, 5], "tensor_shares": [3, 1], "micro_batch": 1, "samples": 1}]
    stages = [
        {"layers": [[0, 1]], "replicas": replicas, "zero": 1},
        {"layers": [[1, 2]], "replicas": [{"ranks": [6], "micro_batch": 1, "samples": 2}]},
    ]
    plan = {"model": model.name, "cluster": on.name, "global_batch": 2, "seq_len": 8, "precision": "fp32"}
    layout = bind(PlanSpec.model_validate({**plan, "stages": stages}), model, on)
    matrices = 4 * 4096**2 + 3 * 4096 * 14336 + 512 * 4096
    busiest, _, link = PlanCosts(layout, HETHUB, packaged()).loads.longest
    assert link is not None
    assert (link.kind, link.owner) == ("staging", 4)
    assert busiest == pytest.approx(2 * 0.75 * matrices * 4 / 2 / 1e6, rel=0.01)
