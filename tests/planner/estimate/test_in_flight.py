"""Microbatches in flight by estimate: round trips over stages with microbatches of like and unlike sizes, and what
hides them."""

import numpy as np
import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.estimate.in_flight import default_flights, enough_flights, round_trips, slowest_circuit
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from tests.planner.problems import TINY, cluster, incumbent_of


def trips_of(microbatches: list[float], waves: list[int], crossing: list[float]) -> np.ndarray:
    """[s, t] of one candidate."""
    return round_trips(np.array([microbatches]), np.array([waves], dtype=float), np.array([crossing]))[0]


def flights_of(waves: list[int]) -> list[float]:
    return default_flights(np.array([waves], dtype=float))[0].tolist()


def test_like_microbatches_pass_all_stages_and_come_back():
    trips = trips_of([3.0, 2.0, 1.0], [4, 4, 4], [0.5, 0.25])
    assert trips[0].tolist() == [3.0, 6.0, 7.5]
    assert trips[1, 1:].tolist() == [2.0, 3.5]
    assert trips[2, 2] == 1.0


def test_smaller_microbatches_below_or_above_are_run_as_often_as_the_largest_needs():
    assert trips_of([4.0, 1.0], [4, 1], [0.0])[0].tolist() == [4.0, 4.0 + 4 * 1.0]
    assert trips_of([1.0, 4.0], [1, 4], [0.0])[0].tolist() == [1.0, 4.0 + 4 * 1.0]
    assert trips_of([2.0, 1.0, 4.0], [2, 1, 4], [0.0, 0.0])[0].tolist() == [2.0, 3.0 + 1.0, 7.0 + 3 * 1.0]


def test_candidates_estimated_together_are_estimated_as_alone():
    waves = [[4, 4, 4], [4, 1, 2], [1, 3, 2]]
    microbatches, crossing = np.array([[3.0, 2.0, 1.0], [1.0, 4.0, 2.0], [2.0, 2.0, 5.0]]), np.full((3, 2), 0.25)
    together = round_trips(microbatches, np.array(waves, dtype=float), crossing)
    for index, wave in enumerate(waves):
        alone = trips_of(microbatches[index].tolist(), wave, crossing[index].tolist())
        assert np.allclose(np.triu(together[index]), np.triu(alone), rtol=1e-12)


def test_default_flights_are_the_depth_where_microbatches_are_alike():
    assert flights_of([2, 2, 2, 2]) == [4, 3, 2, 1]
    assert flights_of([4, 1]) == [1, 1]
    assert flights_of([1, 4]) == [8, 1]


@pytest.mark.parametrize("waves", [(2, 2, 2), (4, 2, 1), (1, 2, 4), (3, 5, 2)])
def test_enough_flights_let_no_circuit_be_slower_than_the_pace(waves):
    wave = np.array([waves], dtype=float)
    trips = round_trips(wave, wave, np.array([[0.1, 0.2]]))
    many = np.full(wave.shape, float(1 << 20))
    held = enough_flights(trips, wave, np.ones(1), many, many)
    assert slowest_circuit(trips, wave, held, 1000) <= 1000 + trips[0, 0, -1]
    fewer = np.maximum(1, held // 2)
    assert slowest_circuit(trips, wave, fewer, 1000) > slowest_circuit(trips, wave, held, 1000)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (4, 1), (1, 4), (5, 5)])
@pytest.mark.parametrize("roomy", [False, True])
def test_estimates_of_unlike_microbatches_are_near_the_prediction(sizes, roomy):
    problem = pose(TINY, cluster(("amd", 2, 0.1, 4.0), ("nvidia", 2, 0.1, 4.0)), Batch(120, 64, "fp32"))
    incumbent = incumbent_of(problem)
    incumbent.evaluator.microbatches_left = 10**6
    candidate = Candidate(
        tuple(CandidateStage(3, (ReplicaGroup(k, 1, b, 2),)) for k, b in enumerate(sizes)), roomy=roomy
    )
    evaluation = incumbent.consider(candidate)
    assert evaluation is not None
    estimate = incumbent.costs.seconds(candidate)
    assert estimate > 0.75 * evaluation.seconds  # the default may be roomier than the estimate has it
    assert not roomy or estimate < 1.3 * evaluation.seconds
