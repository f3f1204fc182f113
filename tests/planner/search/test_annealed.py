"""What simulated annealing found, `auto` finds: plans it had missed."""

from hethub.planner import plan
from tests.oracle.annealing import Sort, Stage, State, Walk
from tests.oracle.question import random_question


def test_auto_finds_what_annealing_found_where_one_of_two_accelerators_is_nearly_full() -> None:
    """Zero bubble with all microbatches in flight on the first stage, and what the second one keeps in host memory."""
    question = random_question(100, 2, global_batch=8)
    found = plan(question.model, question.cluster, (8, question.seq_len, "bf16"), with_bounds=False)
    walk = Walk(question)
    assert walk.cost(walk.near(found.plan)) == found.prediction.step_seconds
    first = Stage(2, frozenset({0}), {walk.sort(0): Sort(micro_batch=2)}, recompute="none", in_flight=4)
    second = Stage(4, frozenset({1}), {walk.sort(1): Sort(micro_batch=2)}, 1, "none", ("activations",), in_flight=1)
    known = walk.cost(State((first, second), "zero_bubble"))
    assert (found.best_on_point or found.prediction).step_seconds <= known * (1 + 1e-9)
