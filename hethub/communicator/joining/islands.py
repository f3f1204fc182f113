"""Which ranks form which island: pure arithmetic, no torch.

Inside a group ranks are counted from 0 in group order. Islands keep the order they are given in: it is the order in
which their partial sums are added, on every rank.
"""

from collections.abc import Sequence

from hethub.spec.errors import BadInput

Islands = tuple[tuple[int, ...], ...]


def parse_islands(text: str, size: int) -> Islands:
    """Islands from `0,1|2,3`. Raises BadInput unless every rank below `size` is named once."""
    try:
        islands = [[int(rank) for rank in part.split(",")] for part in text.split("|")]
    except ValueError:
        raise BadInput(
            f"HETHUB_ISLANDS={text!r} is not a list of ranks per island; write e.g. '0,1|2,3' for two islands."
        ) from None
    return check_islands(islands, size)


def check_islands(islands: Sequence[Sequence[int]], size: int) -> Islands:
    """The islands, ranks ascending inside each. Raises BadInput unless they hold each rank of the world once."""
    named = sorted(rank for island in islands for rank in island)
    if named != list(range(size)) or not all(islands):
        raise BadInput(
            f"the islands {[list(island) for island in islands]} do not hold each of the ranks 0 to {size - 1} exactly"
            " once; name every rank of the world in one island."
        )
    return tuple(tuple(sorted(island)) for island in islands)


def islands_by_label(labels: Sequence[str]) -> Islands:
    """Ranks with the same label together, islands in order of their lowest rank."""
    grouped: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        grouped.setdefault(label, []).append(rank)
    return tuple(tuple(ranks) for ranks in grouped.values())


def restrict(islands: Islands, members: Sequence[int]) -> Islands:
    """The islands of a group: its members by their position in the group, empty islands left out."""
    position = {rank: index for index, rank in enumerate(members)}
    inside = (tuple(sorted(position[rank] for rank in island if rank in position)) for island in islands)
    return tuple(island for island in inside if island)


def island_index(islands: Islands, rank: int) -> int:
    return next(index for index, island in enumerate(islands) if rank in island)


def lower_bound_bridge_elements(islands: Islands, num_elements: int) -> int:
    """The least number of elements all islands together send over bridges for an all-reduce: 2n(k-1).

    Each island but one must contribute to, and receive, every element; k = 2 gives n each way.
    """
    return 2 * num_elements * (len(islands) - 1)
