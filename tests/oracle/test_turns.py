"""Search and ratios in turns: where they start, what a turn hands to the next, and that the best of all is kept."""

import numpy as np
import pytest
import torch

from hethub.synthesis.program import Living
from hethub.synthesis.ratios import alternate, by_speed, even, starts
from hethub.synthesis.search import Found, Problem
from tests.synthesis.clusters import cluster
from tests.synthesis.test_search import TwoLayers, model_of


def test_turns_start_from_shares_by_speed_equal_ones_and_shares_by_memory() -> None:
    model = model_of(TwoLayers(), (torch.randn(60, 12),), cluster([1.0, 3.0], memory_gb=[2.0, 1.0]))
    samples = next(number for number, axis in enumerate(model.rules.axes) if axis.name == "samples")
    assert [own[samples] for own in starts(model, None)] == [(15, 45), (30, 30), (40, 20)]
    assert [own[samples] for own in starts(model, [1.0, 5.0])] == [(15, 45), (30, 30), (10, 50)]
    assert starts(model, None)[:2] == [by_speed(model), even(model)]


def test_the_best_of_all_turns_is_kept_and_each_knows_limits_and_what_the_one_before_hid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = model_of(TwoLayers(), (torch.randn(60, 12),), cluster([1.0, 2.0, 5.0], gbytes=1.0))
    peak = Living(alternate(model, None).found.execution).peak
    limits = [*([peak.max() * 3] * (len(peak) - 1)), float(peak[-1] * 0.9)]
    own = Problem.search
    met: list[Found] = []

    def search(problem: Problem, shares: object, given: object, options: object, visible: float | None = None) -> Found:
        assert given == limits
        if visible is not None:
            assert visible == met[-1].execution.visible
        met.append(own(problem, shares, given, options, 1.0 if visible is None else visible))  # type: ignore[arg-type]
        later.append(visible is not None)
        return met[-1]

    later: list[bool] = []
    monkeypatch.setattr(Problem, "search", search)
    best = alternate(model, limits)
    assert any(later)
    assert best.seconds == min(found.execution.step_seconds for found in met)
    assert (Living(best.found.execution).peak <= np.array(limits)).all()
