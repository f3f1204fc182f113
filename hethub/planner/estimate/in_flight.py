"""Microbatches in flight by estimate: how long a microbatch takes to turn somewhere below and come back, and how many
hide that.

For many candidates of equally many stages at once. Where stages have microbatches of unlike sizes, the largest on the
way counts: a stage with smaller ones runs several for it. `microbatch` are seconds of one microbatch both ways, `microstep`
samples of one microbatch on every replica, `held` microbatches in flight, all [candidate, stage]; `trips` come from
`round_trips`.
"""

from functools import cache

import numpy as np

from hethub.planner.estimate.stage_figures import StageEstimate


def round_trips(microbatch: np.ndarray, microstep: np.ndarray, p2p_seconds: np.ndarray) -> np.ndarray:
    """[candidate, s, t]: for t >= s the seconds until what stage s sends down comes back from stage t, both passes of
    all on the way included; `p2p_seconds` [candidate, boundary]."""
    starts = np.zeros_like(microbatch)
    np.cumsum(microbatch[:, :-1] + 2 * p2p_seconds, axis=1, out=starts[:, 1:])
    trips = (starts + microbatch)[:, None, :] - starts[:, :, None]
    unlike = (microstep != microstep[:, :1]).any(axis=1)
    if unlike.any():
        trips[unlike] += _repeated(microbatch[unlike], microstep[unlike])
    return trips


def _repeated(microbatch: np.ndarray, microstep: np.ndarray) -> np.ndarray:
    """[candidate, s, t]: seconds that the stages from s to t take on further microbatches for one of the largest among
    them."""
    most, beside = _largest_between(microstep), np.zeros((*microstep.shape, microstep.shape[1]))
    size = microstep.max(axis=1)[:, None]
    while (size > microstep).any():
        further = _largest_between((size / microstep - 1) * microbatch)
        beside = np.where(most == size[:, :, None], further, beside)
        size = np.where(microstep < size, microstep, 0.0).max(axis=1)[:, None]
    return beside


def _largest_between(figures: np.ndarray) -> np.ndarray:
    """[candidate, s, t]: the largest of the figures [candidate, stage] from s to t, and of 0."""
    own = figures[:, None, :] * _upper(figures.shape[1])
    return np.maximum.accumulate(own, axis=2, out=own)


@cache
def _upper(count: int) -> np.ndarray:
    """[s, t]: 1 where t >= s, else 0."""
    return np.triu(np.ones((count, count)))


def default_in_flight(microstep: np.ndarray) -> np.ndarray:
    """How many microbatches each stage holds by default: what is under way below beside the largest microbatch of both, and
    one more of that below. Of one replica a stage whose sizes divide each other so many as `in_flight_limits` says."""
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
    """[candidate]: seconds that the slowest critical cycle holds `samples` up, and of one microbatch through all: a
    microbatch's backward in stage s lets the next forward go down to stage t, where it comes before the backward that
    answers it as many microbatches later as both hold. What is held at once waits for none."""
    behind, beyond = microstep * (held - 1), np.maximum(samples - microstep * held, 0.0)
    apart, later = (behind + microstep)[:, :-1, None] - behind[:, None, 1:], np.maximum(samples - microstep, 0.0)
    times = np.minimum(later[:, :-1, None] / np.maximum(apart, 1), np.ceil(beyond / microstep)[:, :-1, None])
    return (trips[:, :-1, 1:] * times * _upper(times.shape[1])).max(axis=(1, 2)) + trips[:, 0, -1]


def enough_in_flight(
    trips: np.ndarray, microstep: np.ndarray, pace: np.ndarray, microbatches: np.ndarray
) -> np.ndarray:
    """As many microbatches per stage as its critical cycles need for `pace` [..., candidate] samples per second, as far as
    there are microbatches [candidate, stage]; never fewer samples than the stage below holds. [..., candidate, stage]."""
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
    """[candidate, stage]: seconds that stages of so many chunks wait in a step. Microbatches pass a chunk
    `passing` one behind the other; the first of them must be round the pipeline before the next chunk is begun, the way
    from the last stage to the first being as long as the longest between two."""
    between = p2p_seconds.sum(axis=1, keepdims=True)
    longest = p2p_seconds.max(axis=1, initial=0.0, keepdims=True)
    waits = (stages.microbatch.sum(axis=1, keepdims=True) - stages.microbatch) / chunks + 2 * between
    for seconds in (stages.forward, stages.backward):
        ahead = ((passing * seconds).max(axis=1, keepdims=True) - seconds.sum(axis=1, keepdims=True)) / chunks
        waits += (chunks - 1) * np.maximum(0.0, between + longest - ahead)
    return waits


def sent_until_back(until_back: np.ndarray, forward: np.ndarray, microstep: np.ndarray) -> np.ndarray:
    """[candidate, stage]: how many microbatches reach a stage, one behind the other at the pace of the slowest forward on
    the way, until the first is back `until_back` seconds after its own; `forward` are seconds of a microbatch. A stage that
    holds so many never waits for a backward: where stages are alike it is what ZB-H2 holds (arXiv 2401.10241)."""
    apart = np.maximum.accumulate(forward / microstep, axis=1) * microstep
    return 1 + np.ceil(until_back / np.maximum(apart, 1e-12) - 1e-6)
