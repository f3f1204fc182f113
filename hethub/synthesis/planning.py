"""From a module and a cluster to a program: trace, rules, search and ratios in turns."""

from collections.abc import Sequence
from math import ceil

import torch

from hethub.spec.cluster import ClusterSpec
from hethub.synthesis.costs import Costs, precision_of
from hethub.synthesis.graph import Graph
from hethub.synthesis.lower import fingerprint
from hethub.synthesis.program import Execution, Living, Model, Program
from hethub.synthesis.ratios import alternate
from hethub.synthesis.rules import Rules
from hethub.synthesis.search import Search
from hethub.synthesis.trace import trace


def plan(
    module: torch.nn.Module,
    example_inputs: Sequence[torch.Tensor],
    cluster: ClusterSpec,
    *,
    time_limit_seconds: float = 60.0,
) -> Program:
    """The program of least predicted seconds of `module(*example_inputs)` and its gradients on `cluster`.

    No device is needed, and the module may be on any. Raises BadInput, naming operator and module, for what cannot be
    cut exactly, and where no program fits the memory of every rank.
    """
    return plan_graph(trace(module, example_inputs), cluster, Search(time_limit_seconds=time_limit_seconds))


def plan_graph(graph: Graph, cluster: ClusterSpec, options: Search | None = None) -> Program:
    """As `plan`, of a graph that has been traced."""
    model = Model(graph, Rules(graph), Costs(cluster, precision_of(graph)))
    best = alternate(model, model.costs.memory_limits, options)
    return program_of(best.found.execution, is_optimal=best.found.is_optimal, rounds=best.rounds)


def program_of(execution: Execution, *, is_optimal: bool, rounds: int) -> Program:
    """The plain data of a program, for ranks and readers."""
    model = execution.model
    return Program(
        size=model.costs.size,
        rules=tuple(model.rules.of[number].index(rule) for number, rule in enumerate(execution.rules)),
        kept=execution.kept,
        moves=tuple(move for moves in execution.moves.values() for move in moves),
        shares=execution.shares,
        axis_names=tuple(axis.name for axis in model.rules.axes),
        fingerprint=fingerprint(model.graph),
        predicted_seconds=execution.seconds,
        memory_bytes=tuple(ceil(peak) for peak in Living(execution).peak),
        is_optimal=is_optimal,
        rounds=rounds,
        unknown=dict(model.rules.unknown),
        table=tuple(execution.rows()),
    )
