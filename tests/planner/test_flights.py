"""Tiles in flight by estimate: round trips over stages with tiles of like and unlike sizes, and what hides them."""

from typing import NamedTuple

import pytest

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, DraftStage, Seats
from hethub.planner.flights import default_flights, enough_flights, round_trips, slowest_circuit
from hethub.planner.judge import Judge
from hethub.planner.problem import Batch, pose
from tests.planner.test_plan import TINY, cluster


class Stage(NamedTuple):
    tile: float
    wave: int


def test_like_tiles_pass_all_stages_and_come_back():
    trips = round_trips([Stage(3.0, 4), Stage(2.0, 4), Stage(1.0, 4)], [0.5, 0.25])
    assert trips == [[3.0, 6.0, 7.5], [2.0, 3.5], [1.0]]


def test_smaller_tiles_below_or_above_are_run_as_often_as_the_largest_needs():
    assert round_trips([Stage(4.0, 4), Stage(1.0, 1)], [0.0])[0] == [4.0, 4.0 + 4 * 1.0]
    assert round_trips([Stage(1.0, 1), Stage(4.0, 4)], [0.0])[0] == [1.0, 4.0 + 4 * 1.0]


def test_default_flights_are_the_depth_where_tiles_are_alike():
    assert default_flights([Stage(1.0, 2)] * 4) == [4, 3, 2, 1]
    assert default_flights([Stage(1.0, 4), Stage(1.0, 1)]) == [1, 1]
    assert default_flights([Stage(1.0, 1), Stage(1.0, 4)]) == [8, 1]


@pytest.mark.parametrize("waves", [(2, 2, 2), (4, 2, 1), (1, 2, 4), (3, 5, 2)])
def test_enough_flights_let_no_circuit_be_slower_than_the_pace(waves):
    stages = [Stage(float(wave), wave) for wave in waves]
    trips = round_trips(stages, [0.1, 0.2])
    held = enough_flights(stages, trips, 1.0, [1 << 20] * 3, [1 << 20] * 3)
    assert slowest_circuit(stages, trips, held, 1000) <= 1000 + trips[0][-1]
    fewer = [max(1, hold // 2) for hold in held]
    assert slowest_circuit(stages, trips, fewer, 1000) > slowest_circuit(stages, trips, held, 1000)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (4, 1), (1, 4), (5, 5)])
@pytest.mark.parametrize("roomy", [False, True])
def test_estimates_of_unlike_tiles_are_near_the_prediction(sizes, roomy):
    problem = pose(TINY, cluster(("amd", 2, 0.1, 4.0), ("nvidia", 2, 0.1, 4.0)), Batch(120, 64, "fp32"))
    judge = Judge(problem, UnitCosts(problem))
    judge.tiles_left = 10**6
    draft = Draft(tuple(DraftStage(3, (Seats(k, 1, b, 2),)) for k, b in enumerate(sizes)), roomy=roomy)
    verdict = judge(draft)
    assert verdict is not None
    estimate = judge.surrogate.seconds(draft)
    assert estimate > 0.75 * verdict.seconds  # the default may be roomier than the estimate has it
    assert not roomy or estimate < 1.3 * verdict.seconds
