"""Pipelines of equal tiles without a node per tile: when every stage works, waits and ends its last backward.

Plans whose stages all tile the samples alike are chains: each replica talks to one replica per neighbour only, and
once its steady state repeats, the rest of the micro-batches is a multiplication. `hethub.predictor.replay` gives the
same figures, action by action.
"""

from typing import NamedTuple

from hethub.predictor.replay import Programme, idle_times, replay


class Ends(NamedTuple):
    """One replica's compute as replayed: its last backward, and why it waited before."""

    last_backward_start: float
    last_backward_end: float
    transfer_wait_seconds: float  # waiting while data it needs was under way
    bubble_seconds: float  # waiting for others to compute


class Chain(NamedTuple):
    """A pipeline of equal tiles: per stage seconds of forward and backward, per boundary seconds each way."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    down: tuple[float, ...]  # activations from stage s to s + 1
    up: tuple[float, ...]  # gradients from stage s + 1 to s
    in_flight: tuple[int, ...]
    begins: tuple[float, ...] = ()  # when each stage's first forward may start; at 0 where not given


def pipeline(chain: Chain, num_tiles: int) -> list[Ends]:
    """Per stage, the ends of 1F1B over `num_tiles` equal tiles.

    A critical circuit through k stages repeats every k tiles at most, so 60 tiles are a whole number of repeats for up
    to six stages; beyond, only circuits longer than that, made of transfers slower than compute, are approximated.
    """
    stages = len(chain.forward)
    period = 60 if stages <= 6 else 4
    warm = 2 * stages + 2 * max(chain.in_flight)
    if num_tiles <= warm + 2 * period:
        return _run_chain(chain, num_tiles)
    rest = num_tiles - warm
    base = warm + rest % period
    first, second = _run_chain(chain, base), _run_chain(chain, base + period)
    repeats = (num_tiles - base) // period
    return [
        Ends(*(a + repeats * (b - a) for a, b in zip(one, two, strict=True)))
        for one, two in zip(first, second, strict=True)
    ]


def _run_chain(chain: Chain, num_tiles: int) -> list[Ends]:
    """Every action of a chain, replica by replica as far as its inputs allow."""
    stages = len(chain.forward)
    forwards: list[list[float]] = [[] for _ in range(stages)]  # by stage, when each of its tiles was forward
    backwards: list[list[float]] = [[] for _ in range(stages)]
    clock = list(chain.begins) or [0.0] * stages
    waits, bubbles = [0.0] * stages, [0.0] * stages
    last, pending = stages - 1, list(range(stages))
    while pending:
        for s in pending:
            limit, now = min(chain.in_flight[s], num_tiles), clock[s]
            above, down = (forwards[s - 1], chain.down[s - 1]) if s else (None, 0.0)
            below, up = (backwards[s + 1], chain.up[s]) if s < last else (None, 0.0)
            forward, backward = chain.forward[s], chain.backward[s]
            own_forwards, own_backwards = forwards[s], backwards[s]
            f, b = len(own_forwards), len(own_backwards)
            while b < num_tiles:
                if goes_ahead := f < num_tiles and f - b < limit:
                    inputs, index, under_way = above, f, down
                else:
                    inputs, index, under_way = below, b, up
                if inputs is not None:
                    if index == len(inputs):
                        break
                    idle = inputs[index] + under_way - now
                    if idle > under_way:
                        waits[s] += under_way
                        bubbles[s] += idle - under_way
                    elif idle > 0.0:
                        waits[s] += idle
                    if idle > 0.0:
                        now = inputs[index] + under_way
                if goes_ahead:
                    now += forward
                    own_forwards.append(now)
                    f += 1
                else:
                    now += backward
                    own_backwards.append(now)
                    b += 1
            clock[s] = now
        pending = [s for s in pending if len(backwards[s]) < num_tiles]
    return [Ends(clock[s] - chain.backward[s], clock[s], waits[s], bubbles[s]) for s in range(stages)]


def interleaved(chain: Chain, num_tiles: int, chunks: int) -> list[Ends]:
    """Per stage, the ends of Megatron's interleaved 1F1B: each stage holds `chunks` parts of the model in turn.

    Long runs are extrapolated from two short ones (arXiv 2104.04473, §2.2: tiles go in groups as large as the pipeline).
    """
    stages = len(chain.forward)
    if num_tiles % stages:
        return pipeline(chain, num_tiles)
    groups = num_tiles // stages
    if groups <= 4:
        return _run_interleaved(chain, num_tiles, chunks)
    first, second = _run_interleaved(chain, 3 * stages, chunks), _run_interleaved(chain, 4 * stages, chunks)
    return [
        Ends(*(a + (groups - 3) * (b - a) for a, b in zip(one, two, strict=True)))
        for one, two in zip(first, second, strict=True)
    ]


def _run_interleaved(chain: Chain, num_tiles: int, chunks: int) -> list[Ends]:
    stages = len(chain.forward)
    virtual = stages * chunks
    last, total = virtual - 1, num_tiles * chunks
    wrap = max(chain.down)
    down = [chain.down[v % stages] if v % stages < stages - 1 else wrap for v in range(last)]
    tile = lambda v, i: v * num_tiles + i  # noqa: E731
    back = lambda v, i: (virtual + v) * num_tiles + i  # noqa: E731
    orders = []
    for s in range(stages):
        group = lambda k: (k % (stages * chunks)) // stages  # noqa: E731
        index = lambda k: k // (stages * chunks) * stages + k % stages  # noqa: E731
        forwards = [tile(group(k) * stages + s, index(k)) for k in range(total)]
        backwards = [back((chunks - 1 - group(k)) * stages + s, index(k)) for k in range(total)]
        warm = min((stages - s - 1) * 2 + (chunks - 1) * stages, total)
        order = forwards[:warm]
        for k in range(total - warm):
            order += (forwards[warm + k], backwards[k])
        orders.append(order + backwards[total - warm :])
    programme = Programme(orders=orders)
    for v in range(virtual):
        above = [(v - 1, down[v - 1])] if v else []
        programme.seconds += [chain.forward[v % stages] / chunks] * num_tiles
        programme.needs += [[(tile(u, i), under_way) for u, under_way in above] for i in range(num_tiles)]
    for v in range(virtual):
        behind = [(v + 1, down[v])] if v < last else []
        programme.seconds += [chain.backward[v % stages] / chunks] * num_tiles
        programme.needs += [[(back(u, i), under_way) for u, under_way in behind] for i in range(num_tiles)]
    return _ends(programme, stages)


def _ends(programme: Programme, stages: int) -> list[Ends]:
    """The ends of the first `stages` actors, whose last node is a backward."""
    ends, found = replay(programme), []
    for s in range(stages):
        last = programme.orders[s][-1]
        idle = idle_times(programme, ends, s)
        under_way = [min(seconds, max(0.0, delay)) for _, seconds, _, delay in idle]
        bubble = sum(seconds for _, seconds, _, _ in idle) - sum(under_way)
        found.append(Ends(ends[last] - programme.seconds[last], ends[last], sum(under_way), bubble))
    return found
