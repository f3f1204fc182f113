"""Of plans that take as long, the simplest is the answer."""

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup
from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.evaluate.outlook import Outlooks
from hethub.planner.plan import _simplest
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.spec.model import ModelSpec
from tests.planner.problems import TINY, cluster
from tests.predictor.plans import cluster as cluster_of

LLAMA_1B = ModelSpec(
    name="llama-1b", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, max_seq_len=8192
)


def simplest(problem: Problem, *candidates: Candidate) -> tuple[Evaluation, Evaluation]:
    """The first of these candidates, which was chosen, and what is taken in its place where all are known."""
    incumbent, outlooks = Incumbent(problem), Outlooks(problem)
    chosen, *_ = [incumbent.consider(candidate) for candidate in candidates]
    assert chosen is not None
    return chosen, _simplest(incumbent, outlooks, chosen, outlooks.of(chosen.plan).objective_seconds)


def test_no_chunks_that_win_nothing() -> None:
    """Of one stage, chunks let buckets of gradients end with them: nanoseconds of a step of a second."""
    problem = pose(LLAMA_1B, cluster_of(("H100-SXM5-80GB", 1, 8)), Batch(64, 8192, "bf16"))
    stage = CandidateStage(16, (ReplicaGroup(0, 1, 1, 8),), "none", 2)
    cut = [Candidate((stage,), pattern=Pattern("interleaved", chunks)) for chunks in (16, 2)]
    chosen, found = simplest(problem, *cut, Candidate((stage,)))
    assert abs(found.seconds - chosen.seconds) < 1e-5 * chosen.seconds
    assert (found.plan.schedule, found.plan.num_chunks) == ("1f1b", 1)
    chosen, found = simplest(problem, Candidate((stage,)), *cut)
    assert found is chosen


def offloading(first_gb: float) -> tuple[Problem, Candidate]:
    """Two stages whose optimizer lies in host memory, and accelerators of which the first has so much memory."""
    on = cluster(("cpu", 1, 0.1, first_gb), ("cpu", 1, 0.11, 4.0))
    on = on.replace(nodes=tuple(node.replace(host_memory_gb=4.0) for node in on.nodes))
    each = [CandidateStage(3, (ReplicaGroup(index, 1, 1, 1),), "none", 0, offload=("optimizer",)) for index in (0, 1)]
    return pose(TINY, on, Batch(8, 64, "fp32")), Candidate(tuple(each))


def test_no_offload_where_there_is_room() -> None:
    """Offload stays on the stage that does not fit without."""
    sizes = (0.001 * step for step in range(1, 4000))
    tight = next(gb for gb in sizes if (own := evaluated(*offloading(gb))) is not None and own.fits)
    for first_gb, kept in ((4.0, ()), (tight, ("optimizer",))):
        chosen, found = simplest(*offloading(first_gb))
        assert found.fits
        assert found.seconds <= chosen.seconds
        assert [stage.offload for stage in found.plan.stages] == [kept, ()]


def evaluated(problem: Problem, candidate: Candidate) -> Evaluation | None:
    return Incumbent(problem).consider(candidate)
