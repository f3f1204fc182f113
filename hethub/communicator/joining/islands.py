"""Which ranks form which island, and who relays what between them: pure arithmetic, no torch.

Inside a group ranks are counted from 0 in group order. Islands keep the order they are given in: it is the order in
which their partial sums are added, on every rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hethub.spec.errors import BadInput
from hethub.spec.ranges import Range, from_sizes, merge, overlap, split

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


def split_pieces(pieces: Sequence[Range], parts: int) -> list[list[Range]]:
    """The integers of `pieces`, in the order given, cut into `parts` lists of equal size (the first ones larger by
    1)."""
    sizes = from_sizes([piece.size for piece in pieces])
    lists = []
    for part in split(sum(piece.size for piece in pieces), parts):
        cut = []
        for piece, place in zip(pieces, sizes, strict=True):
            common = overlap(place, part)
            if common:
                cut.append(common.shift(piece.start - place.start))
        lists.append(cut)
    return lists


def carried_pieces(islands: Islands, ranges: Sequence[Range]) -> list[list[Range]]:
    """Per rank, the pieces it relays for its island: an equal part of all that ranks of other islands own."""
    carried: list[list[Range]] = [[] for _ in ranges]
    for island in islands:
        foreign = merge(ranges[rank] for other in islands if other is not island for rank in other)
        for rank, pieces in zip(island, split_pieces(foreign, len(island)), strict=True):
            carried[rank] = pieces
    return carried


def intersect(pieces: Sequence[Range], whole: Range) -> list[Range]:
    """What of `pieces` lies in `whole`, in order."""
    return [common for piece in pieces if (common := overlap(piece, whole))]


class Segment(NamedTuple):
    """A run of elements whose island partials lie at one rank each: `holders` per island; `shares[i]` is island i's."""

    holders: tuple[int, ...]
    shares: tuple[Range, ...]


def held_segments(islands: Islands, parts: Sequence[Range], rank: int) -> list[Segment]:
    """What `rank` holds of its island's partial (`parts[rank]`), cut where the holder in another island changes.

    `parts` gives every rank its part; the parts of each island cover the same whole. Each island owns an equal share of
    every segment: its holder there adds the total and tells the others, so that all islands together send 2n(k-1).
    """
    cuts: list[tuple[Range, tuple[int, ...]]] = [(parts[rank], ())]
    for island in islands:
        cuts = [
            (common, (*holders, other))
            for piece, holders in cuts
            for other in ([rank] if rank in island else island)
            if (common := overlap(piece, parts[other]))
        ]
    return [
        Segment(holders, tuple(share.shift(piece.start) for share in split(piece.size, len(islands))))
        for piece, holders in sorted(cuts)
    ]


def chunked(ranges: Sequence[Range], num_chunks: int) -> list[list[Range]]:
    """`num_chunks` lists: the c-th piece of every range, so that each list is the same problem, smaller."""
    cuts = [[piece.shift(whole.start) for piece in split(whole.size, num_chunks)] for whole in ranges]
    return [list(pieces) for pieces in zip(*cuts, strict=True)]


def lower_bound_bridge_elements(islands: Islands, num_elements: int) -> int:
    """The least number of elements all islands together send over bridges for an all-reduce: 2n(k-1).

    Each island but one must contribute to, and receive, every element; k = 2 gives n each way.
    """
    return 2 * num_elements * (len(islands) - 1)
