"""The best programs for random clusters train as one process; RANDOM_CLUSTERS says how many of each model, RANDOM_SEED
where they begin. Twenty steps are the same bits from run to run."""

import os
from functools import partial

import pytest
import torch

from hethub.synthesis.costs import Costs, Model
from hethub.synthesis.planning import plan_graph, program_of
from hethub.synthesis.program import Program
from hethub.synthesis.ratios import by_speed, even
from hethub.synthesis.rules import Rules
from hethub.synthesis.search import Problem, Search
from tests.support.ranks import run_ranks
from tests.synthesis.clusters import cluster, random_cluster
from tests.synthesis.exact import Reference, check, random_shares, reference, train, worst

COUNT, SEED = int(os.environ.get("RANDOM_CLUSTERS", "1")), int(os.environ.get("RANDOM_SEED", "1"))
ISLANDS = [[0, 2, 5], [1, 3, 4], [6, 7]]
AT_ONCE = 8  # programs that one set of ranks trains under
PATIENT = Search(time_limit_seconds=600)  # by the clock: a loaded machine must not end a search early
NARROW = ("vgg19", "vit", "bert", "bert-moe")  # all layers of VGG19, two of the others
DEEP = ("vit12", "bert12", "bert-moe12")  # of all their layers


def planned(known: Reference, count: int) -> list[Program]:
    """The best programs for so many random clusters, for shares by speed, equal ones or any in turns; and what is planned
    for a cluster one rank of which would only delay the others."""
    rules, programs = Rules(known.graph), []
    for seed in range(SEED, SEED + count):
        model = Model(known.graph, rules, Costs(random_cluster(seed, 2 + seed % 7), "fp64"))
        chosen = (by_speed, even, partial(random_shares, seed=seed))[seed % 3](model)
        found = Problem(model).search(chosen, options=PATIENT)
        programs.append(program_of(found.execution, is_optimal=found.is_optimal, rounds=1))
    return [*programs, plan_graph(known.graph, cluster([1.0, 0.001, 2.0, 3.0]), PATIENT)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [*((name, COUNT) for name in NARROW), *((name, 1 + COUNT // 50) for name in DEEP)]
)
def test_programs_for_random_clusters_train_as_one_process(name: str, count: int) -> None:
    known = reference(name)
    programs = planned(known, count)
    without = [any(0.0 in parts for parts in program.ratios.values()) for program in programs]
    assert without[-1]
    assert all(program.is_optimal for program in programs)
    differences = []
    for start in range(0, len(programs), AT_ONCE):
        some = programs[start : start + AT_ONCE]
        size = max(program.size for program in some)
        islands = [own for island in ISLANDS if (own := [rank for rank in island if rank < size])]
        results = run_ranks(
            size, train, known.graph, known.named, known.inputs, some, islands=islands, timeout_seconds=600
        )
        for outcomes in results:
            for outcome in outcomes:
                check(known, outcome)
                differences.append(worst(known, outcome))
        assert len(results[0]) == len(some)
    assert len(differences) == sum(program.size for program in programs)
    print(
        f"{name}, {len(known.graph.operators)} operators: {len(programs)} programs on"
        f" {min(p.size for p in programs)} to {max(p.size for p in programs)} ranks,"
        f" {sum(p.size > 6 for p in programs)} over three islands, {sum(without)} with a rank that gets nothing;"
        f" gradients' largest difference over their largest entry {max(differences):.1e}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_twenty_steps_are_the_same_bits_from_run_to_run(name: str) -> None:
    known = reference(name)
    program = plan_graph(known.graph, cluster([1.0, 2.0, 5.0], gbytes=1e-5), PATIENT)
    runs = [
        run_ranks(
            3, train, known.graph, known.named, known.inputs, [program], 20, islands=[[0, 2], [1]], timeout_seconds=280
        )[0][0]
        for _ in range(2)
    ]
    (losses, _, weights, _), (again, _, others, _) = runs
    assert len(losses) == 20
    assert losses == again
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    print(f"{name}: 20 losses and {len(weights)} tensors after 20 steps of AdamW, equal in two runs")
