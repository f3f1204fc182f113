"""Communication one layer ahead of, or behind, the compute that hides it: what of it a pass still shows."""

from collections.abc import Sequence


def exposed(compute: float, beside: Sequence[float]) -> float:
    """Seconds that a pass takes beyond its `compute`, spread evenly over its layers, where `beside[i]` seconds of
    communication go on during layer i and must end before the next: two slots of memory allow one gather ahead and one
    reduction behind, no more."""
    layer = compute / len(beside)
    return sum(max(0.0, seconds - layer) for seconds in beside)


def excess(communication: float, compute: float, layers: int) -> float:
    """Seconds of communication that go beyond a pass where all of it may be under way at once, layer after layer in the
    order of the pass, whose first layer hides none."""
    return max(0.0, communication - compute * (layers - 1) / layers) if layers > 1 else communication


def beside_forward(gathers: Sequence[float]) -> list[float]:
    """What goes on beside each layer of a forward: the next layer's gather; beside the last, the next microbatch's
    first."""
    return [*gathers[1:], gathers[0]]


def beside_backward(gathers: Sequence[float], reductions: Sequence[float]) -> list[float]:
    """The same of a backward, layers in the order in which it passes them (both arguments too): the next layer's
    weights come while the gradients of the layer before are summed."""
    return [g + r for g, r in zip(beside_forward(gathers), [reductions[-1], *reductions[:-1]], strict=True)]
