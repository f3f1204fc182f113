"""Every schedule, ZeRO level and offload is predicted from the same lists that the executor runs."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch, which the random layouts' module imports: pip install hethub[train]")

from hethub.predictor import predict  # noqa: E402
from hethub.spec.layout import Layout  # noqa: E402
from hethub.spec.schedule import Kind, dependencies, schedule  # noqa: E402
from tests.spec.random_plans import any_cases  # noqa: E402


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_plan_is_predicted_in_the_order_that_runs(data: st.DataObject) -> None:
    layout = data.draw(any_cases()).layout()
    prediction = predict(layout, with_timeline=True)
    check_timeline(layout, prediction)
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_seconds, rel=1e-9)
    assert prediction.percent_of_ceiling <= 100
    assert max(span.stop_seconds for span in prediction.timeline) == pytest.approx(prediction.step_seconds)


def check_timeline(layout: Layout, prediction) -> None:
    """Names as scheduled, none before what it depends on, one after the other on every rank."""
    ends = {}
    for (stage, replica), acts in schedule(layout).items():
        for rank in layout.replica(stage, replica).ranks:
            spans = [span for span in prediction.timeline if span.rank == rank]
            assert [span.name for span in spans] == [act.name for act in acts]
            assert all(a.stop_seconds <= b.start_seconds + 1e-12 for a, b in pairwise(spans))
        ends |= {act: span for act, span in zip(acts, spans, strict=True) if act.tile is not None}
    for act, span in ends.items():
        for needed in dependencies(layout, act):
            assert ends[needed].stop_seconds <= span.start_seconds + 1e-12
    backwards = [span.stop_seconds for act, span in ends.items() if act.kind is not Kind.FORWARD]
    reduces = [span for span in prediction.timeline if span.name.startswith("reduce")]
    assert max(span.stop_seconds for span in reduces) >= max(backwards) - 1e-12
