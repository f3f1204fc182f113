"""What a microbatch's passes take; and of communication one layer ahead of, or behind, the compute that hides it, what a
pass still shows."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple


class Parts(NamedTuple):
    """Seconds of one pass of one microbatch by what they are spent on."""

    compute: float
    tp: float
    dp: float  # gathers and reductions inside the pass (ZeRO-2/3) that compute does not hide

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.dp


class MicrobatchCost(NamedTuple):
    """Forward and backward of one microbatch on one replica; where weight gradients are put off, they are apart."""

    forward: Parts
    backward: Parts
    weight: Parts = Parts(0.0, 0.0, 0.0)


class Visit(NamedTuple):
    """A layer in one pass: seconds of its compute, of gathering its weights, of summing its gradients behind it, and of
    messages that are under way when it begins."""

    compute: float
    gather: float = 0.0
    reduction: float = 0.0
    messages: float = 0.0


def delays(visits: Sequence[Visit], under_way: int = 2) -> list[float]:
    """By visit of a cycle that is under way, seconds from the end of the compute before it to its own.

    As an executor does them (hethub/runtime/state/zero.py): a visit that begins announces the next one, whose weights then
    come, and starts the sum of the layer before, all in one order on one link. A visit waits for its weights. Behind what adds to
    gradients the next one also waits until fewer than `under_way` sums are left.
    """
    if sum(map(max, [*zip(*visits, strict=True)][1:])) <= min(visits).compute:
        return [0.0] * len(visits)
    found, now, link, sums = list[float](), 0.0, 0.0, [0.0, 0.0]
    for before, visit, after in zip(*(_cycles(visits, at) for at in (-1, 0, 1)), strict=True):
        ready = link = max(link, now) + visit.messages + after.gather
        if before.reduction:
            link += before.reduction
            sums.append(link)
        computed = now + visit.compute
        now = max(
            computed, ready if after.gather else 0.0, sums[-under_way] if visit.reduction or after.reduction else 0.0
        )
        found.append(now - computed)
    last = found[-len(visits) :]
    return [last[-1], *last[:-1]]


def _cycles(visits: Sequence[Visit], shifted: int) -> list[Visit]:
    """The visits twice, for the second time as every other time, each with the one so far from it."""
    return [*visits[shifted:], *visits[:shifted]] * 2


Ends = tuple[tuple[float, float], tuple[float, float]]  # forward and backward of the embedding, and of the head
NO_ENDS: Ends = ((0.0, 0.0), (0.0, 0.0))


class Shown(NamedTuple):
    """Of a pass, the seconds of its communication, and those that no compute hides."""

    seconds: float
    exposed_seconds: float


class Round(NamedTuple):
    """A microbatch's visits: forward, backward, and the weights' gradients where these are put off."""

    passes: tuple[list[Visit], list[Visit], list[Visit]]
    sums_under_way: int

    @classmethod
    def of(
        cls,
        passes: Sequence[float],
        ends: Ends,
        gathers: Sequence[Sequence[float]],
        reductions: Sequence[float],
        messages: float,
        sums_under_way: int = 2,
    ) -> "Round":
        """From the seconds of whole passes, of which `ends` come with the first and the last layer, of each layer's
        collectives, all in model order (`gathers` of the forward and of the backward), and of a pass's messages."""
        layers = len(reductions)
        forward, backward, deferred = ([seconds / layers] * layers for seconds in passes)
        for kind, each in ((0, forward), (1, backward)):
            own = [end[kind] for end in ends]
            each[:] = [(passes[kind] - sum(own)) / layers] * layers
            each[0] += own[0]
            each[-1] += own[1]
        none, defers_wgrad = [0.0] * layers, passes[2] > 0
        return cls((
            [*map(Visit, forward, gathers[0], none, [messages, *none[1:]])],
            [*map(Visit, backward, gathers[1], none if defers_wgrad else reductions, [*none[1:], messages])][::-1],
            [*map(Visit, deferred, none, reductions, none)][::-1] if defers_wgrad else [],
        ), sums_under_way)  # fmt: skip

    def turning(self) -> list[Shown]:
        """Where a backward comes behind each forward and a forward behind that, as 1F1B goes on: of each pass. The layer at
        which it turns keeps its weights."""
        forward, backward, deferred = self.passes
        stays = [visits[0]._replace(gather=0.0) for visits in (forward, backward)]
        first = forward[0] if deferred else stays[0]
        return self._shown([first, *forward[1:]], [stays[1], *backward[1:]], deferred)

    def repeating(self) -> list[Shown]:
        """The same where forwards follow each other, and backwards."""
        forward, *behind = self.passes
        return self._shown(forward) + self._shown(*behind)

    def _shown(self, *passes: list[Visit]) -> list[Shown]:
        waits = iter(delays([visit for visits in passes for visit in visits], self.sums_under_way))
        return [
            Shown(sum(visit.gather + visit.reduction for visit in visits), sum(islice(waits, len(visits))))
            for visits in passes
        ]


def exposed(compute: float, beside: Sequence[float]) -> float:
    """Seconds that a pass takes beyond its `compute`, spread evenly over its layers, where `beside[i]` seconds of
    communication go on during layer i and must end before the next."""
    layer = compute / len(beside)
    return sum(max(0.0, seconds - layer) for seconds in beside)


def excess(communication: float, compute: float, layers: int) -> float:
    """Seconds of communication that go beyond a pass where all of it may be under way at once, layer after layer in the
    order of the pass, whose first layer hides none."""
    return max(0.0, communication - compute * (layers - 1) / layers) if layers > 1 else communication
