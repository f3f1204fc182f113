"""Unmodified models train under programs over 2 to 4 unlike ranks as in one process, to 1e-10 in float64."""

import pytest

from hethub.synthesis.planning import plan_graph
from tests.support.ranks import run_ranks
from tests.synthesis.clusters import cluster, random_cluster
from tests.synthesis.exact import check, random_program, reference, train

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
