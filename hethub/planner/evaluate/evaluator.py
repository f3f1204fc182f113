"""The judge: every plan the search considers is bound and predicted here, each once, with full cost."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from hethub.planner.candidate.candidate import Draft
from hethub.planner.candidate.materialize import complete
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Surrogate
from hethub.planner.generate.table import Table, tabulate
from hethub.planner.problem.problem import Problem
from hethub.predictor import Prediction, RankMemory, predict, rank_memory
from hethub.predictor.memory.ranks import all_fit
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.in_flight import raised_limits


@dataclass(frozen=True, eq=False)
class Verdict:
    """A plan with the draft it came from, its ranks' memory and whether they fit, and its prediction."""

    draft: Draft
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
        """Made when first asked for: of most plans that do not fit nobody asks for it."""
        return self.predicted()

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    def of(self, draft: Draft) -> "Verdict":
        """The same of another draft that means the same plan."""
        return replace(self, draft=draft, predicted=partial(getattr, self, "prediction"))


def is_alike(plan: PlanSpec) -> bool:
    """Whether nothing needs dealing: all stages have the same replicas, of equal microbatches or with microbatches in
    flight given."""
    if plan.schedule not in ("1f1b", "gpipe") or any(map(plan.runs_in_rounds, range(len(plan.stages)))):
        return False
    first = [(replica.micro_batch, replica.samples) for replica in plan.stages[0].replicas]
    if any([(r.micro_batch, r.samples) for r in stage.replicas] != first for stage in plan.stages[1:]):
        return False
    return len(set(first)) == 1 or all(r.in_flight for stage in plan.stages for r in stage.replicas)


def is_equal(plan: PlanSpec) -> bool:
    """Whether all replicas of all equally wide stages have the same samples in the same microbatches."""
    microbatches = {(len(stage.replicas), r.micro_batch, r.samples) for stage in plan.stages for r in stage.replicas}
    return len(microbatches) == 1


class AlikeLayout(Layout):
    """The layout of a plan that `is_alike`, its microbatches in flight known without dealing thousands of microbatches.

    With equal microbatches everywhere a replica holds as many as there are stages from its own to the last. `bind`
    checks the answer in full before it is given.
    """

    @cached_property
    def in_flight(self) -> list[list[int]]:
        stages = self.plan.stages
        if self.plan.schedule == "gpipe":
            return [[-(-r.samples // r.micro_batch) for r in stage.replicas] for stage in stages]
        return [
            [min(r.in_flight or len(stages) - index, -(-r.samples // r.micro_batch)) for r in stage.replicas]
            for index, stage in enumerate(stages)
        ]

    @property
    def actor_limits(self) -> list[list[int]]:  # every replica is an actor of its own
        return self.in_flight


def layout_of(plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> Layout:
    """The plan's layout, by the short way where it is alike. Raises BadInput where it does not bind."""
    return AlikeLayout(plan, model, cluster) if is_alike(plan) else bind(plan, model, cluster)


def raised(plan: PlanSpec) -> PlanSpec:
    """The plan with the default of microbatches in flight wherever it gives too few."""
    stages = []
    for index, (stage, limits) in enumerate(zip(plan.stages, raised_limits(plan), strict=True)):
        held = limits * len(stage.replicas) if plan.runs_in_rounds(index) else limits
        own = zip(stage.replicas, held, strict=True)
        stages.append(
            stage.replace(replicas=tuple([replica.replace(in_flight=microbatches) for replica, microbatches in own]))
        )
    return plan.replace(stages=tuple(stages))


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


SMALL_REPLAY = 1_000  # microbatches: always replayed


class Judge:
    """Binds and predicts drafts. Counts what it judged, keeps the best that fit, and watches the time limit."""

    def __init__(
        self, problem: Problem, costs: UnitCosts, *, ignore_memory: bool = False, surrogate: Surrogate | None = None
    ) -> None:
        self.problem, self.costs, self.ignore_memory = problem, costs, ignore_memory
        self.surrogate = surrogate or Surrogate(problem, costs)
        self.started = time.perf_counter()
        self.limit_seconds = problem.constraints.time_limit_seconds
        self.microbatches_left = 0  # to be replayed one by one
        self._known: dict[Draft, Verdict | None] = {}
        self._by_plan: dict[tuple[bool, str], Verdict | None] = {}
        self.fitting: dict[Draft, Verdict] = {}
        self.start: Verdict | None = None  # the best before the search
        self.closest: Verdict | None = None  # the least over memory, where none fits
        self.space_bound_seconds: float | None = None  # no plan of a space that was searched to its end is faster

    @cached_property
    def table(self) -> Table:
        """All combinations of degrees, micro-batches and recompute, as arrays."""
        return tabulate(self.problem, self.costs)

    @property
    def candidates(self) -> int:
        """How many drafts were judged."""
        return len(self._known)

    @property
    def out_of_time(self) -> bool:
        return self.limit_seconds is not None and time.perf_counter() - self.started > self.limit_seconds

    def __call__(self, draft: Draft) -> Verdict | None:
        """The verdict on a draft, or None where it is no valid plan."""
        if draft not in self._known:
            verdict = self._known[draft] = self._judge(draft)
            if verdict is not None:
                self._note(verdict)
        return self._known[draft]

    def within_time(self, draft: Draft) -> Verdict | None:
        """The verdict on a draft unless time is up, or None."""
        return None if self.out_of_time else self(draft)

    def may_win(self, draft: Draft) -> bool:
        """Whether the draft's busiest replica computes less than the best plan takes: else it is proved to be
        slower."""
        return self.best is None or self.surrogate.least(draft) < self.best.seconds

    def _judge(self, draft: Draft) -> Verdict | None:
        holds = self.surrogate.holds(draft) if draft.roomy else None
        plan = draft.plan or complete(draft, self.problem, self.costs, holds)
        if plan is None or not keeps(plan, self.problem.constraints) or self.problem.forbids_any(draft.mixtures):
            return None
        key = (draft.roomy, plan.model_dump_json())  # what is roomy may be given more microbatches in flight
        if key in self._by_plan:  # of another draft
            known = self._by_plan[key]
            return known and known.of(draft)
        if not is_alike(plan) and not self._spend(plan):
            return None
        found = self._by_plan[key] = self._judge_plan(draft, plan)
        return found

    def _judge_plan(self, draft: Draft, plan: PlanSpec) -> Verdict | None:
        """The verdict on a draft's plan, or None where it does not bind."""
        problem, reserve = self.problem, self.problem.constraints.reserve
        try:
            layout = self._layout(draft, plan)
            used = tuple(rank_memory(layout))
            predicted = partial(predict, layout, reserve=reserve, profile=problem.profile, used=used)
            verdict = Verdict(draft, layout.plan, used, all_fit(layout, used, reserve), predicted)
            if verdict.fits or self.ignore_memory or draft.plan or self._is_closest(verdict):
                _ = verdict.prediction
        except BadInput:  # too few microbatches in flight, heads that do not divide, or a link without a speed: no plan
            return None
        return verdict

    def _layout(self, draft: Draft, plan: PlanSpec) -> Layout:
        """The layout of a draft's plan; of a roomy draft with more microbatches in flight where those estimated cannot
        be. Raises BadInput where it does not bind."""
        model, cluster = self.problem.model, self.problem.cluster
        try:
            return layout_of(plan, model, cluster)
        except BadInput:
            if not draft.roomy:
                raise
            return layout_of(raised(plan), model, cluster)

    def _spend(self, plan: PlanSpec) -> bool:
        """Whether the microbatches of a plan that must be dealt and replayed are still within what this search may
        spend. Of equal replicas one is replayed."""
        microbatches = sum(-(-r.samples // r.micro_batch) for stage in plan.stages for r in stage.replicas)
        if is_equal(plan):
            microbatches //= len(plan.stages[0].replicas)
        if self.fitting and microbatches > max(self.microbatches_left, SMALL_REPLAY):
            return False
        self.microbatches_left -= microbatches
        return True

    def _note(self, verdict: Verdict) -> None:
        if verdict.fits or self.ignore_memory:
            self.fitting[verdict.draft] = verdict
        elif self._is_closest(verdict):
            self.closest = verdict

    def _is_closest(self, verdict: Verdict) -> bool:
        return self.closest is None or verdict.fullness < self.closest.fullness

    def better(self, one: Verdict | None, other: Verdict | None) -> bool:
        """Whether `one` is to be preferred: it fits and the other does not, or it is faster, or less over memory."""
        if one is None or other is None:
            return one is not None
        return self._rank(one) < self._rank(other)

    def _rank(self, verdict: Verdict) -> tuple[bool, float]:
        fits = verdict.fits or self.ignore_memory
        return (not fits, verdict.seconds if fits else verdict.fullness)

    def discard(self, verdict: Verdict) -> None:
        """Takes a plan out that turned out not to bind."""
        self.fitting.pop(verdict.draft, None)

    def admit(self, other: "Judge") -> None:
        """Takes over what another judge of the same problem judged."""
        self._known.update(other._known)
        self.fitting.update(other.fitting)

    def mark_start(self) -> None:
        """Remembers the best so far as what the search started from."""
        self.start = self.best

    @property
    def estimate_error_percent(self) -> float:
        """The worst disagreement of estimate and prediction over the plans that fit and are near the best."""
        best = self.best
        estimated = [v for v in self.fitting.values() if v.draft.plan is None]
        near = [v for v in estimated if best is not None and v.seconds < 1.25 * best.seconds]
        return max((100.0 * abs(self.surrogate.seconds(v.draft) / v.seconds - 1.0) for v in near), default=0.0)

    @property
    def best(self) -> Verdict | None:
        """The fastest plan that fits."""
        return min(self.fitting.values(), key=lambda verdict: verdict.seconds, default=None)

    @property
    def best_seconds(self) -> float:
        """The step of the fastest plan that fits; infinite where none does."""
        return self.best.seconds if self.best else float("inf")
