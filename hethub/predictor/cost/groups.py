"""Where the ranks of a collective are, and what their islands send each other."""

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


class Owned(NamedTuple):
    """The fractions that a group's ranks own of what they sum or gather, in the group's order."""

    by_island: tuple[float, ...]
    by_machine: tuple[float, ...]
    most: tuple[float, ...]  # of one rank of each machine


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: how many are on each machine and on each island, and which parts they own of what they sum or
    gather."""

    size: int
    machines: tuple[tuple[int, int], ...]  # (machine, ranks of the group on it)
    islands: tuple[tuple[str, int], ...]
    owned: Owned | None = None  # every rank as much
    joined: bool = True  # whether the link of each one's accelerator reaches the others on its machine

    @cached_property
    def most_per_machine(self) -> int:
        return max([count for _, count in self.machines])

    def exchanged(self, operation: Operation, island: str, machine: int) -> Exchanged:
        """Return what the ranks on one machine of an island exchange with other islands; for an all-reduce, half of it.

        It follows `hethub/communicator/bridge/routes.py`. Partial sums go to the rank that owns the sum. So an island sends
        what ranks of others own, each of its ranks an equal part, and each rank receives what it owns from every other
        island. A gather is the reverse. An all-reduce divides the data equally, whatever ranks own.
        """
        ranks, owned, _ = self._on[machine]
        return self._exchanged(operation, island, ranks / self._ranks_of[island], owned)

    def exchanged_at_most(self, operation: Operation, island: str, machine: int) -> Exchanged:
        """Return what the rank on that machine exchanges that owns the most."""
        _, _, most = self._on[machine]
        return self._exchanged(operation, island, 1.0 / self._ranks_of[island], most)

    def _exchanged(self, operation: Operation, island: str, part: float, owned: float) -> Exchanged:
        """Return what ranks exchange that send the fraction `part` of what their island sends, and own the fraction `owned`."""
        others = len(self.islands) - 1
        if operation == "all_reduce":
            return Exchanged(part * others / (others + 1), part * others / (others + 1))
        reduced = Exchanged(part * (1.0 - self._owned_by[island]), others * owned)
        return reduced if operation == "reduce_scatter" else Exchanged(*reduced[::-1])

    def exchanged_between(
        self, operation: Operation, place_of: Mapping[int, tuple[str, str]]
    ) -> Counter[tuple[str, str]]:
        """Return what islands exchange, by the places from which and to which it goes. Each rank is taken to have a part for
        each rank of other islands. `place_of` gives the island and place of a machine."""
        relayed, owned = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for machine, (ranks, own, _) in self._on.items():
            island, place = place_of[machine]
            relayed[island, place] += ranks / self._ranks_of[island]  # type: ignore[assignment]
            owned[island, place] += own  # type: ignore[assignment]
        found = Counter[tuple[str, str]]()
        for here, there in permutations(relayed, 2):
            if here[0] != there[0]:
                sent = owned[here] if operation == "all_gather" else relayed[here]
                received = owned[there] if operation == "reduce_scatter" else relayed[there]
                equal = 1.0 / len(self.islands) if operation == "all_reduce" else 1.0
                found[here[1], there[1]] += sent * received * equal  # type: ignore[assignment]
        return found

    @cached_property
    def _owned(self) -> Owned:
        if self.owned is not None:
            return self.owned
        islands, machines = ([ranks / self.size for _, ranks in own] for own in (self.islands, self.machines))
        return Owned(tuple(islands), tuple(machines), (1.0 / self.size,) * len(machines))

    @cached_property
    def _ranks_of(self) -> dict[str, int]:
        return dict(self.islands)

    @cached_property
    def _owned_by(self) -> dict[str, float]:
        return {island: own for (island, _), own in zip(self.islands, self._owned.by_island, strict=True)}

    @cached_property
    def _on(self) -> dict[int, tuple[int, float, float]]:
        """For each machine: how many ranks it has, what they own, and the most that one of them owns."""
        return {
            machine: (ranks, own, most)
            for (machine, ranks), own, most in zip(self.machines, self._owned.by_machine, self._owned.most, strict=True)
        }
