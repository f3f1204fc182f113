"""The search finds what trying everything finds; memory limits hold; ratios lower the cost."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn as nn

from hethub.spec.errors import BadInput
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Collective, Costs, Linear, Model, Shares, move_cost, precision_of, rank_seconds, work
from hethub.synthesis.planning import baselines, plan_graph, pose
from hethub.synthesis.program import Execution, Living
from hethub.synthesis.ratios import alternate, by_speed, even, fit, rounded
from hethub.synthesis.rules import PARTIAL, WHOLE, Rules, State
from hethub.synthesis.search import Problem, Search
from tests.synthesis.clusters import cluster, random_cluster
from tests.synthesis.exact import random_program, reference


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


def choices(model: Model) -> tuple[list[list[int]], list[dict[str, State]]]:
    """Per operator the rules that a search may choose, and every way of keeping the parameters."""
    usable = [
        [n for n, rule in enumerate(own) if (axis := model.rules.axis_of(number, rule)) is None or axis in model.rules.worth_cutting]
        for number, own in enumerate(model.rules.of)
    ]  # fmt: skip
    states = {name: [WHOLE, *model.rules.cuts(tensor)] for name, tensor in model.graph.parameters.items()}
    return usable, [dict(zip(states, kept, strict=True)) for kept in itertools.product(*states.values())]


def everything(model: Model, shares: Shares) -> float:
    """The least seconds of every combination of rules and states of parameters."""
    usable, states = choices(model)
    return min(Execution(model, rules, kept, shares).seconds for rules in itertools.product(*usable) for kept in states)


def joint(model: Model, enough: float) -> float:
    """The least seconds of a step of every program under every shares, where that is below `enough`."""
    usable, states = choices(model)
    worth = model.rules.worth_cutting
    lists = [
        [(own, axis.atoms - own) for own in range(axis.atoms + 1)] if number in worth else [(axis.atoms, 0)]
        for number, axis in enumerate(model.rules.axes)
    ]
    for shares in itertools.product(*lists):
        computed = np.zeros(2)
        for number, own in enumerate(usable):
            seconds = [rank_seconds(model, shares, number, model.rules.of[number][n]) for n in own]
            computed = computed[..., None, :] + np.array(seconds)
        # A step takes no less than what the busiest rank computes.
        for places in np.argwhere(computed.max(-1) < enough):
            rules = tuple(own[place] for own, place in zip(usable, places, strict=True))
            enough = min(enough, *(Execution(model, rules, kept, shares).step_seconds for kept in states))
    return enough


@pytest.mark.parametrize("gbytes", [1e-6, 1e-4, 1.0])
def test_the_search_finds_what_trying_everything_finds(gbytes: float) -> None:
    model = model_of(Tiny(), (torch.randn(8, 4),), cluster([1.0, 5.0], gbytes=gbytes))
    shares = by_speed(model)
    found = Problem(model).search(shares, options=Search(gap=1e-6))
    assert found.is_optimal
    assert found.execution.seconds == pytest.approx(everything(model, shares), rel=1e-5)


def test_ratios_follow_speed_and_a_rank_that_only_delays_gets_nothing() -> None:
    model = model_of(TwoLayers(), (torch.randn(60, 12),), cluster([1.0, 2.0, 3.0, 1e-3]))
    best = alternate(model, None)
    execution = best.found.execution
    cut = {model.rules.axis_of(number, rule) for number, rule in enumerate(execution.rules)} - {None}
    used = [own for axis, own in enumerate(execution.shares) if axis in cut]
    assert all(own[3] == 0 for own in used)
    assert not any(rank_seconds(model, execution.shares, n, r)[3] for n, r in enumerate(execution.rules) if r.is_cut)
    assert best.seconds <= Problem(model).search(by_speed(model)).execution.step_seconds
    wide = max(used, key=sum)
    np.testing.assert_allclose(np.array(wide[:3]) / sum(wide), [1 / 6, 2 / 6, 3 / 6], atol=0.05)


def test_fitted_ratios_never_cost_more_than_those_they_replace() -> None:
    model = model_of(TwoLayers(), (torch.randn(60, 12),), cluster([1.0, 4.0], gbytes=1e-3))
    found = Problem(model).search(even(model))
    better = fit(model, found.execution, None)
    assert better is not None
    assert Execution(model, found.execution.numbers, found.execution.kept, better).seconds < found.execution.seconds


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
        assert best.seconds >= free.seconds * (1 - 1e-2)
    assert 0 < fitted < tried
    with pytest.raises(BadInput, match="memory"):
        alternate(model, list(peak * 0.05))


def test_one_rank_cuts_and_moves_nothing() -> None:
    """What is free among ranks that are one is a copy all the same: of every weight, in every step."""
    model = model_of(TwoLayers(), (torch.randn(12, 12),), cluster([1.0]))
    execution = alternate(model, None).found.execution
    assert not any(rule.is_cut for rule in execution.rules)
    assert not any(execution.moves.values())
    assert set(execution.kept.values()) == {WHOLE}


def test_a_search_without_time_does_not_blame_memory() -> None:
    model = model_of(TwoLayers(), (torch.randn(12, 12),), cluster([1.0, 2.0]))
    with pytest.raises(BadInput, match=r"time_limit_seconds \(1e-09\); allow more"):
        Problem(model).search(even(model), options=Search(time_limit_seconds=1e-9))


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


@pytest.mark.parametrize("gbytes", [1e-5, 1e-3, 1.0])
def test_no_baseline_is_faster(gbytes: float) -> None:
    model = model_of(TwoLayers(), (torch.randn(60, 12),), cluster([1.0, 2.0, 5.0], gbytes=gbytes))
    best = alternate(model, None)
    others = baselines(model)
    assert set(others) == {"DP-EV", "DP-CP", "HAP"}
    assert best.seconds <= min(others.values())
    assert others["DP-EV"] > others["DP-CP"] * 0.5  # both are real programs, and not the same one
    assert others["DP-EV"] != others["DP-CP"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three minutes of one core
@pytest.mark.parametrize("gbytes", [1e-6, 3e-6, 1e-5, 1e-4, 1.0])
def test_turns_of_search_and_ratios_come_within_a_hundredth_of_the_best_of_all_programs_and_shares(
    gbytes: float,
) -> None:
    model = model_of(Tiny(2), (torch.randn(4, 4),), cluster([1.0, 3.0], gbytes=gbytes))
    found = alternate(model, None).seconds
    assert joint(model, found) >= found * 0.99
    assert joint(model, found * 1.05) <= found * (1 + 1e-9)  # which looks at programs as good as those found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg", "vit", "bert", "bert-moe"])
def test_programs_of_eight_ranks_are_proved_and_no_baseline_is_faster(name: str) -> None:
    graph = reference(name).graph
    for seed in range(4):
        model = pose(graph, random_cluster(seed, 8))
        best = alternate(model, None)
        assert best.found.is_optimal
        assert best.seconds <= min(baselines(model).values()), seed


class Stack(nn.Module):
    """Equal layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(layers)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(values).square().mean()


def test_equal_layers_are_decided_together_and_no_dearer() -> None:
    """Folded, the programme is no larger for more layers, and its optimum is that of all layers by themselves."""
    graphs = [trace(Stack(layers).double(), (torch.randn(60, 12, dtype=torch.float64),)) for layers in (12, 24)]
    on = cluster([1.0, 2.0, 4.0], gbytes=1e-2)
    models = [Model(graph, Rules(graph), Costs(on, "fp64")) for graph in graphs]
    sizes = [len(set(model.rules.first)) for model in models]
    assert sizes[0] == sizes[1] < len(graphs[0].operators)
    model = models[0]
    folded = Problem(model).search(by_speed(model), options=Search(gap=1e-6))
    assert folded.is_optimal
    model.rules.first[:] = range(len(model.rules.first))
    model.rules.__dict__["first_parameter"] = {name: name for name in graphs[0].parameters}
    apart = Problem(model).search(by_speed(model), options=Search(gap=1e-6))
    assert apart.is_optimal
    assert folded.execution.seconds == pytest.approx(apart.execution.seconds, rel=1e-5)


def test_whole_atoms_keep_the_sum() -> None:
    assert rounded([0.5, 0.3, 0.2], 7) == (4, 2, 1)
    assert rounded([0.0, 1.0], 3) == (0, 3)


def test_a_program_that_was_found_stays_where_later_turns_find_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(TwoLayers(), (torch.randn(24, 12),), cluster([1.0, 2.0, 5.0]))
    own, turns = Problem.search, []

    def once(problem: Problem, shares: Shares, *others: object) -> object:
        turns.append(shares)
        if len(turns) > 1:
            raise BadInput("no program was found")
        return own(problem, shares, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Problem, "search", once)
    assert alternate(model, None).rounds == 1
    assert len(turns) > 1


def test_no_turn_begins_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(TwoLayers(), (torch.randn(24, 12),), cluster([1.0, 2.0, 5.0]))
    own, turns = Problem.search, []
    monkeypatch.setattr(Problem, "search", lambda problem, shares, *rest: turns.append(shares) or own(problem, shares))
    assert alternate(model, None, Search(time_limit_seconds=1e-9)).rounds == 1
    assert len(turns) == 1


class Weighted(nn.Module):
    """Its first input is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values).square().mean() * weight


@pytest.mark.parametrize("samples", [1, 6])
def test_baselines_of_a_step_without_samples_to_cut(samples: int) -> None:
    model = model_of(Weighted(), (torch.tensor(2.0), torch.randn(samples, 8)), cluster([1.0, 2.0]))
    assert all(0 < seconds < float("inf") for seconds in baselines(model).values())


class Pictures(nn.Module):
    """A convolution, the one that turns it back, a table of which little is read, and products with what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)
        self.table = nn.Embedding(1000, 8)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        made = self.up(self.down(images)).flatten(2)
        read = self.table(tokens)
        return (
            made.square().mean()
            + torch.baddbmm(read.transpose(1, 2) @ read, made[:, :1].mT[:, :8], made[:, :1, :8]).mean()
        )


def test_products_and_lookups_cost_what_they_compute_and_move() -> None:
    graph = trace(Pictures(), (torch.randn(2, 3, 16, 16), torch.randint(1000, (2, 5))))
    found = {operator.key: work(graph, operator) for operator in graph.operators}
    convolutions = [work(graph, o) for o in graph.operators if o.key == "aten.convolution.default"]
    assert [w.flops for w in convolutions if w] == [2 * 2 * 16 * 3 * 8 * 16] * 2
    backward = [work(graph, o) for o in graph.operators if o.key == "aten.convolution_backward.default"]
    assert sorted(w.flops for w in backward if w) == [2 * 2 * 16 * 3 * 8 * 16, 2 * 2 * 2 * 16 * 3 * 8 * 16]
    lookup, added = found["aten.embedding.default"], found["aten.baddbmm.default"]
    assert lookup is not None
    assert added is not None
    assert lookup.fused_bytes == 2 * (2 * 5 * 8 * 4) + 2 * 5 * 8
    assert added.flops == 2 * 2 * 8 * 8 * 1


@pytest.mark.parametrize(
    ("kind", "parts", "seconds"),
    [
        ("all-gather", (25, 25), 2 + 75 * 4),
        ("all-gather", (10, 40), 1.5 * 2 + 90 * 4),  # whoever has the least is sent the most; pieces start one by one
        ("reduce-scatter", (10, 40), 1.5 * 2 + 90 * 4),
        ("padded all-gather", (10, 40), 2 + 3 * 40 * 4),
        ("all-reduce", (100, 100), 2 * (2 + 75 * 4)),
        ("all-to-all", (10, 40), 2 * 2 + 40 * 3),
    ],
)
def test_collectives_cost_what_the_busiest_rank_is_sent(
    kind: Collective, parts: tuple[int, int], seconds: float
) -> None:
    """Among four ranks, of 100 bytes: two seconds to start, and four for every byte that a rank is sent in an all-gather."""
    costs = Costs(cluster([1.0] * 4), "fp64")
    costs.__dict__["reduce_scatter"] = Linear(
        2.0, 3.0
    )  # by the bytes of the whole, of which equal pieces leave out a quarter
    assert costs.collective(kind, 100, parts[0] / 100, parts[1] / 100) == pytest.approx(seconds, rel=1e-12)


class Attending(nn.Module):
    """To the first four values of six."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made = self.layer(values)
        return nn.functional.scaled_dot_product_attention(made, made[:, :, :4], made[:, :, :4]).square().mean()


def test_attention_costs_its_products_for_every_sample_and_head() -> None:
    """Two in forward; five in backward, which computes the scores again."""
    graph = trace(Attending(), (torch.randn(3, 2, 6, 8),))
    flops = [w.flops for o in graph.operators if "attention" in o.key and (w := work(graph, o))]
    assert flops == [times * 3 * 2 * (2 * 6 * 4 * 8) for times in (2, 5)]


class Pairs(nn.Module):
    """Scores of every pair of its inputs' samples: two axes of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(5, 8)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (self.left(left) @ self.right(right).t()).square().mean()


def test_axes_of_unlike_inputs_have_unlike_names() -> None:
    model = model_of(Pairs(), (torch.randn(12, 6), torch.randn(12, 5)), cluster([1.0, 2.0]))
    names = [axis.name for axis in model.rules.axes]
    assert {"samples", "samples of input 1"} <= set(names)
    assert len(names) == len(set(names))


def test_a_step_waits_for_what_buffers_hold_after_it() -> None:
    graph, on = reference("residual").graph, cluster([1.0, 1.0])
    program = random_program(graph, on, 0)
    execution, without = (
        Execution(pose(own, on), program.rules, program.kept, program.shares)
        for own in (graph, replace(graph, updates={}))
    )
    moves = [move for tensor in graph.updates.values() for move in execution.moves[tensor] if move.collective]
    assert moves
    costs = [move_cost(execution.model, program.shares, *move[:3])[0] for move in moves]
    assert execution.step_seconds == pytest.approx(without.step_seconds + sum(costs), rel=1e-9)


def test_sums_of_gradients_wait_for_each_other_and_the_optimizer_for_them() -> None:
    """Where ranks share nothing but the products that make two weights' gradients, these sums come one after the other."""
    model = model_of(TwoLayers(), (torch.randn(6, 12),), cluster([1.0, 1.0], gbytes=1e-6))
    graph, rules, partial = model.graph, [], set[int]()
    for own, operator in zip(model.rules.of, graph.operators, strict=True):
        before = tuple(PARTIAL if tensor in partial else WHOLE for tensor in operator.inputs)
        shared = operator.name in ("mm_1", "mm_2")
        fits = [r.is_cut and r.outputs == (PARTIAL,) if shared else r.inputs == before for r in own]
        rules.append(fits.index(True))
        partial.update(operator.made if PARTIAL in own[rules[-1]].outputs else ())
    shares = even(model)
    execution = Execution(model, rules, dict.fromkeys(graph.parameters, WHOLE), shares)
    sums = [
        move_cost(model, shares, tensor, PARTIAL, WHOLE)[0] for tensor in graph.gradients.values() if tensor in partial
    ]
    seconds = [float(rank_seconds(model, shares, number, rule)[0]) for number, rule in enumerate(execution.rules)]
    first = min(graph.producers[tensor] for tensor in graph.gradients.values() if tensor in partial)
    assert len(sums) == 2
    assert sum(seconds[first + 1 :]) < sums[0]  # all is computed before the first sum is there
    waited = sum(seconds[: first + 1]) + sum(sums) + execution.optimizer_seconds
    assert execution.step_seconds == pytest.approx(waited, rel=1e-12)
