"""The ranks of a collective, by where they are, and what their islands send each other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Literal, NamedTuple

Operation = Literal["reduce_scatter", "all_gather", "all_reduce"]
UNEVEN = 1.25  # times what even parts take: Cephalo's figure (arXiv 2411.01075)


class Exchanged(NamedTuple):
    """What an island sends to the others and receives from them, as fractions of a collective's bytes."""

    sent: float
    received: float


@dataclass(frozen=True)
class Group:
    """Where the ranks of a collective are: how many on each machine, and on each island; and of what they sum or gather
    the part that each island's ranks own."""

    size: int
    machines: tuple[tuple[int, int], ...]  # (machine, ranks of the group on it)
    islands: tuple[tuple[str, int], ...]
    owned: tuple[float, ...] = ()  # fractions by island, in their order; empty: every rank as much
    joined: bool = True  # whether the link of each one's accelerator reaches the others on its machine

    @cached_property
    def most_per_machine(self) -> int:
        return max([count for _, count in self.machines])

    def exchanged(self, operation: Operation, island: str) -> Exchanged:
        """What all ranks of an island exchange with the others; of an all-reduce, half of it.

        As `hethub/communicator/bridge/routes.py` does it. Partials travel to who owns their sum: an island sends what others
        own, and receives what it owns from every other one; a gather is the mirror image. An all-reduce cuts the data
        into equal parts whatever ranks own.
        """
        others = len(self.islands) - 1
        if operation == "all_reduce":
            return Exchanged(others / (others + 1), others / (others + 1))
        own = self._owned_by[island]
        reduced = Exchanged(1.0 - own, others * own)
        return reduced if operation == "reduce_scatter" else Exchanged(*reduced[::-1])

    def of_ranks(self, island: str, ranks: int = 1) -> float:
        """Of what an island exchanges, the part that so many of its ranks relay: equal parts."""
        return ranks / self._ranks_of[island]

    def exchanged_between(
        self, operation: Operation, place_of: Mapping[int, tuple[str, str]]
    ) -> Counter[tuple[str, str]]:
        """What islands exchange by the places that it leaves and enters, as if every rank had a part for each of the
        others'; `place_of` tells a machine's island and place."""
        ranks = Counter[tuple[str, str]]()
        for machine, count in self.machines:
            ranks[place_of[machine]] += count
        found = Counter[tuple[str, str]]()
        for (island, here), (other, there) in permutations(ranks, 2):
            if island != other:
                owner = {"reduce_scatter": other, "all_gather": island}.get(operation)
                part = 1.0 / len(self.islands) if owner is None else self._owned_by[owner]
                both = self.of_ranks(island, ranks[island, here]) * self.of_ranks(other, ranks[other, there])
                found[here, there] += part * both  # type: ignore[assignment]
        return found

    @cached_property
    def _ranks_of(self) -> dict[str, int]:
        return dict(self.islands)

    @cached_property
    def _owned_by(self) -> dict[str, float]:
        owned = self.owned or tuple(ranks / self.size for _, ranks in self.islands)
        return {island: own for (island, _), own in zip(self.islands, owned, strict=True)}
