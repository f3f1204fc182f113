"""The ranks of a collective, by where they are."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Group:
    """Where the ranks of a collective are: how many on each machine, and on each island."""

    size: int
    machines: tuple[tuple[int, int], ...]  # (machine, ranks of the group on it)
    islands: tuple[tuple[str, int], ...]

    @cached_property
    def most_per_machine(self) -> int:
        return max([count for _, count in self.machines])

    def exchanged(self, num_bytes: float, island: str, ranks: int = 1) -> float:
        """What so many ranks of an island send to the others of a reduce-scatter or an all-gather of `num_bytes`."""
        return num_bytes * (len(self.islands) - 1) / 2 * ranks / self._ranks_of[island]

    @cached_property
    def _ranks_of(self) -> dict[str, int]:
        return dict(self.islands)
