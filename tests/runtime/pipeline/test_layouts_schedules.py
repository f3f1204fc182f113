"""Every schedule trains the model of one process, over chunks, unlike replicas, islands and a tied head."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.layouts import MODEL, Case, check_against_one_process, chunked, replica, stage

SIX = MODEL.replace(layers=6)
TIED = MODEL.replace(tied_head=True)
NO_CLIP = {"grad_clip": None}

TWO_CHUNKS = [chunked([(0, 1), (2, 3)], replica([0], 8, 2)), chunked([(1, 2), (3, 4)], replica([1], 8, 2))]
UNEVEN_CHUNKS = [  # uneven chunks, microbatches and replicas
    chunked([(0, 2), (3, 4)], replica([0], 5, 2), replica([1], 3)),
    chunked([(2, 3), (4, 6)], replica([2], 8, 3)),
]
TP_CHUNKS = [
    chunked([(0, 1), (2, 3)], replica([0, 1], 8, 2)),
    chunked([(1, 2), (3, 4)], replica([2], 5, 2), replica([3], 3, 2)),
]
THREE_CHUNKS = [
    chunked([(0, 1), (2, 3), (4, 5)], replica([0], 8, 2)),
    chunked([(1, 2), (3, 4), (5, 6)], replica([1], 8, 1)),
]
CHAINS = [  # replicas that wait for no others, the second with fewer microbatches than there are stages
    chunked([(0, 1), (2, 3)], replica([0], 7), replica([1], 1), zero=1),
    chunked([(1, 2), (3, 4)], replica([2], 7), replica([3], 1), zero=1),
]
UNLIKE = [
    stage((0, 2), replica([0], 5, 2), replica([1], 3), zero=1),
    stage((2, 4), replica([2, 3], 6, 2), replica([4], 2), zero=1),
]
ONE = [stage((0, 4), replica([0], 5, 2), replica([1], 3), zero=3, state_shares={1: 0.9})]
THREE_STAGES = [stage((0, 1), replica([0], 8, 2)), stage((1, 3), replica([1], 8, 1)), stage((3, 4), replica([2], 8, 2))]


def lockstep(zero: int, **more: Any) -> list[dict[str, Any]]:
    """Two stages whose replicas have unlike microbatches and counts: three rounds, and some without a microbatch."""
    return [
        stage((0, 2), replica([0], 5, 2), replica([1], 3, 3), zero=zero, **more),
        stage((2, 4), replica([2], 6, 2), replica([3], 2, 2), zero=zero, **more),
    ]


def lockstep_chunks(zero: int) -> list[dict[str, Any]]:
    return [
        chunked([(0, 2), (3, 4)], replica([0], 5, 2), replica([1], 3, 3), zero=zero),
        chunked([(2, 3), (4, 6)], replica([2], 8, 3)),
    ]


def offloaded(stages: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """The same stages with these kinds of state in host memory."""
    return [{**own, "offload": list(kinds)} for own in stages]


ALL = ("parameters", "optimizer", "activations")

CASES = [
    Case(name="ministages, 2 chunks", schedule="ministages", stages=TWO_CHUNKS),
    Case(name="ministages, 2 chunks, no clipping", schedule="ministages", stages=TWO_CHUNKS, train=NO_CLIP),
    Case(name="ministages, uneven", schedule="ministages", stages=UNEVEN_CHUNKS, model=SIX),
    Case(name="ministages, TP and DP", schedule="ministages", stages=TP_CHUNKS),
    Case(name="ministages, 3 chunks", schedule="ministages", stages=THREE_CHUNKS, model=SIX),
    Case(name="ministages, 3 chunks, no clipping", schedule="ministages", stages=THREE_CHUNKS, model=SIX, train=NO_CLIP),
    Case(name="ministages, tied head, devices", schedule="ministages", stages=TP_CHUNKS, model=TIED, vendors="aann", staged=True),
    Case(
        name="ministages, 2 chunks of one stage, full recompute",
        schedule="ministages",
        stages=[chunked([(0, 1), (1, 4)], replica([0], 5, 2), replica([1], 3), zero=1, recompute="full")],
        vendors="an",
    ),
    Case(name="layered, one stage", schedule="layered", stages=[stage((0, 4), replica([0], 6, 2), replica([1], 2), zero=1)], vendors="an"),
    Case(name="layered, two stages", schedule="layered", stages=UNLIKE, document_mask=True),
    Case(name="layered, tied head, no clipping", schedule="layered", stages=UNLIKE, model=TIED, train=NO_CLIP, vendors="anaan"),
    Case(name="interleaved, regular", schedule="interleaved", stages=TWO_CHUNKS),
    Case(name="interleaved, regular, no clipping", schedule="interleaved", stages=TWO_CHUNKS, train=NO_CLIP),
    Case(name="interleaved, 3 chunks, unlike microbatches", schedule="interleaved", stages=THREE_CHUNKS, model=SIX),
    Case(name="interleaved, 3 chunks, no clipping", schedule="interleaved", stages=THREE_CHUNKS, model=SIX, train=NO_CLIP),
    Case(name="interleaved, uneven, devices", schedule="interleaved", stages=UNEVEN_CHUNKS, model=SIX, train=NO_CLIP, staged=True),
    Case(name="interleaved, TP and DP, tied head", schedule="interleaved", stages=TP_CHUNKS, model=TIED, vendors="aann"),
    Case(name="interleaved, unlike chains", schedule="interleaved", stages=CHAINS, vendors="anna"),
    Case(name="zero_bubble", schedule="zero_bubble", stages=THREE_STAGES),
    Case(name="zero_bubble, unlike replicas, devices", schedule="zero_bubble", stages=UNLIKE, vendors="anaan", staged=True),
    Case(name="zero_bubble, tied head, no clipping", schedule="zero_bubble", stages=UNLIKE, model=TIED, train=NO_CLIP),
    Case(name="zero_bubble, selective", schedule="zero_bubble", stages=[stage((0, 4), replica([0, 1], 8, 2), recompute="selective")]),
    Case(name="zero2 in rounds, uneven", stages=lockstep(2)),
    Case(name="zero3 in rounds, uneven, islands", stages=lockstep(3), vendors="anan"),
    Case(name="zero3 in rounds, gpipe, tied head", stages=lockstep(3), schedule="gpipe", model=TIED),
    Case(name="zero3 in rounds, full recompute", stages=lockstep(3, recompute="full"), document_mask=True),
    Case(name="zero2 in rounds, zero_bubble", stages=lockstep(2), schedule="zero_bubble", vendors="anan"),
    Case(name="zero3 in rounds, zero_bubble, tied head", stages=lockstep(3), schedule="zero_bubble", model=TIED),
    Case(name="zero3, layered", stages=lockstep(3), schedule="layered", vendors="anan"),
    Case(name="zero2, layered, tied head, no clipping", stages=lockstep(2), schedule="layered", model=TIED, train=NO_CLIP),
    Case(name="zero3, layered, one stage", stages=ONE, schedule="layered"),
    Case(name="zero2, ministages", stages=lockstep_chunks(2), schedule="ministages", model=SIX),
    Case(name="zero2, ministages, no clipping", stages=lockstep_chunks(2), schedule="ministages", model=SIX, train=NO_CLIP, vendors="ana"),
    Case(name="zero3, ministages", stages=lockstep_chunks(3), schedule="ministages", model=SIX),
    Case(name="zero3, interleaved in rounds", stages=lockstep_chunks(3), schedule="interleaved", model=SIX),
    Case(name="activations offloaded", stages=offloaded(THREE_STAGES, "activations")),
    Case(name="all offloaded, full recompute", stages=offloaded([{**own, "recompute": "full"} for own in THREE_STAGES], *ALL)),
    Case(name="all offloaded, zero1, tied head", stages=offloaded(UNLIKE, *ALL), model=TIED, vendors="anaan"),
    Case(name="activations offloaded, zero1, layered", stages=offloaded(UNLIKE, "activations"), schedule="layered", train=NO_CLIP),
    Case(name="all offloaded, zero3, layered", stages=offloaded(ONE, *ALL), schedule="layered"),
    Case(name="all offloaded, zero_bubble", stages=offloaded(THREE_STAGES, *ALL), schedule="zero_bubble"),
    Case(name="activations offloaded, zero1, zero_bubble", stages=offloaded(UNLIKE, "activations"), schedule="zero_bubble", model=TIED),
    Case(name="all offloaded, interleaved", stages=offloaded(TWO_CHUNKS, *ALL), schedule="interleaved"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_schedule_equals_one_process(case: Case) -> None:
    """Three steps: the third begins with weights, moments and norms of a step that itself began with another's."""
    check_against_one_process(replace(case, steps=3))
