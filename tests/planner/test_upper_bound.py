"""The upper bound without a plan: what `hethub predict --bounds` asks for is what planning finds."""

import pytest

from hethub.planner import plan
from hethub.planner.bounds import kinds_alone_for, upper_bound_tokens_per_second
from tests.predictor.plans import TINY, cluster


def test_the_bound_of_a_job_is_the_one_that_planning_reports() -> None:
    on = cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD", 1, 2))
    found = plan(TINY, on, (16, 128, "bf16")).prediction.upper_bound_tokens_per_second
    alone = kinds_alone_for(TINY, on, (16, 128, "bf16"))
    assert upper_bound_tokens_per_second(alone) == pytest.approx(found)


def test_a_kind_without_a_sample_leaves_it_undefined() -> None:
    on = cluster(("H100-SXM5-80GB", 1, 8), ("T4", 1, 1))
    alone = kinds_alone_for(TINY, on, (2, 128, "fp16"))
    assert alone is None
    assert upper_bound_tokens_per_second(alone) is None
