"""What a microbatch's passes take; and of communication one layer ahead of, or behind, the compute that hides it, what a
pass still shows."""

from collections.abc import Sequence
from itertools import islice, pairwise
from operator import add
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
    """Forward and backward of one microbatch on one replica; where weight gradients are put off, they are apart. Behind the
    last of all, sums before the last layer's have a rest of their way to go."""

    forward: Parts
    backward: Parts
    weight: Parts = Parts(0.0, 0.0, 0.0)
    rest: Parts = Parts(0.0, 0.0, 0.0)


class Visit(NamedTuple):
    """A layer in one pass: seconds of its compute, of gathering its weights, of summing its gradients behind it, and of
    messages that are under way when it begins. `layer` is None where it needs no weights."""

    compute: float
    gather: float = 0.0
    reduction: float = 0.0
    messages: float = 0.0
    layer: int | None = None

    def brings(self, after: "Visit") -> float:
        """Seconds to gather the weights of the visit `after` it, which are there if it is the same layer's."""
        return 0.0 if self.layer is not None and self.layer == after.layer else after.gather

    def bringing(self, ahead: float, cost: float = 0.0) -> "Visit":
        """The same in a run: its gather is what it brings ahead, for the visit behind it. A second of collectives beside compute
        makes both longer by `cost`."""
        collectives = ahead + self.reduction
        longer = cost * min(collectives, self.compute)
        part = 1.0 + longer / collectives if longer else 1.0
        return self._replace(compute=self.compute + longer, gather=part * ahead, reduction=part * self.reduction)


class LayerLink:
    """What passes of a stage leave to those behind them: until when the link is `taken` on which layers are gathered and summed
    in one order, when the weights that were announced last are there, when the last two sums are, and when the last one began.

    As an executor does them (hethub/runtime/state/zero.py): a visit that begins announces the next one, whose weights are
    brought then; its sum starts when it ends. The next visit waits for its weights, and if it adds to gradients for all sums
    but one.
    """

    def __init__(self) -> None:
        self.taken, self.ready, self.sums, self.summing = 0.0, 0.0, (0.0, 0.0), 0.0

    def through(self, now: float, visits: Sequence[Visit]) -> tuple[float, list[float]]:
        """When visits that may begin `now` are over, each with what it brings; and how late each begins behind the compute
        before it."""
        late, taken, ready, sums = [], self.taken, self.ready, self.sums
        for compute, gather, reduction, messages, _ in visits:
            begun = max(now, ready, sums[0]) if reduction else max(now, ready)
            late.append(begun - now)
            taken = max(taken, begun) + messages + gather
            ready = taken if gather else 0.0
            now = begun + compute
            if reduction:
                self.summing = max(taken, now)
                taken = self.summing + reduction
                sums = sums[1], taken
        self.taken, self.ready, self.sums = taken, ready, sums
        return now, late


class Shown(NamedTuple):
    """Of a visit or a pass, the seconds of its communication, and those that no compute hides."""

    seconds: float
    exposed_seconds: float


def shown(visits: Sequence[Visit], rounds: float = 1) -> tuple[list[Shown], float]:
    """By visit, the mean over so many rounds of them, one behind the other; it is late by what is exposed, behind the compute
    before it. And the seconds that are left in the end of the sum before the last. The first of all has its weights. From the
    third on all rounds count as the fourth, which two sums under way hold up if they hold up any."""
    run = [*visits] * (4 if rounds > 1 else 1)
    brought = [0.0, *(before.brings(visit) for before, visit in pairwise(run)), 0.0]
    late, left = [0.0] * len(run), 0.0
    if binds(visits):
        link = LayerLink()
        end, late = link.through(0.0, list(map(Visit.bringing, run, brought[1:])))
        *_, before, last = 0.0, 0.0, *filter(None, (visit.reduction for visit in run))
        left = min(before, max(0.0, link.sums[1] - last - end))
    found = list(zip(map(add, brought, [visit.reduction for visit in run]), late, strict=True))
    by_round = [found[at : at + len(visits)] for at in range(0, len(run), len(visits))]
    if rounds == 1:
        return [Shown(*own) for own in by_round[0]], left
    return [
        Shown(*(later + (first + second - 2 * later) / rounds for first, second, _, later in zip(*own, strict=True)))
        for own in zip(*by_round, strict=True)
    ], left


def binds(visits: Sequence[Visit]) -> bool:
    """Whether any of these may wait for communication, which may take longer than the compute that is beside it."""
    return sum(max(own) for own in list(zip(*visits, strict=True))[1:4]) > min(visit.compute for visit in visits)


Ends = tuple[tuple[float, float], tuple[float, float]]  # forward and backward of the embedding, and of the head
NO_ENDS: Ends = ((0.0, 0.0), (0.0, 0.0))


class Round(NamedTuple):
    """A microbatch's visits: forward, backward, and the weights' gradients where these are put off."""

    forward: list[Visit]
    backward: list[Visit]
    deferred: list[Visit]

    @classmethod
    def of(
        cls,
        passes: Sequence[float],
        ends: Ends,
        gathers: Sequence[Sequence[float]],
        reductions: Sequence[float],
        messages: float,
    ) -> "Round":
        """From the seconds of whole passes, of which `ends` come with the first and the last layer, of each layer's
        collectives, all in model order (`gathers` of the forward and of the backward), and of a pass's messages."""
        layers = len(reductions)
        numbers = range(layers)
        forward, backward, deferred = ([seconds / layers] * layers for seconds in passes)
        for kind, each in ((0, forward), (1, backward)):
            own = [end[kind] for end in ends]
            each[:] = [(passes[kind] - sum(own)) / layers] * layers
            each[0] += own[0]
            each[-1] += own[1]
        none, defers_wgrad = [0.0] * layers, passes[2] > 0
        return cls(
            [*map(Visit, forward, gathers[0], none, [messages, *none[1:]], numbers)],
            [*map(Visit, backward, gathers[1], none if defers_wgrad else reductions, [*none[1:], messages], numbers)][::-1],
            [*map(Visit, deferred, none, reductions, none)][::-1] if defers_wgrad else [],
        )  # fmt: skip

    def shown(self, rounds: float, *, turns: bool) -> tuple[list[list[Shown]], float]:
        """Of each pass, by visit, its mean over so many rounds, where a backward comes behind each forward (`turns`) or all
        forwards come first; and what is left of sums behind the last."""
        forward, backward, deferred = self
        found = [shown(run, rounds) for run in ([[*forward, *backward, *deferred]] if turns else [forward, backward])]
        each = iter([own for visits, _ in found for own in visits])
        return [list(islice(each, len(visits))) for visits in self], found[-1][1]


def exposed(compute: float, beside: Sequence[float]) -> float:
    """Seconds that a pass takes beyond its `compute`, spread evenly over its layers, where `beside[i]` seconds of
    communication go on during layer i and must end before the next."""
    layer = compute / len(beside)
    return sum(max(0.0, seconds - layer) for seconds in beside)


def excess(communication: float, compute: float, layers: int) -> float:
    """Seconds of communication that go beyond a pass where all of it may be under way at once, layer after layer in the
    order of the pass, whose first layer hides none."""
    return max(0.0, communication - compute * (layers - 1) / layers) if layers > 1 else communication
