"""What generators may ask about costs. `Estimator` answers; a generator knows no more of it than this."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from hethub.planner.candidate.candidate import Candidate, ReplicaGroup
from hethub.planner.estimate.costs import UnitCosts


class CostModel(Protocol):
    """Seconds and bytes of candidates and of what they are made of, before any plan is bound."""

    unit_costs: UnitCosts  # of microbatches, layers and links

    def estimate(self, candidates: Iterable[Candidate]) -> list[float]:
        """The estimated step of each. Asking for them again is for nothing."""

    def seconds(self, candidate: Candidate) -> float:
        """The same of one."""

    def least(self, candidate: Candidate) -> float:
        """Seconds that no prediction of the candidate is below, whatever the schedule."""

    def least_in_passes(self, candidate: Candidate) -> float:
        """The same where every replica gathers new weights and steps between its microbatches, as under ministages."""

    def likely_fits(self, candidate: Candidate) -> bool:
        """Whether every rank is within its memory, or so near that only an evaluation can tell."""

    def samples(self, candidate: Candidate, index: int) -> list[int]:
        """About how many samples each of a stage's replicas takes, by groups."""

    def collective(self, groups: Sequence[ReplicaGroup]) -> tuple[float, float]:
        """Seconds of a reduce-scatter or an all-gather over replicas: of any, and more per byte."""
