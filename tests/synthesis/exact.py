"""Training under programs in rank processes, compared with one process: loss, every gradient, weights after AdamW."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from hethub.spec.cluster import ClusterSpec
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Costs, Model, Shares, precision_of
from hethub.synthesis.graph import Graph
from hethub.synthesis.lower import Step
from hethub.synthesis.planning import program_of
from hethub.synthesis.program import Execution, Program
from hethub.synthesis.rules import WHOLE, Rules
from tests.synthesis.models import build

STEPS = 3
TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process does with a model and a batch."""

    graph: Graph
    inputs: tuple[torch.Tensor, ...]
    named: dict[str, torch.Tensor]  # the initial state, tied tensors under each of their names
    losses: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step
    weights: dict[str, torch.Tensor]  # after the last


_REFERENCES: dict[tuple[str, tuple[int, ...]], Reference] = {}


def reference(name: str, sizes: tuple[int, ...] = (6,) * STEPS) -> Reference:
    if (name, sizes) not in _REFERENCES:
        _REFERENCES[name, sizes] = reference_of(*build(name), sizes)
    return _REFERENCES[name, sizes]


def reference_of(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], sizes: tuple[int, ...] = (6,) * STEPS
) -> Reference:
    """Trained on so many of the batch's samples in each step."""
    graph = trace(module, inputs)
    held = {**module.state_dict(keep_vars=True), **dict(module.named_buffers())}
    copies = {id(value): value.detach().clone() for value in held.values()}
    kept = {key: copies[id(value)] for key, value in held.items()}
    first: dict[str, torch.Tensor] = {}
    losses = []
    optimizer = adamw(module.parameters())
    for size in sizes:
        optimizer.zero_grad()
        loss = module(*(value[:size] for value in inputs))
        loss.backward()
        first = first or {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    return Reference(graph=graph, inputs=inputs, named=kept, losses=losses, gradients=first, weights=weights)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Holder(nn.Module):
    """A module that has another's tensors by name and no forward: ranks need not import what the user's is made of."""

    def __init__(self, named: dict[str, torch.Tensor], trained: set[str]) -> None:
        super().__init__()
        made = {id(named[name]): nn.Parameter(named[name].clone()) for name in trained}  # a tied one has two names
        for name, value in named.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if id(value) in made:
                owner.register_parameter(last, made[id(value)])
            else:
                owner.register_buffer(last, value.clone())


def steps_of(
    world: Any, graph: Graph, named: dict[str, torch.Tensor], programs: list[Program]
) -> Iterator[tuple[Program, Step, torch.optim.Optimizer]]:
    """Of every program that this rank is part of: its step, from the initial state, and the optimizer of it."""
    for program in programs:
        group = world.group(range(program.size))
        if group is not None:
            step = Step(Holder(named, set(graph.parameters)), graph, program, group)
            yield program, step, adamw(step.parameters())


Outcome = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], bool]


def train(
    world: Any,
    graph: Graph,
    named: dict[str, torch.Tensor],
    inputs: Any,
    programs: list[Program],
    steps: int = STEPS,
    sizes: tuple[int, ...] = (),
) -> list[Outcome]:
    """Of every program that this rank is part of: losses, whole gradients of the first step, weights at the end, and
    whether no more lived than was predicted."""
    torch.set_num_threads(1)
    results = []
    for program, step, optimizer in steps_of(world, graph, named, programs):
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for size in sizes or (len(inputs[0]),) * steps:
            optimizer.zero_grad()
            losses.append(float(step(*(value[:size] for value in inputs))))
            gradients = gradients or step.gradients()
            optimizer.step()
        assert step.peak_bytes is not None
        keeps_within = step.peak_bytes <= program.memory_bytes[world.rank]
        results.append((losses, gradients, step.state_dict(), keeps_within))
    return results


def worst(known: Reference, outcome: Outcome) -> float:
    """The largest difference of an entry of a gradient, over the largest entry of that gradient."""
    pairs = [(outcome[1][name], gradient) for name, gradient in known.gradients.items() if gradient.abs().max() > 1e-10]
    return max(float((found - gradient).abs().max() / gradient.abs().max()) for found, gradient in pairs)


def check(known: Reference, outcome: Outcome) -> None:
    losses, gradients, weights, keeps_within = outcome
    assert keeps_within
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(known.losses), rtol=TOLERANCE, atol=TOLERANCE)
    for name, gradient in known.gradients.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert known.weights.keys() <= weights.keys()  # buffers that a state leaves out are among a holder's
    for name in known.weights:
        # Adam divides by the root of a gradient's square: where a gradient is all rounding, so is its first step.
        bound = TOLERANCE if name in known.graph.updates else 1e-6
        torch.testing.assert_close(
            weights[name], known.weights[name], rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


def random_shares(model: Model, seed: int) -> Shares:
    """Any atoms of every axis for every rank, often none or all."""
    draw, shares = random.Random(seed), []
    for axis in model.rules.axes:
        ends = sorted(draw.choice([0, axis.atoms, draw.randint(0, axis.atoms)]) for _ in range(model.costs.size - 1))
        shares.append(tuple(b - a for a, b in zip([0, *ends], [*ends, axis.atoms], strict=True)))
    return tuple(shares)


def random_program(graph: Graph, cluster: ClusterSpec, seed: int) -> Program:
    """Any rule for every operator, any state for every parameter, any shares: what no search would choose."""
    draw = random.Random(seed)
    model = Model(graph, Rules(graph), Costs(cluster, precision_of(graph)))
    shares = random_shares(model, seed)
    rules = []
    for number, own in enumerate(model.rules.of):
        axes = [model.rules.axis_of(number, rule) for rule in own]
        rules.append(
            draw.choice([n for n, axis in enumerate(axes) if axis is None or axis in model.rules.worth_cutting])
        )
    kept = {name: draw.choice([WHOLE, *model.rules.cuts(tensor)]) for name, tensor in graph.parameters.items()}
    return program_of(Execution(model, rules, kept, shares), is_optimal=False, rounds=0)
