"""Compute pipelines of equal microbatches in closed form: when each stage works, waits and ends its last backward.

If all stages divide the samples alike, replicas form chains, in which each talks to only one replica of each neighbouring
stage. Once such a chain repeats itself, the rest of the microbatches is a multiplication.
`hethub.predictor.pipeline.replay` gives the same figures action by action.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.pipeline.replay import NONE, TaskGraph, idle_times, replay

SAME = 1e-12  # of the seconds so far: rounding


class Ends(NamedTuple):
    """What is known of one replica at the end: when its last backward began and ended, and how long it had waited for
    messages under way."""

    last_backward_start: float
    last_backward_end: float
    transfer_wait_seconds: float


class Chain(NamedTuple):
    """A pipeline of equal microbatches: the seconds of a forward and of a backward in each stage, and of a message each way
    over each boundary."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    down: tuple[float, ...]  # activations from stage s to s + 1
    up: tuple[float, ...]  # gradients from stage s + 1 to s
    in_flight: tuple[int, ...]
    begins: tuple[float, ...] = ()  # when each stage's first forward may start; at 0 where not given


def pipeline(chain: Chain, num_microbatches: int, watched: int | None = None) -> list[Ends]:
    """Return the ends of each stage under 1F1B with `num_microbatches` equal microbatches. Waits are counted only of the stage
    that is `watched`. Rounds are run until they repeat; if they never do, all are run."""
    run, held = _Run.begun(chain, num_microbatches), max(chain.in_flight)
    period, seconds = run.go_on_until_it_repeats(num_microbatches - held, num_microbatches)
    done = len(run.backwards[0])
    repeats = (num_microbatches - held - done) // period if period else 0
    later, waits = repeats * seconds, dict.fromkeys(range(len(chain.forward)), 0.0)
    if repeats and watched is not None:
        waits[watched] = repeats * sum(run.transfer_waits(watched)[-period:])
    # How many microbatches there are shows when no more go forward, which no stage has come to.
    shorter = run.ends(num_microbatches - repeats * period, watched)
    return [
        Ends(own.last_backward_start + later, own.last_backward_end + later, own.transfer_wait_seconds + waits[stage])
        for stage, own in enumerate(shorter)
    ]


class _Run(NamedTuple):
    """The state of a chain at work: when each stage is free again, and when each of its microbatches ended its forward and
    its backward.

    It goes in rounds. In each, every stage takes a microbatch backward, from the last stage to the first, and then every
    stage takes the next one forward, from the first to the last. No stage holds fewer microbatches than those below it,
    so in this order everything a stage waits for has been computed before.
    """

    chain: Chain
    clock: list[float]
    forwards: list[list[float]]
    backwards: list[list[float]]

    @staticmethod
    def begun(chain: Chain, num_microbatches: int) -> "_Run":
        """Return the chain after the first forwards of each stage, as many as it holds microbatches."""
        stages = len(chain.forward)
        run = _Run(
            chain, list(chain.begins) or [0.0] * stages, [[] for _ in range(stages)], [[] for _ in range(stages)]
        )
        ready = [0.0] * num_microbatches
        for stage, limit in enumerate(chain.in_flight):
            run.forwards[stage] += _served(ready[:limit], run.clock[stage], chain.forward[stage])
            run.clock[stage] = run.forwards[stage][-1]
            if stage < stages - 1:
                ready = [end + chain.down[stage] for end in run.forwards[stage]]
        return run

    def go_on_until_it_repeats(self, rounds: int, num_microbatches: int) -> tuple[int, float]:
        """Run up to `rounds` rounds, until they repeat: after some number of rounds every stage is later by the same number of
        seconds. Return both numbers, or 0 rounds if they do not repeat.

        What follows a round depends on nothing older than the forwards that a stage has done and the next one has not."""
        pending = 1 + max((a - b for a, b in pairwise(self.chain.in_flight)), default=0)
        most, looked_at = len(self.clock), pending + 2 * len(self.clock)
        while looked_at < rounds:
            self._go_round(looked_at, num_microbatches)
            now = [own[-pending:] for own in self.forwards]
            for period in range(1, most + 1):
                before = [own[-pending - period : -period] for own in self.forwards]
                seconds = now[0][-1] - before[0][-1]
                later = (
                    end - (start + seconds)
                    for own in zip(now, before, strict=True)
                    for end, start in zip(*own, strict=True)
                )
                if all(abs(off) <= SAME * now[0][-1] for off in later):
                    return period, seconds
            looked_at += looked_at // 2
        return 0, 0.0

    def _go_backward(self, num_backward: int) -> None:
        """Take `num_backward` microbatches backward, and none forward."""
        ready = [0.0] * (num_backward - len(self.backwards[-1]))
        for stage in reversed(range(len(self.clock))):
            ends = _served(ready, self.clock[stage], self.chain.backward[stage])
            self.backwards[stage] += ends
            self.clock[stage] = ends[-1]
            if stage:
                ready = [end + self.chain.up[stage - 1] for end in ends]

    def _go_round(self, num_backward: int, num_microbatches: int) -> None:
        """Run a round: each stage takes a microbatch backward, and another one forward if there is one left."""
        chain, clock, forwards = self.chain, self.clock, self.forwards
        upward = list(zip(range(len(clock)), (0.0, *chain.up), chain.backward, self.backwards, strict=True))[::-1]
        columns = (
            range(len(clock)),
            chain.in_flight,
            (0.0, *chain.down),
            chain.forward,
            (None, *forwards[:-1]),
            forwards,
        )
        left = num_microbatches - len(self.backwards[0])
        downward = [row for row in zip(*columns, strict=True) if row[1] < left]
        for microbatch in range(len(self.backwards[0]), num_backward):
            ready = 0.0
            for stage, up, spent, own in upward:
                now = clock[stage]
                if ready > now:
                    now = ready
                clock[stage] = now = now + spent
                own.append(now)
                ready = now + up
            for stage, limit, down, spent, above, own in downward:
                if microbatch + limit < num_microbatches:
                    now = clock[stage]
                    if above is not None:
                        ready = above[microbatch + limit] + down
                        if ready > now:
                            now = ready
                    clock[stage] = now = now + spent
                    own.append(now)

    def ends(self, num_microbatches: int, watched: int | None) -> list[Ends]:
        """Run to the end, and return the ends of each stage. Once no forwards are left, stages are computed one by one."""
        self._go_round(num_microbatches - min(self.chain.in_flight), num_microbatches)
        self._go_backward(num_microbatches)
        waits = [0.0] * len(self.clock)
        if watched is not None:
            waits[watched] = sum(self.transfer_waits(watched))
        backward = self.chain.backward
        return [Ends(stop - spent, stop, wait) for stop, spent, wait in zip(self.clock, backward, waits, strict=True)]

    def transfer_waits(self, stage: int) -> list[float]:
        """Return the seconds that a stage stands idle while a message it waits for is under way, for each of its first forwards
        and then for each round."""
        chain, forwards, backwards = self.chain, self.forwards, self.backwards
        limit, found, last = chain.in_flight[stage], list[float](), len(self.clock) - 1
        now = chain.begins[stage] if chain.begins else 0.0
        for microbatch in range(-limit, len(backwards[stage])):  # backward, and ahead of it by the limit one forward
            waited = 0.0
            if microbatch >= 0:
                if stage < last:
                    under_way = chain.up[stage]
                    waited += min(under_way, max(0.0, backwards[stage + 1][microbatch] + under_way - now))
                now = backwards[stage][microbatch]
            if microbatch + limit < len(forwards[stage]):
                if stage:
                    under_way = chain.down[stage - 1]
                    waited += min(under_way, max(0.0, forwards[stage - 1][microbatch + limit] + under_way - now))
                now = forwards[stage][microbatch + limit]
            found.append(waited)
        return found


def _served(ready: list[float], now: float, spent: float) -> list[float]:
    """Return when each of some pieces of work ends. They are done one after another from `now` on, each takes `spent` seconds
    and begins no earlier than it is `ready`."""
    return [now := (each if each > now else now) + spent for each in ready]


def interleaved(chain: Chain, num_microbatches: int, chunks: int, watched: int | None = None) -> list[Ends]:
    """Return the ends of each stage under Megatron's interleaved 1F1B, in which each stage has `chunks` model chunks.

    Microbatches go in groups of as many as there are stages (arXiv 2104.04473, §2.2), so long runs are extrapolated from
    two short ones.
    """
    stages = len(chain.forward)
    if num_microbatches % stages:
        return pipeline(chain, num_microbatches, watched)
    groups = num_microbatches // stages
    if groups <= 4:
        return _run_interleaved(chain, num_microbatches, chunks)
    first, second = _run_interleaved(chain, 3 * stages, chunks), _run_interleaved(chain, 4 * stages, chunks)
    return [
        Ends(*(a + (groups - 3) * (b - a) for a, b in zip(one, two, strict=True)))
        for one, two in zip(first, second, strict=True)
    ]


def _run_interleaved(chain: Chain, num_microbatches: int, chunks: int) -> list[Ends]:
    stages = len(chain.forward)
    virtual = stages * chunks
    last, total = virtual - 1, num_microbatches * chunks
    wrap = max(chain.down)
    down = [chain.down[v % stages] if v % stages < stages - 1 else wrap for v in range(last)]
    microbatch = lambda v, i: v * num_microbatches + i  # noqa: E731
    back = lambda v, i: (virtual + v) * num_microbatches + i  # noqa: E731
    orders: list[Sequence[int]] = []
    for s in range(stages):
        group = lambda k: (k % (stages * chunks)) // stages  # noqa: E731
        index = lambda k: k // (stages * chunks) * stages + k % stages  # noqa: E731
        forwards = [microbatch(group(k) * stages + s, index(k)) for k in range(total)]
        backwards = [back((chunks - 1 - group(k)) * stages + s, index(k)) for k in range(total)]
        warm = min((stages - s - 1) * 2 + (chunks - 1) * stages, total)
        order = forwards[:warm]
        for k in range(total - warm):
            order += (forwards[warm + k], backwards[k])
        orders.append(order + backwards[total - warm :])
    graph = TaskGraph(orders=orders)
    for v in range(virtual):
        graph.seconds += [chain.forward[v % stages] / chunks] * num_microbatches
        graph.sources += [microbatch(v - 1, i) if v else NONE for i in range(num_microbatches)]
        graph.under_way += [down[v - 1] if v else 0.0] * num_microbatches
    for v in range(virtual):
        graph.seconds += [chain.backward[v % stages] / chunks] * num_microbatches
        graph.sources += [back(v + 1, i) if v < last else NONE for i in range(num_microbatches)]
        graph.under_way += [down[v] if v < last else 0.0] * num_microbatches
    return _ends(graph, stages)


def _ends(graph: TaskGraph, stages: int) -> list[Ends]:
    """Return the ends of the first `stages` actors. The last node of each is a backward."""
    ends, found = replay(graph), []
    for s in range(stages):
        last = graph.orders[s][-1]
        idle = idle_times(graph, ends, s)
        under_way = [min(seconds, max(0.0, delay)) for _, seconds, _, delay in idle]
        found.append(Ends(ends[last] - graph.seconds[last], ends[last], sum(under_way)))
    return found
