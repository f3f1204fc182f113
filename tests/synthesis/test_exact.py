"""Unmodified models train under programs over 2 to 4 unlike ranks as in one process, to 1e-10 in float64."""

from typing import Any

import pytest
import torch
import torch.nn as nn

from hethub.synthesis.capture.trace import trace
from hethub.synthesis.graph import Graph
from hethub.synthesis.lower import Step
from hethub.synthesis.pieces import Summing
from hethub.synthesis.planning import plan_graph
from hethub.synthesis.program import Program
from tests.support.ranks import run_ranks
from tests.synthesis.clusters import cluster, random_cluster
from tests.synthesis.exact import Holder, Outcome, check, random_program, reference, reference_of, train
from tests.synthesis.test_state import Scaled, small

ISLANDS = [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    "name", ["vgg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "bert", "moe"))]
)
def test_the_best_programs_train_as_one_process(name: str) -> None:
    known = reference(name)
    programs = [plan_graph(known.graph, random_cluster(seed, size)) for seed, size in ((1, 2), (2, 3))]
    programs.append(plan_graph(known.graph, cluster([1.0, 0.001, 2.0, 3.0])))
    assert any(0.0 in parts for program in programs for parts in program.ratios.values())
    assert all(program.is_optimal for program in programs)
    results = run_ranks(
        4, train, known.graph, known.named, known.inputs, programs, islands=ISLANDS, timeout_seconds=280
    )
    for outcomes in results:
        for outcome in outcomes:
            check(known, outcome)
    assert [len(outcomes) for outcomes in results] == [3, 3, 2, 1]


@pytest.mark.parametrize(
    "name", ["vgg", "moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "bert"))]
)
def test_any_program_trains_as_one_process(name: str) -> None:
    """Random rules and shares: every collective between every two states, and operators without a share."""
    known = reference(name)
    drawn = ((1, 3, 1e-6), (2, 4, 1.0))  # slow links ask for other collectives than fast ones
    programs = [random_program(known.graph, cluster([1.0] * size, gbytes=gbytes), seed) for seed, size, gbytes in drawn]
    kinds = {move.collective for program in programs for move in program.moves}
    assert {"all-reduce", "reduce-scatter", "all-gather", "padded all-gather", "all-to-all"} <= kinds
    results = run_ranks(
        4, train, known.graph, known.named, known.inputs, programs, islands=ISLANDS, timeout_seconds=280
    )
    for outcomes in results:
        for outcome in outcomes:
            check(known, outcome)


@pytest.mark.parametrize("sizes", [(6, 4, 5), pytest.param((6, 2, 3), marks=pytest.mark.slow)])
def test_batches_of_other_sizes_and_norms_over_the_batch_train_as_one_process(sizes: tuple[int, ...]) -> None:
    """One trace and one program for all of them; SyncBatchNorm's statistics are those of the whole batch."""
    known = reference("residual", sizes)
    programs = [
        plan_graph(known.graph, cluster([1.0, 2.0, 5.0])),
        plan_graph(known.graph, cluster([1.0, 0.001, 2.0, 3.0])),
    ]
    assert all("samples" in program.ratios for program in programs)
    results = run_ranks(
        4,
        train,
        known.graph,
        known.named,
        known.inputs,
        programs,
        len(sizes),
        sizes,
        islands=ISLANDS,
        timeout_seconds=280,
    )
    assert {"norms.0.running_var", "norms.1.num_batches_tracked"} <= known.weights.keys() - known.gradients.keys()
    for outcomes in results:
        for outcome in outcomes:
            check(known, outcome)
    assert [len(outcomes) for outcomes in results] == [2, 2, 2, 1]


class Numbers(nn.Module):
    """Values of torch's default type meet those of the module: what is made of numbers alone, and whole numbers over others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(values)) * torch.full((12,), 0.1) + counts / 3
        return self.down(inner).square().mean() + (torch.ones(12) * 0.1).sum().square() * self.down.weight.sum()


def under(world: Any, setting: str, *arguments: Any) -> list[Outcome]:
    """As `train`, by a caller who has set something since the step was traced."""
    torch.set_default_dtype(torch.float64 if setting == "default type" else torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting == "autocast"):
        return train(world, *arguments)


@pytest.mark.parametrize(
    ("setting", "dtype", "bound"), [("default type", torch.float64, 1e-10), ("autocast", torch.float32, 1e-4)]
)
def test_what_the_caller_sets_after_the_trace_changes_nothing(setting: str, dtype: torch.dtype, bound: float) -> None:
    """Ranks sent each other tensors of unlike types, and hung or were ended by Gloo."""
    torch.manual_seed(0)
    inputs = (torch.randn(6, 8, dtype=dtype), torch.randint(9, (6, 12)))
    known = reference_of(Numbers().to(dtype), inputs)
    programs = [random_program(known.graph, cluster([1.0, 1.0]), seed) for seed in range(3)]
    arguments = setting, known.graph, known.named, known.inputs, programs
    for outcomes in run_ranks(2, under, *arguments, timeout_seconds=60):
        for losses, gradients, *_ in outcomes:
            assert losses == pytest.approx(known.losses, rel=bound)
            for name, gradient in known.gradients.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=bound, atol=bound)


def test_casts_of_the_trace_are_part_of_the_step() -> None:
    """A module that was traced under autocast computes as that one does, inside and outside of it."""
    torch.manual_seed(0)
    module, inputs = Numbers(), (torch.randn(6, 8), torch.randint(9, (6, 12)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph, loss = trace(module, inputs), float(module(*inputs).detach())
    named = {name: value.detach() for name, value in module.state_dict().items()}
    program = plan_graph(graph, cluster([1.0]))
    for setting in ("default type", "autocast", "none"):
        (((losses, *_),),) = run_ranks(1, under, setting, graph, named, inputs, [program], 1)
        assert losses == [loss]
    assert abs(loss - float(module(*inputs).detach())) > 1e-4


Found = tuple[list[float], bool, int]


def step_twice(world: Any, graph: Graph, programs: list[Program]) -> list[Found]:
    """By program: how far gradients of two calls are from twice those of one, whether all lie in order (fused optimizers go
    through memory), and the most scattered sums of gradients that were under way at once."""
    torch.manual_seed(0)
    named = {name: value.detach() for name, value in Scaled().double().state_dict().items()}
    most, begin = [0], Step._sum

    def noted(self: Step, *given: Any) -> Summing:
        summing = begin(self, *given)
        most[0] = max(most[0], sum(each.is_scattered and each._work is not None for each in (*given[-1], summing)))
        return summing

    Step._sum = noted  # type: ignore[method-assign]
    results = []
    for program in programs:
        step, most[0] = Step(Holder(named, set(graph.parameters)), graph, program, world.default_group), 0
        inputs = small(0)[1]
        step(*inputs)
        once = step.gradients()
        in_order = all(shard.grad.is_contiguous() for shard in step.parameters() if shard.grad is not None)
        step(*inputs)
        twice = step.gradients()
        apart = [float((twice[name] - 2 * value).abs().max()) for name, value in once.items()]
        results.append((apart, in_order, most[0]))
    return results


def test_gradients_are_added_up_in_order_and_scattered_one_at_a_time() -> None:
    torch.manual_seed(0)
    graph = trace(Scaled().double(), small(0)[1])
    programs = [random_program(graph, cluster([1.0, 2.0]), seed) for seed in range(12)]
    for found in run_ranks(2, step_twice, graph, programs):
        assert all(apart and max(apart) < 1e-12 for apart, _, _ in found)
        assert all(in_order for _, in_order, _ in found)
        assert max(most for _, _, most in found) == 1
