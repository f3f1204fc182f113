"""Hypothesis strategies for random layouts: unlike microbatches, replica counts, TP degrees, shares and islands."""

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hethub.spec.plan import SCHEDULES, ReplicaSpec
from tests.support.layouts import MODEL, Case

TIED = MODEL.replace(tied_head=True)
MULTI_QUERY = MODEL.replace(kv_heads=2)


@st.composite
def compositions(draw: st.DrawFn, total: int, max_parts: int) -> list[int]:
    """Positive integers that sum to `total`."""
    cuts = draw(st.sets(st.integers(1, total - 1), max_size=max_parts - 1)) if total > 1 else set()
    edges = [0, *sorted(cuts), total]
    return [b - a for a, b in itertools.pairwise(edges)]


@st.composite
def replica_specs(draw: st.DrawFn, max_batch: int = 40, max_replicas: int = 5) -> tuple[ReplicaSpec, ...]:
    """The replicas of one stage, one rank each."""
    samples = draw(compositions(draw(st.integers(1, max_batch)), max_replicas))
    return tuple(
        ReplicaSpec(ranks=(rank,), samples=count, micro_batch=draw(st.integers(1, count + 2)))
        for rank, count in enumerate(samples)
    )


@st.composite
def cases(draw: st.DrawFn, max_batch: int = 12, max_replicas: int = 4, schedule: str | None = None) -> Case:
    """A layout over one to four stages of the tiny model, one chunk each, ZeRO 0 or 1."""
    model = draw(st.sampled_from([MODEL, TIED, MULTI_QUERY]))
    chunks = [[size] for size in draw(compositions(model.layers, model.layers))]
    name = schedule or draw(st.sampled_from(["1f1b", "gpipe"]))
    return draw(_case(name, model, chunks, (0, 1), max_batch, max_replicas))


@st.composite
def any_cases(draw: st.DrawFn, max_batch: int = 12, max_replicas: int = 3, schedule: str | None = None) -> Case:
    """A layout under any schedule: one to three stages, up to three chunks of one or two layers, any ZeRO level."""
    name = schedule or draw(st.sampled_from(list(SCHEDULES)))
    num_stages = draw(st.integers(1, 3))
    fewest, most = {"interleaved": (2, 3), "ministages": (1, 3)}.get(name, (1, 1))
    num_chunks = draw(st.integers(fewest, most))
    sizes = [draw(st.lists(st.integers(1, 2), min_size=num_chunks, max_size=num_chunks)) for _ in range(num_stages)]
    model = draw(st.sampled_from([MODEL, TIED, MULTI_QUERY])).replace(layers=sum(map(sum, sizes)))
    return draw(_case(name, model, sizes, (0, 1, 2, 3), max_batch, max_replicas))


@st.composite
def trained_cases(draw: st.DrawFn) -> Case:
    """A layout of two to six ranks with everything else that a plan may ask for: recompute, offload, state shares."""
    case = draw(any_cases(max_batch=8).filter(lambda case: 2 <= case.size <= 6))
    keeps = SCHEDULES[case.schedule].defers_wgrad
    stages = []
    for spec in case.stages:
        ranks = [rank for replica in spec["replicas"] for rank in replica["ranks"]]
        free = spec["zero"] and len(ranks) == len(spec["replicas"]) > 1  # any share can be met
        shares = {draw(st.sampled_from(ranks)): draw(st.sampled_from([0.0, 0.1, 0.9]))} if free else {}
        stages.append(
            {
                **spec,
                "recompute": draw(st.sampled_from(["none", "selective"] + ["full"] * (not keeps))),
                "offload": draw(st.lists(st.sampled_from(["parameters", "optimizer", "activations"]), unique=True)),
                **({"state_shares": shares} if draw(st.booleans()) else {}),
            }
        )
    clip = draw(st.sampled_from([{}, {"grad_clip": None}]))
    return replace(case, stages=stages, train=clip, document_mask=draw(st.booleans()), steps=3)


@st.composite
def _case(
    draw: st.DrawFn, name: str, model: Any, sizes: list[list[int]], zeros: tuple[int, ...], max_batch: int, most: int
) -> Case:
    """A layout whose stage s holds chunks of sizes[s] layers."""
    batch = draw(st.integers(1, max_batch))
    stages: list[dict[str, Any]] = []
    vendors = ""
    for layers in _chunks(sizes):
        replicas, letters = [], ""
        for samples in draw(compositions(batch, most)):
            tp, shares = draw(st.sampled_from([(1, None), (1, None), (2, None), (4, None), (2, [3, 1])]))
            if shares and model.kv_heads == MULTI_QUERY.kv_heads:
                shares = None
            letter = draw(st.sampled_from("aan"))
            start = len(vendors) + len(letters)
            replicas.append(
                {
                    "ranks": list(range(start, start + tp)),
                    "samples": samples,
                    "micro_batch": draw(st.integers(1, samples)),
                    **({"tensor_shares": shares} if shares else {}),
                }
            )
            letters += letter * tp
        allowed = [zero for zero in zeros if zero or len(set(letters)) == 1]
        stages.append({"layers": layers, "replicas": replicas, "zero": draw(st.sampled_from(allowed))})
        vendors += letters
    return Case(name="random", stages=stages, vendors=vendors, schedule=name, global_batch=batch, model=model)


def _chunks(sizes: list[list[int]]) -> list[list[list[int]]]:
    """Per stage its chunks [start, stop): chunk by chunk, stage by stage."""
    found: list[list[list[int]]] = [[] for _ in sizes]
    first = 0
    for chunk in range(len(sizes[0])):
        for stage, own in enumerate(sizes):
            found[stage].append([first, first + own[chunk]])
            first += own[chunk]
    return found
