"""The search finds what trying everything finds; memory limits hold; ratios lower the cost."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn as nn

from hethub.spec.errors import BadInput
from hethub.synthesis.costs import Costs, precision_of
from hethub.synthesis.planning import plan_graph
from hethub.synthesis.program import Execution, Living, Model, Shares
from hethub.synthesis.ratios import alternate, fit, rounded, starts
from hethub.synthesis.rules import WHOLE, Rules
from hethub.synthesis.search import Search, search
from hethub.synthesis.trace import trace
from tests.synthesis.clusters import cluster


class Tiny(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values @ self.weight).sum()


class TwoLayers(nn.Module):
    def __init__(self, width: int = 12, inner: int = 48) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(values))).square().mean()


def model_of(module: nn.Module, inputs: tuple[torch.Tensor, ...], on: object) -> Model:
    graph = trace(module.double(), tuple(value.double() for value in inputs))
    return Model(graph, Rules(graph), Costs(on, precision_of(graph)))  # type: ignore[arg-type]


def everything(model: Model, shares: Shares) -> float:
    """The least seconds of every combination of rules and states of parameters."""
    usable = [
        [n for n, rule in enumerate(own) if (axis := model.rules.axis_of(number, rule)) is None or axis in model.rules.worth_cutting]
        for number, own in enumerate(model.rules.of)
    ]  # fmt: skip
    states = {name: [WHOLE, *model.rules.cuts(tensor)] for name, tensor in model.graph.parameters.items()}
    best = float("inf")
    for rules in itertools.product(*usable):
        for kept in itertools.product(*states.values()):
            execution = Execution(model, rules, dict(zip(states, kept, strict=True)), shares)
            best = min(best, execution.seconds)
    return best


@pytest.mark.parametrize("gbytes", [1e-6, 1e-4, 1.0])
def test_the_search_finds_what_trying_everything_finds(gbytes: float) -> None:
    model = model_of(Tiny(), (torch.randn(8, 4),), cluster([1.0, 5.0], gbytes=gbytes))
    shares = starts(model)[0]
    found = search(model, shares, options=Search(gap=1e-6))
    assert found.is_optimal
    assert found.seconds == pytest.approx(everything(model, shares), rel=1e-5)


def test_ratios_follow_speed_and_a_rank_that_only_delays_gets_nothing() -> None:
    model = model_of(TwoLayers(), (torch.randn(60, 12),), cluster([1.0, 2.0, 3.0, 1e-3]))
    best = alternate(model, None)
    execution = best.found.execution
    cut = {model.rules.axis_of(number, rule) for number, rule in enumerate(execution.rules)} - {None}
    used = [own for axis, own in enumerate(best.shares) if axis in cut]
    assert all(own[3] == 0 for own in used)
    by_speed = search(model, starts(model)[0])
    assert best.found.seconds <= by_speed.seconds
    wide = max(used, key=sum)
    np.testing.assert_allclose(np.array(wide[:3]) / sum(wide), [1 / 6, 2 / 6, 3 / 6], atol=0.05)


def test_fitted_ratios_never_cost_more_than_those_they_replace() -> None:
    model = model_of(TwoLayers(), (torch.randn(60, 12),), cluster([1.0, 4.0], gbytes=1e-3))
    even = starts(model)[1]
    found = search(model, even)
    better = fit(model, found.execution, None)
    assert better is not None
    assert Execution(model, found.rules, found.kept, better).seconds < found.seconds


def test_every_rank_keeps_within_its_memory() -> None:
    on = cluster([1.0, 1.0, 1.0])
    model = model_of(TwoLayers(), (torch.randn(12, 12),), on)
    free = alternate(model, None)
    peak = Living(free.found.execution).peak
    tried = fitted = 0
    for part in (0.95, 0.8, 0.65, 0.5, 0.05):
        limits = list(peak * part)
        tried += 1
        try:
            best = alternate(model, limits)
        except BadInput:
            continue
        fitted += 1
        assert (Living(best.found.execution).peak <= np.array(limits)).all()
        assert best.found.seconds >= free.found.seconds * (1 - 1e-3)
    assert 0 < fitted < tried
    with pytest.raises(BadInput, match="memory"):
        alternate(model, list(peak * 0.05))


def test_a_program_tells_how_it_cuts_and_what_it_costs() -> None:
    graph = trace(TwoLayers().double(), (torch.randn(60, 12, dtype=torch.float64),))
    program = plan_graph(graph, cluster([1.0, 2.0]))
    text = program.explain()
    assert "up" in text
    assert "proved least" in text
    assert program.predicted_seconds > 0
    assert len(program.memory_bytes) == 2
    assert all(sum(parts) == pytest.approx(1) for parts in program.ratios.values())
    assert "strategy: hap" in program.to_yaml()


def test_whole_atoms_keep_the_sum() -> None:
    assert rounded([0.5, 0.3, 0.2], 7) == (4, 2, 1)
    assert rounded([0.0, 1.0], 3) == (0, 3)
