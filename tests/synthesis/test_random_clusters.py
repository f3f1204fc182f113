"""The best programs for random clusters train as one process; RANDOM_CLUSTERS says how many of each model, RANDOM_SEED
where they begin. Twenty steps are the same bits from run to run."""

import os

import pytest
import torch

from hethub.synthesis.planning import plan_graph
from tests.support.ranks import run_ranks
from tests.synthesis.clusters import cluster, random_cluster
from tests.synthesis.exact import check, reference, train
from tests.synthesis.models import NAMES

COUNT, SEED = int(os.environ.get("RANDOM_CLUSTERS", "1")), int(os.environ.get("RANDOM_SEED", "1"))
ISLANDS = [[0, 2, 5], [1, 3, 4], [6, 7]]
AT_ONCE = 5  # programs that one set of ranks trains under


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_programs_for_random_clusters_train_as_one_process(name: str) -> None:
    known = reference(name)
    drawn = [(seed, 2 + seed % 7) for seed in range(SEED, SEED + COUNT)]
    programs = [plan_graph(known.graph, random_cluster(seed, size)) for seed, size in drawn]
    programs.append(
        plan_graph(known.graph, cluster([1.0, 0.001, 2.0, 3.0]))
    )  # a rank that would only delay gets nothing
    assert any(0.0 in parts for parts in programs[-1].ratios.values())
    assert all(program.is_optimal for program in programs)
    for start in range(0, len(programs), AT_ONCE):
        some = programs[start : start + AT_ONCE]
        results = run_ranks(
            8, train, known.graph, known.named, known.inputs, some, islands=ISLANDS, timeout_seconds=600
        )
        for outcomes in results:
            for outcome in outcomes:
                check(known, outcome)
        assert len(results[0]) == len(some)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg", "moe"])
def test_twenty_steps_are_the_same_bits_from_run_to_run(name: str) -> None:
    known = reference(name)
    program = plan_graph(known.graph, cluster([1.0, 2.0, 5.0], gbytes=1e-5))
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
