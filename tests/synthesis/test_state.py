"""A program's whole state goes through torch.distributed.checkpoint into another program on fewer ranks."""

from cProfile import Profile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from hethub import synthesis
from hethub.spec.errors import BadInput
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.graph import Graph
from hethub.synthesis.layout import Layout
from hethub.synthesis.lower import Step
from hethub.synthesis.planning import plan_graph
from hethub.synthesis.program import Program
from hethub.synthesis.rules import Cut
from tests.support.ranks import run_ranks
from tests.synthesis.clusters import cluster
from tests.synthesis.exact import Holder, adamw, check, random_program, reference_of, steps_of, train


class Scaled(nn.Module):
    """Two layers, and a buffer between them that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("scale", torch.full((12,), 2.0))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(values).tanh() * self.scale), labels)


class Fixed(Scaled):
    """Most of what it reads is trained by nobody; one frozen weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.again = self.up
        self.wide = nn.Parameter(torch.ones(200, 12), requires_grad=False)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(self.again(values)[:, :8], labels) + self.wide.mean()
        return loss


def held(world: Any, graph: Graph, program: Program) -> tuple[int, bool]:
    """Bytes of all tensors that a step holds, and whether it computes with a state that it took up."""
    torch.manual_seed(0)
    module = Fixed().double()
    step = Step(module, graph, program, world.group(range(program.size)))
    state, inputs = synthesis.state_dict(step), small(0)[1]
    assert state.keys() == module.state_dict().keys()
    step.load_state_dict({name: value / 2 for name, value in state.items()})
    module.load_state_dict({name: value / 2 for name, value in state.items()})
    equal = torch.allclose(step(*inputs), module(*inputs).detach(), rtol=1e-12)
    equal &= all(torch.equal(value, state[name] / 2) for name, value in synthesis.state_dict(step).items())
    entries = [value for value in step._entries.values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in (*step.parameters(), *step.buffers(), *entries)), equal


def test_frozen_parameters_are_held_once_and_taken_up_under_each_of_their_names() -> None:
    torch.manual_seed(0)
    module = Fixed().double()
    graph = trace(module, small(0)[1])
    ((found, equal),) = run_ranks(1, held, graph, plan_graph(graph, cluster([1.0])))
    assert equal
    assert found == sum(value.nbytes for value in (*module.parameters(), *module.buffers()))


Named = dict[str, torch.Tensor]


def through_a_checkpoint(
    world: Any, graph: Graph, named: Named, inputs: Any, programs: list[Program], folder: Path
) -> tuple[Named, Named, float, float] | None:
    """What was saved, what another program holds that loaded it, and the next loss of both."""

    def made(program: Program, values: Named) -> Step | None:
        group = world.group(range(program.size))
        return None if group is None else Step(Holder(values, set(graph.parameters)), graph, program, group)

    first = made(programs[0], named)
    assert first is not None
    optimizer = adamw(first.parameters())
    first(*inputs)
    optimizer.step()
    saved = synthesis.state_dict(first)
    dcp.save({"model": saved}, checkpoint_id=folder)
    loss = float(first(*inputs))
    second = made(programs[1], {name: torch.zeros_like(value) for name, value in named.items()})
    if second is None:
        return None
    found = {name: torch.zeros_like(value) for name, value in saved.items()}
    dcp.load({"model": found}, checkpoint_id=folder, no_dist=True)
    second.load_state_dict(found)
    return saved, synthesis.state_dict(second), loss, float(second(*inputs))


def test_a_state_goes_through_a_checkpoint_into_another_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Scaled().double()
    draw = torch.Generator().manual_seed(1)
    inputs = (torch.randn(12, 8, generator=draw, dtype=torch.float64), torch.randint(4, (12,), generator=draw))
    graph = trace(module, inputs)
    programs = [plan_graph(graph, cluster(speeds)) for speeds in ([1.0, 2.0, 3.0], [3.0, 1.0])]
    assert programs[0].ratios != programs[1].ratios
    named = {name: value.detach() for name, value in module.state_dict().items()}
    *both, outside = run_ranks(3, through_a_checkpoint, graph, named, inputs, programs, tmp_path / "saved")
    assert outside is None
    for saved, loaded, loss, again in both:
        assert saved.keys() == loaded.keys() == named.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert not torch.equal(saved["up.weight"], named["up.weight"])
        assert abs(loss - again) < 1e-12


class Versioned(nn.Linear):
    """Its state has an entry that is no tensor."""

    def get_extra_state(self) -> object:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        assert state == {"version": 1}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Versioned(8, 12), nn.Linear(12, 4)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(values).tanh()), labels)


def small(seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(seed)
    return Small().double(), (torch.randn(12, 8, dtype=torch.float64), torch.randint(4, (12,)))


def refused(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except BadInput as refusal:
        return str(refusal)
    return "accepted"


def clipped(world: Any, graph: Graph, program: Program) -> tuple[list[float], Named, list[str]]:
    """Norms and weights of steps with clipping; what is said of unlike weights, batches and states."""
    group = world.group(range(program.size))
    module, inputs = small(0)
    step = Step(module, graph, program, group)
    optimizer, norms = torch.optim.SGD(step.parameters(), lr=1.0), []
    for _ in range(3):
        optimizer.zero_grad()
        step(*inputs)
        norms.append(synthesis.clip_grad_norm_(step, 0.1))
        optimizer.step()
    state = synthesis.state_dict(step)
    step.load_state_dict(state)
    said = [refused(step.load_state_dict, {**state, "down.bias": torch.zeros(1)})]
    said.append(refused(step.load_state_dict, {**state, "more": torch.zeros(1)}))
    said.append(refused(Step, small(world.rank)[0], graph, program, group))
    said.append(refused(Step(module, graph, program, group), *small(world.rank)[1]))
    return norms, state, said


def test_gradients_are_clipped_by_their_whole_norm_and_unlike_ranks_are_refused() -> None:
    module, inputs = small(0)
    graph = trace(module, inputs)
    drawn = (random_program(graph, cluster([1.0, 2.0]), seed) for seed in range(9))
    # Pieces, and what both ranks have whole.
    program = next(p for p in drawn if len({isinstance(state, Cut) for state in p.kept.values()}) == 2)
    optimizer, known = torch.optim.SGD(module.parameters(), lr=1.0), []
    for _ in range(3):
        optimizer.zero_grad()
        module(*inputs).backward()
        known.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
        optimizer.step()
    for norms, state, said in run_ranks(2, clipped, graph, program):
        assert norms == pytest.approx(known, rel=1e-10)
        for name, value in module.state_dict().items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
        assert state["up._extra_state"] == {"version": 1}
        for words, text in zip(("shape", "'more'", "unlike weights", "unlike batches"), said, strict=True):
            assert words in text


def test_a_program_that_was_changed_by_hand_is_refused() -> None:
    """A share too few would leave samples out without a word."""
    graph = trace(*small(0))
    program = random_program(graph, cluster([1.0, 2.0]), 0)
    Layout.planned(graph, program)
    lost = next(number for number, own in enumerate(program.shares) if own[0] > 0)
    fewer = tuple((own[0] - (number == lost), own[1]) for number, own in enumerate(program.shares))
    for changed in (
        {"shares": fewer},
        {"shares": tuple((*own, 0) for own in program.shares)},
        {"rules": (99, *program.rules[1:])},
        {"rules": program.rules[1:]},
        {"kept": {**program.kept, "up.weight": Cut(5, 1)}},
        {"moves": program.moves[1:]},
        {"moves": tuple(move._replace(source=move.target) for move in program.moves)},
    ):
        with pytest.raises(BadInput, match="does not fit together"):
            Layout.planned(graph, replace(program, **changed))  # type: ignore[arg-type]


class Dotted(torch.autograd.Function):
    """Its backward hands out what forward saved: the weight's gradient is the buffer itself."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(scale)
        return (weight * scale).sum()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.saved_tensors[0], None


class Saved(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(12))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(values, labels) + Dotted.apply(self.shift, self.scale)
        return loss


def test_a_gradient_that_no_operator_makes_is_one() -> None:
    torch.manual_seed(0)
    module = Saved().double()
    known = reference_of(module, (torch.randn(6, 8, dtype=torch.float64), torch.randint(4, (6,))))
    programs = [plan_graph(known.graph, cluster([1.0, 2.0])), random_program(known.graph, cluster([1.0, 2.0]), 1)]
    for outcomes in run_ranks(2, train, known.graph, known.named, known.inputs, programs):
        for outcome in outcomes:
            check(known, outcome)


class Prompted(nn.Module):
    """The prompt's gradient is a part of that of the positions, which are added to it and to what nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.positions = nn.Linear(8, 8), nn.Parameter(torch.randn(6, 8))
        self.prompt = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("first", torch.randn(2, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([self.first, self.prompt]) + self.positions
        return (self.layer(values) @ keys.t()).square().mean()


def scaled(world: Any, graph: Graph, named: Named, inputs: Any, programs: list[Program]) -> list[tuple[Named, bool]]:
    """Of every program, whole gradients that were clipped, and whether no more lived than was predicted."""
    found = []
    for program, step, _ in steps_of(world, graph, named, programs):
        step(*inputs)
        synthesis.clip_grad_norm_(step, 0.1)
        assert step.peak_bytes is not None
        found.append((step.gradients(), step.peak_bytes <= program.memory_bytes[world.rank]))
    return found


def test_a_gradient_that_is_a_part_of_another_is_planned_held_and_clipped_once() -> None:
    torch.manual_seed(0)
    module, inputs = Prompted().double(), (torch.randn(6, 8, dtype=torch.float64),)
    graph, named = trace(module, inputs), module.state_dict(keep_vars=True)
    programs = [random_program(graph, cluster([1.0, 2.0]), seed) for seed in range(8)]
    module(*inputs).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    for outcomes in run_ranks(2, scaled, graph, named, inputs, programs):
        for gradients, keeps_within in outcomes:
            assert keeps_within
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


class Unread(Scaled):
    """It has a weight that its loss does not depend on, larger than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.ones(64, 64))


def test_a_parameter_without_a_gradient_takes_no_time_of_the_optimizer() -> None:
    """torch's passes over it."""
    inputs, on = (torch.randn(6, 8), torch.randint(4, (6,))), cluster([1.0, 2.0])
    plain, more = (plan_graph(trace(kind(), inputs), on) for kind in (Scaled, Unread))
    assert more.optimizer_seconds == plain.optimizer_seconds > 0
    assert more.predicted_seconds == pytest.approx(plain.predicted_seconds, rel=1e-9)
    module = Unread()
    optimizer = adamw(module.parameters())
    module(*inputs).backward()
    optimizer.step()
    assert len(optimizer.state) == 4
    assert module.unread not in optimizer.state


class Rooted(nn.Module):
    """Of two weights, which nobody reads together, one has a gradient that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.rooted = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values @ self.plain).sum() + (values @ self.rooted).sum() * values.sum().sqrt()


def clipped_once(world: Any, graph: Graph, named: Named, inputs: Any, program: Program) -> tuple[float, Named]:
    ((_, step, _),) = steps_of(world, graph, named, [program])
    step(*inputs)
    return synthesis.clip_grad_norm_(step, 0.1), step.gradients()


def test_a_norm_that_is_no_number_spoils_all_gradients_as_on_one_device() -> None:
    """The others were left unclipped, and a step went on with them."""
    module, inputs = Rooted().double(), (torch.ones(6, 4, dtype=torch.float64),)
    graph, named = trace(module, inputs), {n: value.detach() for n, value in module.state_dict().items()}
    below = (-inputs[0],)
    module(*below).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    for norm, gradients in run_ranks(
        2, clipped_once, graph, named, below, random_program(graph, cluster([1.0, 1.0]), 0)
    ):
        assert norm != norm
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.isnan().all()
            assert gradients[name].isnan().all()


class Embedded(nn.Module):
    """Its gradient is as large as an embedding's, and the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2048, 2048))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values @ self.weight).sum()


def test_a_large_gradient_s_norm_is_that_of_its_elements() -> None:
    """torch's fp32 norm of so many on a CPU is 0.3 % too large."""
    module, inputs = Embedded(), (torch.full((2, 2048), 5e-4),)
    graph, named = trace(module, inputs), {n: value.detach() for n, value in module.state_dict().items()}
    expected = 2048 * 2 * float(inputs[0][0, 0])  # the root of so many equal squares, by hand
    for norm, _ in run_ranks(1, clipped_once, graph, named, inputs, random_program(graph, cluster([1.0]), 0)):
        assert norm == pytest.approx(expected, rel=1e-5)


def calls_of_a_step(world: Any, graph: Graph, named: Named, inputs: Any, program: Program) -> float:
    """Calls of functions for each operator, from the second step on."""
    ((_, step, _),) = steps_of(world, graph, named, [program])
    step(*inputs)
    counted = Profile()
    counted.runcall(step, *inputs)
    return sum(row.callcount for row in counted.getstats()) / len(graph.operators)


def test_a_step_spends_little_on_each_operator_beside_computing_it() -> None:
    """It looked up anew what it knew of each operator, which took narrow models twice as long as now."""
    module = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))))
    scored, inputs = Scored(module), (torch.randn(6, 8), torch.randint(8, (6,)))
    graph, named = trace(scored, inputs), {n: value.detach() for n, value in scored.state_dict().items()}
    (calls,) = run_ranks(1, calls_of_a_step, graph, named, inputs, plan_graph(graph, cluster([1.0])))
    assert calls < 20  # 11; it was 42, and 100 before


class Scored(nn.Module):
    """The loss of what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.module(values), labels)
