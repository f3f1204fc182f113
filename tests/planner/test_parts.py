"""The pieces of the search by themselves: exact divisions, short cuts that must agree with the full way, estimates."""

import math
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.candidate.samples import Worker, divide, earliest_finish, largest_able
from hethub.planner.candidate.settings import MOST_DEGREES, Line, degree_choices, degrees_by_kind, micro_batch_choices
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.memory_model import PROBE, MemoryModel, Mode, _Probe
from hethub.planner.estimate.microbatch_sizes import even, fitted, resized
from hethub.planner.evaluate.evaluator import AlikeLayout, Incumbent, is_alike, is_equal, raised
from hethub.planner.explain.scaled import Scale, scaled
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.partition import DEADLINES, Partitioner, Setting
from hethub.planner.generate.small import ordered_partitions
from hethub.planner.generate.table import tabulate
from hethub.planner.plan import answer
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor import memory, predict
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from tests.oracle.test_auto import MODEL, random_cluster
from tests.planner.test_plan import TINY, cluster

workers = st.builds(
    lambda b, first, more: Worker(b, tuple(first + more * i for i in range(b))),
    st.integers(1, 4),
    st.floats(0.5, 4.0),
    st.floats(0.1, 2.0),
)


@settings(deadline=None)
@given(st.lists(workers, min_size=2, max_size=3), st.integers(3, 12))
def test_samples_are_divided_with_the_earliest_finish(given_workers, total):
    counts = divide(total, given_workers)
    assert sum(counts) == total
    assert min(counts) >= 1
    found = max(w.seconds(n) for w, n in zip(given_workers, counts, strict=True))
    choices = (c for c in product(range(1, total + 1), repeat=len(given_workers)) if sum(c) == total)
    best = min(max(w.seconds(n) for w, n in zip(given_workers, c, strict=True)) for c in choices)
    assert found <= best * (1 + 1e-6)


@given(st.lists(st.floats(0.5, 4.0), min_size=2, max_size=3), st.integers(3, 12))
def test_the_earliest_finish_is_that_of_the_best_division(per_sample, total):
    choices = (c for c in product(range(1, total + 1), repeat=len(per_sample)) if sum(c) == total)
    best = min(max(n * seconds for n, seconds in zip(c, per_sample, strict=True)) for c in choices)
    own = np.array([[*per_sample, 1.0], [*per_sample, 9.0]])
    numbers = np.array([*(1 for _ in per_sample), 0])  # a sort that the case has not
    for case in (earliest_finish(total, own, numbers), earliest_finish(total, own[:, :-1], numbers[:-1])):
        assert (case <= best * (1 + 1e-6)).all()
        assert (case >= best * (1 - 1e-6)).all()


def test_the_largest_that_is_able_is_found():
    assert [largest_able(lambda n, top=top: n <= top, 9) for top in (0, 1, 5, 9, 12)] == [0, 1, 5, 9, 9]


def test_ordered_partitions_are_all_of_them():
    assert len(ordered_partitions((1, 1, 1, 1))) == 75  # the ordered Bell number
    assert ordered_partitions((2,)) == (((1,), (1,)), ((2,),))


def busiest(problem, costs, setting, layers, sizes):
    """Seconds of the slowest stage under the smallest deadline that its units' whole samples meet."""
    position, slowest = 0, 0.0
    for stage, (held, size) in enumerate(zip(layers, sizes, strict=True)):
        seconds = []
        for unit in setting.line[position : position + size]:
            size_of = setting.micro_batches[unit.kind]
            microbatch = costs.rate(unit.kind, unit.tp, size_of, setting.recompute).microbatch(
                held, stage == 0, stage == len(layers) - 1
            )
            seconds.append(microbatch.total / size_of)
        ends = sorted(n * one for one in seconds for n in range(1, problem.batch.global_batch + 1))
        enough = (end for end in ends if sum(int(end / one + 1e-9) for one in seconds) >= problem.batch.global_batch)
        position, slowest = position + size, max(slowest, next(enough))
    return slowest


def cuts_of(total, parts):
    """All ways to write the total as so many positive numbers."""
    inner = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in pairwise((0, *edges, total))) for edges in inner]


@pytest.mark.parametrize("numbers", [(5, 0), (3, 2)])
def test_partitions_meet_the_first_deadline_that_any_of_their_depth_meets(numbers):
    nodes = [node for node in (("amd", numbers[0], 0.05, 4.0), ("nvidia", numbers[1], 0.1, 4.0)) if node[1]]
    problem = pose(TINY, cluster(*nodes), Batch(12, 64, "fp32"))
    costs, kinds = UnitCosts(problem), tuple(range(len(nodes)))
    setting = Setting(Line(kinds, 1).units(problem, (1,) * len(kinds)), (2,) * len(kinds), "none")
    partitioner = Partitioner(problem, costs, setting)
    found = {len(partition.stages): partition for partition in partitioner.partitions(range(1, 6), float("inf"))}
    assert len(found) > 2
    for depth, partition in found.items():
        layers, sizes = zip(*partition.stages, strict=True)
        assert (sum(layers), sum(sizes)) == (TINY.layers, 5)
        assert busiest(problem, costs, setting, layers, sizes) <= partition.deadline_seconds * (1 + 1e-9)
        best = min(
            busiest(problem, costs, setting, held, units)
            for held, units in product(cuts_of(TINY.layers, depth), cuts_of(5, depth))
        )
        later = [step for step in DEADLINES if partitioner.bound_seconds * step >= best * (1 - 1e-9)]
        assert partition.deadline_seconds == partitioner.bound_seconds * later[0]


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_cuts_into_stages_of_one_kind_are_balanced_as_well_as_any_other_layers(stages):
    nodes = cluster(("amd", 4, 0.05, 4.0), ("nvidia", 2, 0.1, 4.0))
    problem = pose(TINY.replace(layers=9), nodes, Batch(16, 64, "fp32"), ConstraintsSpec(pp=stages))
    costs = UnitCosts(problem)
    found = best_cuts(problem, tabulate(problem, costs), 20, memory_counts=False).pure
    assert len(found) > 4
    for entry in found:
        combination, sizes = entry.combination, [entry.line.replicas] * stages
        units = entry.line.units(problem, combination.degrees)
        setting = Setting(units, combination.micro_batches, combination.recompute)
        others = (busiest(problem, costs, setting, layers, sizes) for layers in cuts_of(9, stages))
        assert busiest(problem, costs, setting, entry.layers, sizes) <= min(others) * (1 + 1e-5)


def mixed():
    return pose(TINY, cluster(("amd", 2, 0.05, 4.0), ("nvidia", 2, 0.1, 4.0)), Batch(16, 64, "fp32"))


def every_plan(problem, number=40):
    incumbent = Incumbent(problem, UnitCosts(problem))
    entries = best_cuts(problem, tabulate(problem, incumbent.costs), number).cuts
    return [v for v in (incumbent(entry.candidate(problem)) for entry in entries) if v is not None]


def kind_of(problem, replica):
    return next(index for index, kind in enumerate(problem.kinds) if replica.ranks[0] in kind.ranks)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 5)])
def test_plans_with_too_few_microbatches_in_flight_are_raised_to_the_default(sizes):
    problem = pose(TINY, cluster(("amd", 2, 0.1, 4.0), ("nvidia", 2, 0.1, 4.0)), Batch(24, 64, "fp32"))
    candidate = Candidate(
        tuple(CandidateStage(3, (ReplicaGroup(kind, 1, size, 2),)) for kind, size in enumerate(sizes))
    )
    plan = Incumbent(problem, UnitCosts(problem))(candidate).plan
    low = plan.replace(
        stages=tuple(
            stage.replace(replicas=tuple(replica.replace(in_flight=1) for replica in stage.replicas))
            for stage in plan.stages
        )
    )
    with pytest.raises(BadInput, match="in_flight is 1"):
        bind(low, problem.model, problem.cluster)
    held = bind(raised(low), problem.model, problem.cluster).in_flight
    assert held[1] == [1, 1]  # enough where nothing waits
    assert min(held[0]) > 1


def test_a_plan_is_evaluated_once_for_all_candidates_that_mean_it():
    problem = mixed()
    incumbent = Incumbent(problem, UnitCosts(problem))
    (evaluation, *_) = [v for v in every_plan(problem) if len(v.plan.stages) == 1]
    one, other = (incumbent(replace(evaluation.candidate, alike=alike)) for alike in (True, False))
    assert one.plan is other.plan
    assert one.prediction is other.prediction
    assert one.candidate != other.candidate
    assert incumbent.candidates == 2


def test_microbatches_in_flight_of_alike_plans_need_no_dealing():
    problem = pose(
        TINY, cluster(("amd", 2, 0.1, 4.0), ("nvidia", 2, 0.1, 4.0)), Batch(16, 64, "fp32"), ConstraintsSpec(tp=1, pp=2)
    )
    seen = 0
    for evaluation in every_plan(problem):
        if is_equal(evaluation.plan):
            short = AlikeLayout(evaluation.plan, problem.model, problem.cluster).in_flight
            assert short == bind(evaluation.plan, problem.model, problem.cluster).in_flight
            seen += len(evaluation.plan.stages) > 1
    assert seen > 1


def test_unit_costs_are_the_predictors():
    problem = mixed()
    for evaluation in every_plan(problem, 12):
        layout = bind(evaluation.plan, problem.model, problem.cluster)
        full, last = PlanCosts(layout, HETHUB, packaged()), layout.num_stages - 1
        costs = UnitCosts(problem)
        for s, stage in enumerate(evaluation.candidate.stages):
            for r, replica in enumerate(evaluation.plan.stages[s].replicas):
                rate = costs.rate(kind_of(problem, replica), replica.tp, replica.micro_batch, stage.recompute)
                mine, theirs = (
                    rate.microbatch(stage.layers, s == 0, s == last),
                    full.microbatch(s, r, replica.micro_batch),
                )
                assert mine.forward == pytest.approx(theirs.forward.total, rel=1e-6)
                assert mine.backward == pytest.approx(theirs.backward.total, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_memory_model_are_the_predictors_memory(tied):
    model = ModelSpec(
        name="m", layers=9, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=1024, max_seq_len=256, tied_head=tied
    )
    problem = pose(model, cluster(("amd", 4, 0.05, 4.0), ("nvidia", 4, 0.1, 4.0)), Batch(16, 128, "bf16"))
    for evaluation in every_plan(problem, 60):
        stages = evaluation.plan.stages
        found = memory(bind(evaluation.plan, model, problem.cluster))
        in_flight = bind(evaluation.plan, model, problem.cluster).in_flight
        for s, stage in enumerate(stages):
            replica = stage.replicas[0]
            place = 3 if len(stages) == 1 else 0 if s == 0 else 2 if s == len(stages) - 1 else 1
            kind = kind_of(problem, replica)
            coefficients = problem.coefficients(kind, replica.tp, replica.micro_batch, stage.recompute)
            shards = len(stage.replicas) if stage.zero else 1
            mine = coefficients.fixed(stage.num_layers, in_flight[s][0], place)
            mine += coefficients.state(stage.num_layers, place) / shards
            assert mine == pytest.approx(found[replica.ranks[0]].bytes, rel=0.03)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_zero_bubble_keeps_what_1f1b_does_and_what_it_puts_off(recompute):
    memory_model = MemoryModel(TINY, 128, "bf16")

    def probe(mode):
        return _Probe(memory_model, PROBE, 2, 4, recompute, mode)._ranks(2, (2, 2, 2), 2)

    assert probe(Mode(1, "zero_bubble")) == probe(Mode(1))
    one, four = (memory_model.coefficients(PROBE, 2, size, recompute, Mode(1, "zero_bubble")) for size in (1, 4))
    assert (four.layer_deferred_wgrad == 4 * one.layer_deferred_wgrad).all()
    assert one.layer_deferred_wgrad.min() > 0
    assert (four.once == memory_model.coefficients(PROBE, 2, 4, recompute, Mode(1)).once).all()


def test_the_estimate_is_near_the_prediction():
    problem = mixed()
    incumbent = Incumbent(problem, UnitCosts(problem))
    for evaluation in every_plan(problem, 20):
        if is_alike(evaluation.plan):
            assert incumbent.estimator.seconds(evaluation.candidate) == pytest.approx(evaluation.seconds, rel=0.25)


def test_faster_links_and_compute_never_make_the_best_plan_slower():
    problem = mixed()
    best = answer(problem)
    better = problem.on(
        scaled(problem.cluster, Scale(compute={k.accelerator.name: 1.1 for k in problem.kinds}, in_node=1.1))
    )
    assert answer(better).seconds <= best.seconds


@given(st.integers(1, 200), st.integers(1, 64))
def test_even_microbatches_are_as_many_and_as_equal_as_can_be(samples, size):
    found = even(samples, size)
    assert -(-samples // found) == -(-samples // size)
    assert found == 1 or -(-samples // (found - 1)) > -(-samples // found)


def test_resized_microbatches_change_in_number_and_no_further_than_asked():
    problem = mixed()
    estimator = Incumbent(problem, UnitCosts(problem)).estimator
    for entry in best_cuts(problem, tabulate(problem, estimator.costs), 20).cuts:
        candidate = entry.candidate(problem)
        for step in (-1, 0, 1):
            changed = resized(candidate, [(0, None)], estimator, step)
            assert changed.stages[1:] == candidate.stages[1:]
            assert changed.shape == candidate.shape
            taken = estimator.samples(candidate, 0)
            for before, after, most in zip(candidate.stages[0].groups, changed.stages[0].groups, taken, strict=True):
                assert (after.micro_batch - min(before.micro_batch, most)) * step >= 0


def test_candidates_over_memory_are_made_to_fit_with_the_largest_microbatches():
    model = TINY.replace(layers=8, hidden=512, ffn=2048, max_seq_len=2048)
    problem = pose(model, cluster(("amd", 2, 0.1, 16.0), ("nvidia", 2, 0.1, 16.0)), Batch(256, 2048, "fp32"))
    incumbent = Incumbent(problem, UnitCosts(problem))
    incumbent.microbatches_left = 10**6
    found = 0
    for entry in best_cuts(problem, tabulate(problem, incumbent.costs), 60, memory_counts=False).cuts:
        candidate = entry.candidate(problem)
        if incumbent.estimator.likely_fits(candidate) or (smaller := fitted(candidate, incumbent.estimator)) is None:
            continue
        found += 1
        evaluation = incumbent(smaller)
        assert evaluation is not None
        assert all(entry.bytes <= 1.03 * entry.limit for entry in evaluation.prediction.memory)
        assert smaller.shape == candidate.shape
    assert found


def test_a_plan_over_memory_is_predicted_only_where_it_is_the_closest_or_asked_for():
    problem = pose(TINY, cluster(("amd", 2, 0.05, 0.001), ("nvidia", 2, 0.1, 0.001)), Batch(16, 64, "fp32"))
    incumbent = Incumbent(problem, UnitCosts(problem))
    candidates = [
        Candidate(tuple(CandidateStage(3, (ReplicaGroup(kind, 1, size, 2),)) for kind in range(2)))
        for size in (2, 4, 1)
    ]
    evaluations = [incumbent(candidate) for candidate in candidates]
    assert incumbent.closest is evaluations[2]
    assert not incumbent.fitting
    assert [evaluation and "prediction" in vars(evaluation) for evaluation in evaluations] == [True, False, True]
    second = evaluations[1]
    assert second is not None
    assert second.fullness > 1
    reserve = problem.constraints.reserve
    assert second.prediction == predict(bind(second.plan, problem.model, problem.cluster), reserve=reserve)


def test_where_kinds_are_many_not_every_combination_is_made() -> None:
    """Eleven kinds of which each may have one of two degrees and micro-batches: a table of 786,112 rows, else."""
    problem = pose(MODEL.replace(layers=32), random_cluster(0, 16), Batch(256, 512, "bf16"))
    sizes = micro_batch_choices(problem)
    assert all(len(set(choice)) == 1 for choice in sizes)
    assert len(degree_choices(problem)) <= MOST_DEGREES
    wide = problem.cluster.replace(nodes=tuple(node.replace(accelerators=8) for node in problem.cluster.nodes))
    many = pose(MODEL, wide, Batch(1024, 512, "bf16"))
    own, chosen = degrees_by_kind(many), degree_choices(many)
    assert math.prod(map(len, own)) > MOST_DEGREES >= len(chosen)
    assert all(degree in some for choice in chosen for degree, some in zip(choice, own, strict=True))
    assert {(kind, degree) for choice in chosen for kind, degree in enumerate(choice)} == {
        (kind, degree) for kind, some in enumerate(own) for degree in some
    }
