"""Every layout trains the model of one process: losses, norms and weights after five steps in float64."""

import pytest

from tests.support.layouts import MODEL, Case, check_against_one_process, replica, stage

TIED = MODEL.replace(tied_head=True)
MQA = MODEL.replace(kv_heads=2)
EVEN = {"zero": 1}

CASES = [
    Case(name="tp2", stages=[stage((0, 4), replica([0, 1], 8, 2))]),
    Case(name="tp4", stages=[stage((0, 4), replica([0, 1, 2, 3], 8, 4))]),
    Case(name="pp2", stages=[stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]),
    Case(name="pp2 uneven layers", stages=[stage((0, 1), replica([0], 8, 2)), stage((1, 4), replica([1], 8, 2))]),
    Case(name="dp2 uneven samples 3:1", stages=[stage((0, 4), replica([0], 6, 2), replica([1], 2))]),
    Case(name="tp2 to tp1", stages=[stage((0, 2), replica([0, 1], 8, 2)), stage((2, 4), replica([2], 8, 2))]),
    Case(name="tp1 to tp2", stages=[stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([2, 1], 8, 2))]),
    Case(
        name="dp2 to dp1", stages=[stage((0, 2), replica([0], 4), replica([1], 4)), stage((2, 4), replica([2], 8, 2))]
    ),
    Case(
        name="dp1 to dp3 with other microbatch sizes",
        stages=[stage((0, 2), replica([0], 8, 3)), stage((2, 4), replica([1], 4, 2), replica([2], 3), replica([3], 1))],
    ),
    Case(
        name="tp2 dp1 to tp1 dp2",
        stages=[stage((0, 2), replica([0, 1], 8, 2)), stage((2, 4), replica([2], 5), replica([3], 3, 3))],
    ),
    Case(
        name="three stages tp2, tp1, tp2",
        stages=[
            stage((0, 1), replica([0, 1], 8, 2)),
            stage((1, 3), replica([2], 8, 1)),
            stage((3, 4), replica([3, 4], 8, 4)),
        ],
    ),
    Case(
        name="tp4 beside tp1 in one stage",
        stages=[stage((0, 4), replica([0, 1, 2, 3], 6, 2), replica([4], 2), zero=1)],
        vendors="nnnna",
    ),
    Case(
        name="tp4 beside tp1 without sharding, then tp2",
        stages=[stage((0, 2), replica([0, 1, 2, 3], 6, 2), replica([4], 2)), stage((2, 4), replica([5, 6], 8, 2))],
    ),
    Case(name="zero1 with uneven samples", stages=[stage((0, 4), replica([0], 5, 2), replica([1], 3), **EVEN)]),
    Case(
        name="zero1 with state shares",
        stages=[
            stage((0, 4), replica([0], 4), replica([1], 2), replica([2], 2), zero=1, state_shares={0: 0.9, 2: 0.0})
        ],
    ),
    Case(
        name="an unused rank between stages",
        stages=[stage((0, 2), replica([0, 1], 8, 2)), stage((2, 4), replica([3], 8, 2))],
        unused=(2,),
    ),
    Case(
        name="rank 0 and an island unused, zero1",
        stages=[stage((0, 4), replica([1], 5, 2), replica([3], 3), **EVEN)],
        vendors="nnai",
        unused=(0, 2),
    ),
    Case(name="tensor shares 3:1", stages=[stage((0, 4), replica([0, 1], 8, 4, tensor_shares=[3, 1]))]),
    Case(
        name="shared kv heads, tp4 over 2 kv heads",
        stages=[stage((0, 4), replica([0, 1, 2, 3], 6, 2), replica([4], 2), zero=1)],
        model=MQA,
    ),
    Case(
        name="islands 2+2 contiguous",
        stages=[stage((0, 2), replica([0, 1], 8, 2)), stage((2, 4), replica([2, 3], 8, 2))],
        vendors="aann",
    ),
    Case(
        name="islands 2+2 interleaved, one stage",
        stages=[stage((0, 4), *(replica([rank], 2) for rank in range(4)), zero=1)],
        vendors="anan",
    ),
    Case(
        name="three islands",
        stages=[
            stage((0, 2), replica([0], 3), replica([1], 2), replica([2], 3), zero=1),
            stage((2, 4), replica([3, 4], 8, 2)),
        ],
        vendors="anccc",
    ),
    Case(
        name="tied head over two stages",
        stages=[stage((0, 2), replica([0, 1], 8, 2)), stage((2, 4), replica([2], 8, 2))],
        model=TIED,
        vendors="aan",
    ),
    Case(
        name="tied head over stages with unlike replicas",
        stages=[
            stage((0, 2), replica([0], 5, 2), replica([1], 3), zero=1),
            stage((2, 4), replica([2, 3], 6, 2), replica([4], 2), zero=1),
        ],
        model=TIED,
        vendors="anaan",
    ),
    Case(
        name="tied head over two stages of one island, two replicas at the head",
        stages=[stage((0, 1), replica([0, 1], 8, 2)), stage((1, 4), replica([2], 5), replica([3], 3))],
        model=TIED,
    ),
    Case(name="tied head in one stage", stages=[stage((0, 4), replica([0, 1], 8, 2))], model=TIED),
    Case(
        name="recompute full",
        stages=[stage((0, 2), replica([0, 1], 8, 2), recompute="full"), stage((2, 4), replica([2], 8, 2))],
    ),
    Case(name="recompute selective", stages=[stage((0, 4), replica([0, 1], 8, 2), recompute="selective")]),
    Case(
        name="gpipe",
        stages=[
            stage((0, 2), replica([0], 8, 2)),
            stage((2, 3), replica([1], 8, 1)),
            stage((3, 4), replica([2], 8, 4)),
        ],
        schedule="gpipe",
    ),
    Case(
        name="document mask",
        stages=[
            stage((0, 2), replica([0], 8, 2)),
            stage((2, 3), replica([1], 8, 2)),
            stage((3, 4), replica([2], 8, 2)),
        ],
        document_mask=True,
    ),
    Case(
        name="eight ranks, all at once",
        stages=[
            stage((0, 1), replica([0, 1], 5, 2), replica([2], 3), zero=1, state_shares={2: 0.5}),
            stage((1, 3), replica([3], 8, 2, in_flight=4), recompute="full"),
            stage((3, 4), replica([4, 5], 4, 2, tensor_shares=[3, 1]), replica([6], 2), replica([7], 2, 2), zero=1),
        ],
        model=TIED,
        vendors="aancnnaa",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(case: Case) -> None:
    check_against_one_process(case)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_bodies_train_the_model_of_one_process_that_compiles_nothing() -> None:
    stages = [stage((0, 4), replica([0, 1], 6, 2), replica([2], 2), zero=1)]
    case = Case(name="tp2 beside tp1, compiled", stages=stages, train={"compile": True})
    check_against_one_process(case, timeout_seconds=900)
