"""From a module and a cluster to a program: trace, rules, search and ratios in turns."""

from collections.abc import Sequence
from math import ceil

import torch

from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.program import memory_limits
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Costs, Model, WithoutLatency, precision_of
from hethub.synthesis.graph import Graph, fingerprint
from hethub.synthesis.program import Execution, Living, Program
from hethub.synthesis.ratios import alternate, by_speed, even
from hethub.synthesis.rules import PARTIAL, SAMPLES, Rule, Rules
from hethub.synthesis.search import USUAL, NoRoom, Problem, Search
from hethub.synthesis.table import HEAVY, short


def plan(
    module: torch.nn.Module,
    example_inputs: Sequence[torch.Tensor],
    cluster: ClusterSpec,
    *,
    time_limit_seconds: float = 60.0,
) -> Program:
    """Return the program that computes `module(*example_inputs)` and its gradients on `cluster` in the least predicted seconds.

    No device is needed, and the module may be on any. Raises BadInput, naming operator and module, for what cannot be
    cut exactly, and where no program fits the memory of every rank.
    """
    return plan_graph(trace(module, example_inputs), cluster, Search(time_limit_seconds=time_limit_seconds))


def pose(graph: Graph, cluster: ClusterSpec) -> Model:
    """A traced step with its rules and costs on a cluster."""
    return Model(graph, Rules(graph), Costs(cluster, precision_of(graph)))


def plan_graph(graph: Graph, cluster: ClusterSpec, options: Search = USUAL, *, reserve: float = 0.0) -> Program:
    """Return what `plan` returns, for a graph that has been traced. The fraction `reserve` of every accelerator's memory stays
    free."""
    return plan_model(pose(graph, cluster), options, reserve=reserve)


def plan_model(model: Model, options: Search = USUAL, *, reserve: float = 0.0) -> Program:
    """Return what `plan_graph` returns, for a model that was posed."""
    try:
        best = alternate(model, memory_limits(model.costs.cluster, reserve), options)
    except NoRoom as error:
        kept = (
            f" Or lower constraints.reserve (now {reserve:.8g}), which keeps that part of it free." if reserve else ""
        )
        raise BadInput(f"{error}{kept}") from None
    return program_of(best.found.execution, is_optimal=best.found.is_optimal, rounds=best.rounds)


def data_parallel(model: Model) -> Problem:
    """The programs that cut nothing but the samples and keep every parameter whole on every rank."""
    samples = {None, *(number for number, axis in enumerate(model.rules.axes) if axis.name.startswith(SAMPLES))}

    def by_samples(number: int, rule: Rule) -> bool:
        return model.rules.axis_of(number, rule) in samples

    return Problem(model, by_samples, cuts_parameters=False)


def baselines(model: Model) -> dict[str, float]:
    """Seconds under our cost of what others would run on the same accelerators, whatever memory they need.

    `DP-EV` and `DP-CP` are data parallel, every parameter whole on every rank: even samples, and samples by computing
    speed; each operator that the samples do not cut is computed whole, wherever that is cheapest. `HAP` is the program
    that its own rules (none that cuts a product's contraction in forward) and costs (no latency, one ratio for all axes)
    find best.
    """

    def known_to_hap(number: int, rule: Rule) -> bool:
        operator = model.graph.operators[number]
        splits = short(operator) in HEAVY and rule.is_cut and PARTIAL in rule.outputs
        return not (splits and operator.is_forward)

    parallel = data_parallel(model)
    bare = model._replace(costs=WithoutLatency(model.costs.cluster, model.costs.precision))
    hap = Problem(bare, known_to_hap).search(by_speed(model)).execution
    return {
        "DP-EV": parallel.search(even(model)).execution.step_seconds,
        "DP-CP": parallel.search(by_speed(model)).execution.step_seconds,
        "HAP": Execution(model, hap.numbers, hap.kept, hap.shares).step_seconds,
    }


def program_of(execution: Execution, *, is_optimal: bool, rounds: int) -> Program:
    """The plain data of a program, for ranks and readers."""
    model = execution.model
    return Program(
        size=model.costs.size,
        rules=execution.numbers,
        kept=execution.kept,
        moves=tuple(move for moves in execution.moves.values() for move in moves),
        shares=execution.shares,
        axis_names=tuple(axis.name for axis in model.rules.axes),
        fingerprint=fingerprint(model.graph),
        predicted_seconds=execution.step_seconds,
        optimizer_seconds=execution.optimizer_seconds,
        memory_bytes=tuple(ceil(peak) for peak in Living(execution).peak),
        is_optimal=is_optimal,
        rounds=rounds,
        unknown=dict(model.rules.unknown),
        table=tuple(execution.rows()),
    )


__all__ = ["baselines", "data_parallel", "plan", "plan_graph", "plan_model", "pose", "program_of"]
