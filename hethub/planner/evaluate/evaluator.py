"""Evaluates candidates exactly: each is turned into a plan, bound to the cluster, and priced by the predictor."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.candidate.materialize import materialize
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.problem.problem import Problem
from hethub.predictor import Prediction, RankMemory, predict, rank_memory
from hethub.predictor.memory.ranks import all_fit
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.in_flight import is_even


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A plan with the candidate it came from, its ranks' memory and whether they fit, and its prediction."""

    candidate: Candidate
    plan: PlanSpec
    memory: tuple[RankMemory, ...]
    fits: bool
    predicted: Callable[[], Prediction]

    @cached_property
    def fullness(self) -> float:
        """How much the fullest rank needs, as a fraction of its memory."""
        return max([entry.bytes / entry.limit for entry in self.memory])

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction, made when it is first asked for: for most plans that do not fit nobody asks."""
        return self.predicted()

    @property
    def is_predictable(self) -> bool:
        """Whether the plan can be predicted. It cannot with too few microbatches in flight, or over a link without a speed."""
        try:
            _ = self.prediction
        except BadInput:
            return False
        return True

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    def of(self, candidate: Candidate) -> "Evaluation":
        """Return this evaluation for another candidate that means the same plan."""
        return replace(self, candidate=candidate, predicted=partial(getattr, self, "prediction"))


SMALL_REPLAY = 1_000  # plans of no more microbatches are always replayed, whatever is left


class Evaluator:
    """Evaluates the candidates of a problem, each plan once."""

    def __init__(self, problem: Problem, costs: Estimator) -> None:
        self.problem, self.costs = problem, costs
        self.microbatches_left = 0  # how many may still be replayed; it counts once a plan that fits is known
        self._knows_a_fitting = False
        self._known: dict[str, Evaluation | None] = {}  # by plan

    def evaluate(self, candidate: Candidate) -> Evaluation | None:
        """Return the candidate's plan with its memory and prediction, or None where it is no valid plan."""
        problem = self.problem
        holds = self.costs.of(candidate).holds if candidate.extra_in_flight else None
        plan = candidate.plan or materialize(candidate, problem, self.costs.unit_costs.worker, holds)
        if plan is None or not self.is_allowed(candidate, plan):
            return None
        key = plan.model_dump_json()
        if key in self._known:  # of another candidate
            known = self._known[key]
            return known and known.of(candidate)
        if not self._may_replay(plan):
            return None
        found = self._known[key] = self._evaluate(candidate, plan)
        self._knows_a_fitting |= found is not None and found.fits
        return found

    def is_allowed(self, candidate: Candidate, plan: PlanSpec) -> bool:
        """Whether a candidate's plan keeps to the constraints."""
        return keeps(plan, self.problem.constraints) and not self.problem.forbids_any(candidate.mixtures)

    def _evaluate(self, candidate: Candidate, plan: PlanSpec) -> Evaluation | None:
        """Return the evaluation of a candidate's plan, or None where the plan does not bind or cannot be predicted."""
        problem, reserve = self.problem, self.problem.constraints.reserve
        try:
            layout = bind(plan, problem.model, problem.cluster)
            used = tuple(rank_memory(layout))
        except BadInput:  # too few microbatches in flight, or heads that do not divide: no plan
            return None
        predicted = partial(
            predict, layout, reserve=reserve, used=used, profile=problem.profile, software=problem.software
        )
        found = Evaluation(candidate, plan, used, all_fit(layout, used, reserve), predicted)
        wanted = found.fits or candidate.plan is not None
        return None if wanted and not found.is_predictable else found

    def _may_replay(self, plan: PlanSpec) -> bool:
        """Whether this search may still replay so many microbatches as the plan has. Of equal replicas only one is replayed."""
        microbatches = sum(-(-r.samples // r.micro_batch) for stage in plan.stages for r in stage.replicas)
        if is_even(plan):
            microbatches //= len(plan.stages[0].replicas)
        if self._knows_a_fitting and microbatches > max(self.microbatches_left, SMALL_REPLAY):
            return False
        self.microbatches_left -= microbatches
        return True


def keeps(plan: PlanSpec, given: ConstraintsSpec) -> bool:
    """Whether a plan keeps to the constraints on degrees, sizes and modes."""
    replicas = [replica for stage in plan.stages for replica in stage.replicas]
    wide = [stage for stage in plan.stages if len(stage.replicas) > 1]
    pairs: list[tuple[object, Iterable[object]]] = [
        (given.schedule, [plan.schedule]),
        (given.tp, [replica.tp for replica in replicas]),
        (given.pp, [len(plan.stages)]),
        (given.dp, [len(stage.replicas) for stage in plan.stages]),
        (given.micro_batch, [replica.micro_batch for replica in replicas]),
        (given.recompute, [stage.recompute for stage in plan.stages]),
        (given.zero, [stage.zero for stage in wide]),
    ]
    most = given.max_micro_batch or plan.global_batch
    return all(wanted is None or set(found) <= {wanted} for wanted, found in pairs) and all(
        replica.micro_batch <= most for replica in replicas
    )
