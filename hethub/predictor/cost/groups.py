"""The ranks of a collective, by where they are, and what their islands send each other."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Operation = Literal["reduce_scatter", "all_gather", "all_reduce"]


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

    @cached_property
    def _ranks_of(self) -> dict[str, int]:
        return dict(self.islands)

    @cached_property
    def _owned_by(self) -> dict[str, float]:
        owned = self.owned or tuple(ranks / self.size for _, ranks in self.islands)
        return {island: own for (island, _), own in zip(self.islands, owned, strict=True)}
