"""Estimate round trips of microbatches, and how many microbatches in flight hide them.

A round trip goes forward from one stage to a later one and backward again. Every function takes many candidates of
equally many stages at once. Where the microbatches of stages differ in size, the largest one on the way counts, and
stages with smaller ones run several for it.

Arguments that recur, all [candidate, stage]: `microbatch`, the seconds of one microbatch, forward and backward; `microstep`,
the samples of one microbatch on all replicas together; `held`, the microbatches in flight. `trips` come from
`round_trips`.
"""

from functools import cache

import numpy as np

from hethub.planner.estimate.stage_figures import StageEstimate


def round_trips(microbatch: np.ndarray, microstep: np.ndarray, p2p_seconds: np.ndarray) -> np.ndarray:
    """Return the seconds [candidate, s, t], for t >= s, from the start of a microbatch's forward in stage s to the end of its
    backward there if it turns back in stage t. `p2p_seconds` [candidate, boundary] are those of one message."""
    starts = np.zeros_like(microbatch)
    np.cumsum(microbatch[:, :-1] + 2 * p2p_seconds, axis=1, out=starts[:, 1:])
    trips = (starts + microbatch)[:, None, :] - starts[:, :, None]
    unlike = (microstep != microstep[:, :1]).any(axis=1)
    if unlike.any():
        trips[unlike] += _repeated(microbatch[unlike], microstep[unlike])
    return trips


def _repeated(microbatch: np.ndarray, microstep: np.ndarray) -> np.ndarray:
    """Return the additional seconds [candidate, s, t] of a round trip where sizes differ: for one of the largest
    microbatches on the way, the stages with smaller ones run several."""
    most, beside = _largest_between(microstep), np.zeros((*microstep.shape, microstep.shape[1]))
    size = microstep.max(axis=1)[:, None]
    while (size > microstep).any():
        further = _largest_between((size / microstep - 1) * microbatch)
        beside = np.where(most == size[:, :, None], further, beside)
        size = np.where(microstep < size, microstep, 0.0).max(axis=1)[:, None]
    return beside


def _largest_between(figures: np.ndarray) -> np.ndarray:
    """Return [candidate, s, t]: the largest of the figures [candidate, stage] of the stages from s to t, and at least 0."""
    own = figures[:, None, :] * _upper(figures.shape[1])
    return np.maximum.accumulate(own, axis=2, out=own)


@cache
def _upper(count: int) -> np.ndarray:
    """Return [s, t]: 1 where t >= s, else 0."""
    return np.triu(np.ones((count, count)))


def default_in_flight(microstep: np.ndarray) -> np.ndarray:
    """Return how many microbatches [candidate, stage] each stage holds by default: enough for the samples that the next
    stage holds and for one more microbatch, the larger one of the two stages. With one replica a stage and sizes that
    divide each other this is what `in_flight_limits` says."""
    depth = microstep.shape[1]
    held = np.repeat(np.arange(depth, 0.0, -1.0)[None], len(microstep), axis=0)
    unlike = (microstep != microstep[:, :1]).any(axis=1)
    if unlike.any():
        own, some = held[unlike], microstep[unlike]
        for s in range(depth - 2, -1, -1):
            under_way = np.maximum(some[:, s], some[:, s + 1]) + own[:, s + 1] * some[:, s + 1]
            own[:, s] = np.ceil(under_way / some[:, s])
        held[unlike] = own
    return held


def slowest_cycle(trips: np.ndarray, microstep: np.ndarray, held: np.ndarray, samples: int) -> np.ndarray:
    """Return the seconds [candidate] that a step of `samples` takes because of its slowest cycle, with one microbatch's way
    through all stages.

    A cycle: after a microbatch's backward, stage s sends the next forward down to stage t, which runs it before a backward
    that stage s needs later. What both stages hold says how many microbatches lie between the two. Those that a stage
    holds from the beginning wait for none."""
    behind, beyond = microstep * (held - 1), np.maximum(samples - microstep * held, 0.0)
    apart, later = (behind + microstep)[:, :-1, None] - behind[:, None, 1:], np.maximum(samples - microstep, 0.0)
    times = np.minimum(later[:, :-1, None] / np.maximum(apart, 1), np.ceil(beyond / microstep)[:, :-1, None])
    return (trips[:, :-1, 1:] * times * _upper(times.shape[1])).max(axis=(1, 2)) + trips[:, 0, -1]


def enough_in_flight(
    trips: np.ndarray, microstep: np.ndarray, pace: np.ndarray, microbatches: np.ndarray
) -> np.ndarray:
    """Return how many microbatches in flight [..., candidate, stage] the cycles need to reach a `pace` [..., candidate] in
    samples per second. It is no more than a step has (`microbatches` [candidate, stage]), and no fewer samples than the
    next stage holds."""
    spare = (microstep != microstep[:, :1]).any(axis=1)
    held = np.ones((*pace.shape, microstep.shape[1]))
    for s in range(microstep.shape[1] - 2, -1, -1):
        need = (pace[..., None] * trips[:, s, s + 1 :] + microstep[:, s + 1 :] * (held[..., s + 1 :] - 1)).max(axis=-1)
        wanted = np.ceil(need / microstep[:, s] - 1e-6) + spare
        below = np.ceil(held[..., s + 1] * microstep[:, s + 1] / microstep[:, s])
        held[..., s] = np.maximum(np.minimum(wanted, microbatches[:, s]), below)
    return held


def waits_between_chunks(
    stages: StageEstimate, p2p_seconds: np.ndarray, passing: np.ndarray, chunks: int
) -> np.ndarray:
    """Return the seconds [candidate, stage] that stages of several chunks wait in a step.

    `passing` microbatches go through a chunk one after another. The first of them must have come round the pipeline
    before the next chunk can begin. The message from the last stage to the first is taken to be as slow as the slowest
    between two neighbours."""
    between = p2p_seconds.sum(axis=1, keepdims=True)
    longest = p2p_seconds.max(axis=1, initial=0.0, keepdims=True)
    waits = (stages.microbatch.sum(axis=1, keepdims=True) - stages.microbatch) / chunks + 2 * between
    for seconds in (stages.forward, stages.backward):
        ahead = ((passing * seconds).max(axis=1, keepdims=True) - seconds.sum(axis=1, keepdims=True)) / chunks
        waits += (chunks - 1) * np.maximum(0.0, between + longest - ahead)
    return waits


def sent_until_back(until_back: np.ndarray, forward: np.ndarray, microstep: np.ndarray) -> np.ndarray:
    """Return how many microbatches [candidate, stage] a stage can begin before the first one comes back, which takes
    `until_back` seconds after its forward. They arrive at the pace of the slowest forward on their way; `forward` are the
    seconds of one. A stage that holds so many never waits for a backward. Where all stages are alike this is what ZB-H2
    holds (arXiv 2401.10241)."""
    apart = np.maximum.accumulate(forward / microstep, axis=1) * microstep
    return 1 + np.ceil(until_back / np.maximum(apart, 1e-12) - 1e-6)
