"""Random plans over the whole plan space train the model of one process."""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.spec.random_plans import trained_cases
from tests.support.layouts import Case, check_against_one_process

# More of them, and others: RANDOM_LAYOUTS=100 RANDOM_SEED=7 pytest tests/runtime/pipeline/test_random_layouts.py
COUNT, SEED = int(os.environ.get("RANDOM_LAYOUTS", "5")), int(os.environ.get("RANDOM_SEED", "0"))


@pytest.mark.timeout(60 + 30 * COUNT)
@seed(SEED)
@settings(
    max_examples=COUNT, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(trained_cases())
def test_a_random_plan_equals_one_process(case: Case) -> None:
    check_against_one_process(case)
