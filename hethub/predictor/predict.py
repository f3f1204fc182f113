"""Predicts one training step of a plan: its time, where that time goes, the memory of every rank, and an interval."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from hethub.predictor.cost.constants import ASSUMED, Constants, packaged
from hethub.predictor.cost.intervals import interval, width_of
from hethub.predictor.cost.operators import model_flops
from hethub.predictor.cost.profile import ProfileSpec, assumed_speeds
from hethub.predictor.cost.resources import OF_RANKS, Resource
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.memory.ranks import AssumedHost, RankMemory, all_fit, assumed_hosts, rank_memory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import StepTimes, step_times
from hethub.predictor.pipeline.timeline import Span, timeline
from hethub.predictor.staging import Staging
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout
from hethub.spec.ranges import show_ranks

# Kept for one more version. The old names called this a bound, but good mixtures exceed it.
OLD_NAMES = {
    "makers_alone_tokens_per_second": "upper_bound_tokens_per_second", "percent_of_makers_alone": "percent_of_upper_bound",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one step. `mfu` and `percent_of_*` are percents (97.5, not 0.975); the parts of `breakdown`, in
    seconds, sum to `step_seconds`."""

    fits: bool
    step_seconds: float
    step_seconds_interval: tuple[float, float]  # 80 %
    tokens_per_second: float
    mfu: float | None  # None where a peak is assumed: a share of a guess means nothing
    breakdown: dict[str, float]
    memory: tuple[RankMemory, ...]
    bottleneck: str
    ceiling_tokens_per_second: float
    percent_of_ceiling: float
    makers_alone_tokens_per_second: float | None = None  # found by the planner (`beside_makers_alone`)
    extrapolated: bool  # a profile was asked beyond what it measured
    percent_of_makers_alone: float | None = None
    timeline: tuple[Span, ...] | None = None
    staging: Staging | None = None  # where bytes cross between islands, and it was asked for
    assumed_hosts: tuple[AssumedHost, ...] = ()  # where state is offloaded, and the cluster does not say to how much

    def beside_makers_alone(self, tokens_per_second: float | None) -> "Prediction":
        """Return this prediction with the throughput that the makers reach alone, if that is known."""
        percent = 100.0 * self.tokens_per_second / tokens_per_second if tokens_per_second else None
        return replace(self, makers_alone_tokens_per_second=tokens_per_second, percent_of_makers_alone=percent)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the timeline."""
        # Not asdict(): it would copy every rank's memory in depth first.
        data = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("memory", "timeline")}
        data["step_seconds_interval"] = list(self.step_seconds_interval)
        data["memory"] = [entry._asdict() for entry in self.memory]
        data["staging"] = self.staging and self.staging._asdict()
        data["assumed_hosts"] = [host._asdict() for host in self.assumed_hosts]
        for name, old in OLD_NAMES.items():
            data[old] = data[name]
        return data


def predict(
    layout: Layout,
    *,
    reserve: float = 0.06,
    with_timeline: bool = False,
    software: Software = HETHUB,
    constants: Constants | None = None,
    profile: ProfileSpec | None = None,
    used: tuple[RankMemory, ...] | None = None,
) -> Prediction:
    """Return the prediction for a bound plan. `reserve` is the fraction of memory that must stay free for the plan to fit;
    `used` is the memory of every rank, if the caller has it already.

    Raises BadInput where the cluster lacks a link speed that the plan needs, or the profile measured another model.
    """
    constants = constants or packaged()
    if profile is not None:
        profile.check_model(layout.model)
        profile.check_version()
    costs = PlanCosts(layout, software, constants, profile)
    times = step_times(layout, costs, full=with_timeline)
    extrapolated = costs.extrapolated  # read before the ceiling is computed, which asks the profile for every size
    used = used or tuple(rank_memory(layout, software))
    plan, model = layout.plan, layout.model
    tokens = plan.global_batch * plan.seq_len
    tokens_per_second = tokens / times.seconds
    is_guess = bool(assumed_speeds(layout.cluster, plan.precision, None))  # a profile measures speeds, and no peak
    peaks = sum(place.accelerator.peak_flops(plan.precision) or 0.0 for place in layout.cluster.places)
    ceiling = ceiling_tokens_per_second(layout, costs)
    if not 0 < times.seconds < math.inf:
        raise BadInput(
            f"cluster '{layout.cluster.name}': the step would take {times.seconds} s; a rate of an accelerator or a link is "
            "absurdly small or large: look at *_tflops, memory_gbytes_per_second, link_gbytes_per_second and gbps_per_nic."
        )
    return Prediction(
        fits=all_fit(layout, used, reserve),
        step_seconds=times.seconds,
        step_seconds_interval=_interval(layout, times.seconds, software, constants, profile),
        tokens_per_second=tokens_per_second,
        mfu=None if is_guess else 100.0 * model_flops(model, plan.global_batch, plan.seq_len) / times.seconds / peaks,
        breakdown=times.breakdown,
        memory=used,
        bottleneck=_bottleneck(layout, times) + _full_link(layout, times, costs),
        ceiling_tokens_per_second=ceiling,
        percent_of_ceiling=100.0 * tokens_per_second / ceiling,
        extrapolated=extrapolated,
        timeline=timeline(layout, times) if with_timeline else None,
        assumed_hosts=assumed_hosts(layout, used),
    )


def _interval(
    layout: Layout, seconds: float, software: Software, constants: Constants, profile: ProfileSpec | None
) -> tuple[float, float]:
    precision = software.math_precision(layout.plan.precision)
    names = {layout.cluster.places[rank].accelerator.name for rank in layout.plan.ranks}  # unused ranks slow nothing
    known = all(constants.knows(name, precision) for name in names)
    measured = [profile and profile.device(name, layout.plan.precision) for name in names]
    widths = [device.width(constants.interval) for device in measured if device]
    if len(widths) == len(names):
        return interval(seconds, max(widths))
    return interval(seconds, width_of(constants.interval, software.stack in constants.stacks, known))


def ceiling_tokens_per_second(layout: Layout, costs: PlanCosts) -> float:
    """Return the throughput that no plan can exceed, in tokens per second: every rank that computes in the plan's precision,
    used or not, runs at its best layer rate, without bubble or communication."""
    rates: dict[str, float] = {}
    total = 0.0
    for place in layout.cluster.places:
        name = place.accelerator.name
        if not place.accelerator.peak_flops(layout.plan.precision):
            continue
        if name not in rates:
            rates[name] = costs.layer_cost(place.rank).best_layer_samples_per_second(layout.plan.global_batch)
        total += rates[name]
    return total / layout.model.layers * layout.plan.seq_len


_WORDS = {
    "compute": "computing",
    "bubble": "waiting for other stages and replicas",
    "tp": "tensor-parallel communication",
    "pp": "waiting for activations and gradients under way between stages",
    "dp": "exchanging gradients and weights between replicas",
    "optimizer": "the optimizer",
}


def _bottleneck(layout: Layout, times: StepTimes) -> str:
    stage, replica = times.bottleneck
    ranks = layout.replica(stage, replica).ranks
    accelerator = layout.cluster.places[ranks[0]].accelerator.name
    largest, second = sorted(times.breakdown, key=lambda part: -times.breakdown[part])[:2]
    share = {part: 100.0 * times.breakdown[part] / times.seconds for part in (largest, second)}
    words = dict(_WORDS)
    if any(own.offload for own in layout.stages):
        words["dp"] += " and fetching what was offloaded"
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {show_ranks(ranks)}"
    return (
        f"Stage {stage} on {who} ({accelerator}) sets the pace: {share[largest]:.0f} % of the step is {words[largest]}, "
        f"{share[second]:.0f} % {words[second]}."
    )


BUSY = 0.75  # a link that is busy for this fraction of the step is named


def _full_link(layout: Layout, times: StepTimes, costs: PlanCosts) -> str:
    """Return a sentence about the link that is busy for most of the step, or nothing if there is none."""
    seconds, _, link = costs.loads.longest
    if link is None or seconds < BUSY * times.seconds:
        return ""
    return f" {_name_of(link, layout.cluster)} carry bytes for {100.0 * seconds / times.seconds:.0f} % of it."


def _name_of(link: Resource, cluster: ClusterSpec) -> str:
    if link.kind == "rack":
        return f"The uplinks of rack '{link.owner}'"
    if link.kind == "regions":
        assert cluster.links.regions is not None
        assert isinstance(link.owner, tuple)
        start, end = (cluster.links.regions.names[index] for index in link.owner)
        return f"The links from region '{start}' to '{end}'"
    if link.kind in OF_RANKS:
        return f"The {'links' if link.kind == 'port' else 'host copies'} of rank {link.owner}"
    assert isinstance(link.owner, int)
    what = "host copies" if link.kind == "host" else "network interfaces"
    return f"The {what} of machine {link.owner} ('{cluster.machines[link.owner].name}')"


LIMITS = 1.01  # staging is said to limit a step that takes this many times as long as without it


def with_staging(
    prediction: Prediction, layout: Layout, profile: ProfileSpec | None, software: Software = HETHUB
) -> Prediction:
    """Return the prediction with what staging through host memory costs it, if bytes cross between islands."""
    cluster = layout.cluster
    if len({cluster.places[rank].island for rank in layout.plan.ranks}) == 1:
        return prediction
    given, source = cluster.links.staging.gbytes_per_second, "the cluster's links.staging"
    measured = profile and (profile.link("between_islands", "send") or profile.link("between_islands", "all_reduce"))
    if measured:
        both = Staging(measured.gbytes_per_second, "measured, with the wire", None, None)
        return replace(prediction, staging=both)
    if given is None:
        given = packaged().links["host_staged_gbytes_per_second"]
        source = (
            f"{ASSUMED['host_staged_gbytes_per_second']}; links.staging.gbytes_per_second of the cluster file says it"
        )
    direct = cluster.links.staging.replace(gbytes_per_second=1e5, per_host_gbytes_per_second=None)
    links_of = cluster.replace(links=cluster.links.replace(staging=direct))
    costs = PlanCosts(layout, software, packaged(), profile, links_of=links_of)
    without = min(prediction.step_seconds, step_times(layout, costs).seconds)
    limits = prediction.step_seconds > LIMITS * without
    return replace(prediction, staging=Staging(given, source, limits, without))
