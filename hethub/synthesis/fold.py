"""Equal layers: which operators repeat earlier ones, so that the search decides for all of them at once."""

import numpy as np

from hethub.synthesis.graph import Graph

SHORTEST = 8  # operators; shorter repetitions save nothing


def repeated(graph: Graph) -> list[int]:
    """By operator, the earliest one that it repeats, itself where it repeats none.

    Layers are found as what they are: stretches of operators that are the stretch before them once more, with the same
    arguments and shapes.
    """
    first = list(range(len(graph.operators)))
    kinds = _kinds(graph)
    free = np.ones(len(kinds), dtype=bool)
    while (found := _longest(kinds, free)) is not None:
        start, period, length = found
        for place in range(start + period, start + period + length):
            first[place] = start + (place - start) % period
        free[start : start + period + length] = False
    return first


def repeated_parameters(graph: Graph, first: list[int]) -> dict[str, str]:
    """By parameter, the first of those that stand in its place in operators that repeat each other, itself where none
    does. Forward repeats its first layer and backward, which begins at the end, its last."""
    names = {tensor: name for name, tensor in graph.parameters.items()}
    groups = {name: {name} for name in graph.parameters}
    for operator, earlier in zip(graph.operators, first, strict=True):
        for tensor, other in zip(operator.inputs, graph.operators[earlier].inputs, strict=True):
            if tensor in names and other in names:
                joined = groups[names[tensor]] | groups[names[other]]
                groups.update(dict.fromkeys(joined, joined))
    order = {name: number for number, name in enumerate(graph.parameters)}
    return {name: min(group, key=order.__getitem__) for name, group in groups.items()}


def _kinds(graph: Graph) -> np.ndarray:
    """Per operator a number that operators share which do the same to tensors of the same shapes."""
    numbers: dict[tuple[object, ...], int] = {}
    told = (
        (o.key, repr(o.args), repr(o.kwargs), o.is_forward, *graph.shapes_in(o), *graph.shapes_out(o))
        for o in graph.operators
    )
    return np.array([numbers.setdefault(kind, len(numbers)) for kind in told])


def _longest(kinds: np.ndarray, free: np.ndarray) -> tuple[int, int, int] | None:
    """Of the stretches that repeat what lies `period` before them at least once in whole: the start of what they
    repeat, the period, and their length; the longest."""
    best: tuple[int, int, int] | None = None
    for period in range(SHORTEST, len(kinds) // 2 + 1):
        alike = (kinds[period:] == kinds[:-period]) & free[period:] & free[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], alike.astype(np.int8), [0]))))
        lengths = edges[1::2] - edges[::2]
        if not lengths.size:
            continue
        place = int(lengths.argmax())
        length = int(lengths[place])
        if length >= period and (best is None or length > best[2]):
            best = int(edges[2 * place]), period, length
    return best
