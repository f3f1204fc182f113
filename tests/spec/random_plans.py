"""Hypothesis strategies for random layouts: unlike tiles, replica counts, TP degrees, shares and islands."""

import itertools
from typing import Any

from hypothesis import strategies as st

from hethub.spec.plan import ReplicaSpec
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
    """A layout over one to four stages of the tiny model."""
    model = draw(st.sampled_from([MODEL, TIED, MULTI_QUERY]))
    batch = draw(st.integers(1, max_batch))
    stages: list[dict[str, Any]] = []
    vendors, first = "", 0
    for num_layers in draw(compositions(model.layers, model.layers)):
        replicas, letters = [], ""
        for samples in draw(compositions(batch, max_replicas)):
            tp, shares = draw(st.sampled_from([(1, None), (1, None), (2, None), (4, None), (2, [3, 1])]))
            if shares and model is MULTI_QUERY:
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
        zero = 1 if len(set(letters)) > 1 else draw(st.sampled_from([0, 1]))
        stages.append({"layers": [[first, first + num_layers]], "replicas": replicas, "zero": zero})
        vendors, first = vendors + letters, first + num_layers
    name = schedule or draw(st.sampled_from(["1f1b", "gpipe"]))
    return Case(name="random", stages=stages, vendors=vendors, schedule=name, global_batch=batch, model=model)
