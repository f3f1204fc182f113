"""Who sends which range to whom between islands, where it is added and in which order: pure arithmetic, no torch.

Every rank relays its own part of the data, whatever the order of ranks and the sizes of islands. Two islands swap their
partials: one hop, and both add the same numbers. With three and more, every island owns an equal share of the data:
partials travel to the owner, which adds them, and the total travels back, so that an all-reduce of n elements sends
2n(k-1) over all bridges, the least possible. A reduce-scatter's partials travel to the rank that asks for their total.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hethub.communicator.joining.islands import Islands, island_index
from hethub.spec.ranges import Range, from_sizes, merge, overlap, split

Message = tuple[int, Range]
"""A rank of another island, or this rank itself, and what it is told or tells."""


class Partial(NamedTuple):
    """A range of which a rank makes its island's sum; `readers` add parts of it."""

    piece: Range
    readers: list[Message]

    def only_reader(self, rank: int) -> int | None:
        """The one rank beside `rank` that gets all of it, None where there are several."""
        others = [message for message in self.readers if message[0] != rank]
        return others[0][0] if len(others) == 1 and others[0][1] == self.piece else None


class Total(NamedTuple):
    """A range of which a rank makes the sum over islands: of what `holders` have, one per island in islands' order."""

    piece: Range
    holders: tuple[int, ...]
    readers: tuple[int, ...] = ()
    """The ranks of other islands that are told."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """What one rank does of an exchange between islands. Messages between two ranks are in ascending order."""

    rank: int
    held: Sequence[Sequence[Range]]
    """Per rank the ranges of which it makes its island's sum, empty ones too."""
    partials: list[Partial]
    expected: list[Message]
    """The partials that come from other islands."""
    totals: list[Total]
    returned: list[Message]
    """The totals that come from other islands."""
    returns: bool
    """Whether totals travel back at all, in this exchange, to any rank."""

    @property
    def mine(self) -> Range:
        """What this rank asks for: its part of an all-reduce, its range of a reduce-scatter."""
        return self.held[self.rank][0]


def all_reduce_route(islands: Islands, parts: Sequence[Range], rank: int) -> Route:
    """`parts` gives every rank its part of its island's partial; the parts of each island cover the same whole."""
    mine, home = parts[rank], island_index(islands, rank)
    readers, expected, totals, returned = [], [], [], []
    returns = len(islands) != 2
    for piece, holders, _ in _totals(mine, [[(r, parts[r]) for r in _seen_from(rank, island)] for island in islands]):
        shares = [share.shift(piece.start) for share in split(piece.size, len(islands))] if returns else [piece, piece]
        others = tuple(holder for holder in holders if holder != rank)
        owned = [(holder, share) for holder, share in zip(holders, shares, strict=True) if share]
        readers += owned
        if shares[home]:
            expected += [(holder, shares[home]) for holder in others]
            totals.append(Total(shares[home], holders, others if returns else ()))
        if returns:
            returned += [(holder, share) for holder, share in owned if holder != rank]
    return Route(
        rank=rank,
        held=[[part] for part in parts],
        partials=[Partial(mine, readers)] if mine else [],
        expected=expected,
        totals=totals,
        returned=returned,
        returns=returns,
    )


def reduce_scatter_route(islands: Islands, ranges: Sequence[Range], rank: int) -> Route:
    """Every rank gets the total of its range; foreign ranges' partials are made by the ranks that carry them."""
    carried, mine = carried_pieces(islands, ranges), ranges[rank]
    others = [r for island in islands if rank not in island for r in island]
    partials = []
    for piece in carried[rank]:
        owners = [(r, common) for r in others if (common := overlap(piece, ranges[r]))]
        partials.append(Partial(piece, owners))
    if mine:
        partials.append(Partial(mine, [(rank, mine)]))
    expected = [(r, piece) for r in others for piece in intersect(carried[r], mine)]
    held = [[(r, p) for r, p in [*expected, (rank, mine)] if r in island] for island in islands]
    return Route(
        rank=rank,
        held=[[own, *pieces] for own, pieces in zip(ranges, carried, strict=True)],
        partials=partials,
        expected=expected,
        totals=_totals(mine, held),
        returned=[],
        returns=False,
    )


@dataclass(frozen=True, kw_only=True)
class GatherRoute:
    """What one rank does of an all-gather: every range crosses to each other island once, in parts, and is spread
    there."""

    held: Sequence[Sequence[Range]]
    """Per rank its own range, empty or not, then what it carries for its island."""
    sent: list[Message]
    expected: list[Message]


def gather_route(islands: Islands, ranges: Sequence[Range], rank: int) -> GatherRoute:
    """Every rank's range reaches all ranks; what ranks of other islands own is carried in equal parts."""
    carried = carried_pieces(islands, ranges)
    others = [r for island in islands if rank not in island for r in island]
    return GatherRoute(
        held=[[own, *pieces] for own, pieces in zip(ranges, carried, strict=True)],
        sent=[(r, piece) for r in others for piece in intersect(carried[r], ranges[rank])],
        expected=[(r, piece) for r in others for piece in intersect(carried[rank], ranges[r])],
    )


def island_parts(islands: Islands, whole: Range) -> list[Range]:
    """Return for each rank its equal part of `whole` inside its island. Each island covers all of it."""
    parts = [whole] * sum(map(len, islands))
    for island in islands:
        part_size = -(-whole.size // len(island))  # what a native reduce-scatter gives: all equal but the last
        for place, rank in enumerate(island):
            start = min(whole.stop, whole.start + place * part_size)
            parts[rank] = Range(start, min(whole.stop, start + part_size))
    return parts


def carried_pieces(islands: Islands, ranges: Sequence[Range]) -> list[list[Range]]:
    """Return for each rank the pieces that it relays for its island: an equal part of what ranks of other islands own."""
    carried: list[list[Range]] = [[] for _ in ranges]
    for island in islands:
        foreign = merge(ranges[rank] for other in islands if other is not island for rank in other)
        for rank, pieces in zip(island, split_pieces(foreign, len(island)), strict=True):
            carried[rank] = pieces
    return carried


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


def intersect(pieces: Iterable[Range], whole: Range) -> list[Range]:
    """What of `pieces` lies in `whole`, in order."""
    return [common for piece in pieces if (common := overlap(piece, whole))]


def _seen_from(rank: int, island: Sequence[int]) -> Sequence[int]:
    """The ranks of the island whose partials meet at `rank`: of its own island only its own."""
    return [rank] if rank in island else island


def _totals(whole: Range, held: Sequence[Sequence[Message]]) -> list[Total]:
    """`whole` cut where the holder in an island changes; `held` says per island which rank holds which range."""
    cuts: list[tuple[Range, tuple[int, ...]]] = [(whole, ())]
    for of_island in held:
        cuts = [
            (common, (*holders, rank))
            for piece, holders in cuts
            for rank, part in of_island
            if (common := overlap(piece, part))
        ]
    return [Total(*cut) for cut in sorted(cuts)]
