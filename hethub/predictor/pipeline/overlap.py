"""The seconds of a microbatch's passes, and how much of their communication compute cannot hide.

Weights are gathered one layer ahead of the compute that needs them, and gradients are summed behind it."""

from collections.abc import Sequence
from itertools import islice, pairwise
from operator import add
from typing import NamedTuple


class Parts(NamedTuple):
    """The seconds of one pass of one microbatch, by what they are spent on."""

    compute: float
    tp: float
    dp: float  # gathers and reductions inside the pass (ZeRO-2/3) that compute does not hide

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.dp


class MicrobatchCost(NamedTuple):
    """One microbatch on one replica: its forward, its backward, and its weights' gradients where these are put off. `rest` is
    what is left, after the last microbatch of all, of the sums before the last layer's."""

    forward: Parts
    backward: Parts
    weight: Parts = Parts(0.0, 0.0, 0.0)
    rest: Parts = Parts(0.0, 0.0, 0.0)


class Visit(NamedTuple):
    """One layer in one pass: the seconds of its compute, of gathering its weights, of summing its gradients afterwards, and
    of messages that are under way when it begins. `layer` is None where no weights are needed."""

    compute: float
    gather: float = 0.0
    reduction: float = 0.0
    messages: float = 0.0
    layer: int | None = None

    def brings(self, after: "Visit") -> float:
        """Return the seconds to gather the weights of the visit `after` this one, 0 if it is of the same layer."""
        return 0.0 if self.layer is not None and self.layer == after.layer else after.gather

    def bringing(self, ahead: float, cost: float = 0.0) -> "Visit":
        """Return the visit as it runs: it gathers for `ahead` seconds for the visit behind it. Each second of collectives beside
        compute makes both longer by `cost`."""
        collectives = ahead + self.reduction
        longer = cost * min(collectives, self.compute)
        part = 1.0 + longer / collectives if longer else 1.0
        return self._replace(compute=self.compute + longer, gather=part * ahead, reduction=part * self.reduction)


class LayerLink:
    """The state of the link on which a stage's layers are gathered and summed, from pass to pass: until when it is `taken`, when
    the weights asked for last are there, when the last two sums end, and when the last one began.

    It follows the executor (hethub/runtime/state/zero.py). A visit that begins asks for the weights of the next one, and
    when it ends, its sum begins. A visit waits for its weights and, if it adds to gradients, for all sums but the last.
    """

    def __init__(self) -> None:
        self.taken, self.ready, self.sums, self.summing = 0.0, 0.0, (0.0, 0.0), 0.0

    def through(self, now: float, visits: Sequence[Visit]) -> tuple[float, list[float]]:
        """Run visits that may begin `now`. Return when they end, and how late each begins after the compute before it."""
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
    """The communication of a visit or a pass: its seconds, and how many of them no compute hides."""

    seconds: float
    exposed_seconds: float


def shown(visits: Sequence[Visit], rounds: float = 1) -> tuple[list[Shown], float]:
    """Return the mean communication of each visit over `rounds` rounds, one after another, and how many seconds of the sum
    before the last are left at the end.

    A visit's exposed seconds are those by which it begins after the compute before it has ended. The very first visit has
    its weights already. All rounds from the third on are taken to be like the fourth: if two sums under way ever delay a
    round, they delay that one."""
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
    """Whether any of these visits may have to wait for communication that takes longer than the compute beside it."""
    return sum(max(own) for own in list(zip(*visits, strict=True))[1:4]) > min(visit.compute for visit in visits)


Ends = tuple[tuple[float, float], tuple[float, float]]  # forward and backward of the embedding, and of the head
NO_ENDS: Ends = ((0.0, 0.0), (0.0, 0.0))


class Round(NamedTuple):
    """The visits of one microbatch: of its forward, its backward, and its weights' gradients where these are put off."""

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
        """Make the visits from the seconds of whole passes, of collectives and of messages. `ends`, embedding and head, are
        added to the first and the last layer. `gathers` (of the forward and of the backward) and `reductions` are by layer,
        in model order."""
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
        """Return the mean communication of each visit of each pass over `rounds` rounds, and what is left of sums at the end.
        Either each forward is followed by a backward (`turns`), or all forwards come first."""
        forward, backward, deferred = self
        found = [shown(run, rounds) for run in ([[*forward, *backward, *deferred]] if turns else [forward, backward])]
        each = iter([own for visits, _ in found for own in visits])
        return [list(islice(each, len(visits))) for visits in self], found[-1][1]


def exposed(compute: float, beside: Sequence[float]) -> float:
    """Return by how many seconds a pass exceeds its `compute`, which is spread evenly over its layers, if `beside[i]` seconds
    of communication overlap with layer i and must end before the next one begins."""
    layer = compute / len(beside)
    return sum(max(0.0, seconds - layer) for seconds in beside)


def excess(communication: float, compute: float, layers: int) -> float:
    """Return by how many seconds communication exceeds a pass if nothing waits for it layer by layer. The pass's first layer
    hides none of it."""
    return max(0.0, communication - compute * (layers - 1) / layers) if layers > 1 else communication
