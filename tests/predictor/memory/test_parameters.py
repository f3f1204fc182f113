"""Parameters on a rank, as memory, step times and the planner's estimates count them, against the layout's state map."""

import numpy as np
import pytest
from hypothesis import given, settings

from hethub.planner.estimate.costs import rank_parameters
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.memory.parameters import StageParameters, rank_widths, stepped
from hethub.predictor.memory.ranks import rank_memory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.state import StateMap
from hethub.spec.layout.tensors import EMBEDDING
from tests.predictor.plans import cluster, uniform
from tests.spec.random_plans import any_cases
from tests.support.layouts import MODEL, Case, replica, stage


def held_by_rank(layout: Layout) -> dict[Assignment, tuple[int, int, int]]:
    """Per rank, the elements that the state map says it holds: all, those of norms, those of a tied embedding apart."""
    state, found = StateMap(layout), {}
    for assignment in layout.assignments:
        held = state.held_by(assignment)
        norms = sum(own.size for placed, own in held if not placed.info.decays)
        apart = sum(own.size for placed, own in held if placed.info.name == EMBEDDING) if layout.head_is_apart else 0
        found[assignment] = sum(own.size for _, own in held), norms, apart
    return found


@settings(max_examples=60, deadline=None)
@given(case=any_cases())
def test_every_rank_holds_what_the_state_map_says(case: Case) -> None:
    layout = case.layout()
    costs = PlanCosts(layout, HETHUB, packaged()).state
    held = held_by_rank(layout)
    for assignment, (total, norms, apart) in held.items():
        replica = layout.replica(assignment.stage, assignment.replica)
        widths = rank_widths(layout.model, replica.tp, replica.tensor_shares)[assignment.position]
        counted = StageParameters.of(layout, assignment.stage, widths)
        assert (counted.total, counted.norms, counted.apart) == (total, norms, apart)
        fullest = max(held[other][0] for other in layout.assignments if other[1:3] == assignment[1:3])
        assert sum(costs.held(replica, costs.whole[assignment.stage])) == fullest


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_the_models_parameters(family: str, tied: bool) -> None:
    """Each once, learned positions too, but for a tied embedding, which both ends hold."""
    model = MODEL.replace(family=family, tied_head=tied)
    layout = uniform(model, cluster(("A100-SXM4-80GB", 1, 2)), tp=1, pp=2, micro_batch=1, batch=2, seq=16)
    (alone,) = rank_widths(model, 1)
    totals = [StageParameters.of(layout, s, alone).total for s in range(2)]
    assert sum(totals) == model.parameters + (model.vocab * model.hidden if tied else 0)


@settings(max_examples=60, deadline=None)
@given(case=any_cases())
def test_every_rank_steps_what_the_state_map_says(case: Case) -> None:
    check_stepped(case.layout())


def check_stepped(layout: Layout) -> None:
    """But for what ranks of a replica hold alike (norms, shared KV heads): the map gives each of it to one owner."""
    (alone,) = rank_widths(layout.model, 1)
    for index, spec in enumerate(layout.stages):
        whole, own = StageParameters.of(layout, index, alone).held, {}
        repeated = 0.0
        for own_replica in spec.replicas:
            held = [
                StageParameters.of(layout, index, widths).held
                for widths in rank_widths(layout.model, own_replica.tp, own_replica.tensor_shares)
            ]
            own |= dict(zip(own_replica.ranks, held, strict=True))
            repeated = max(repeated, sum(map(sum, held)) - sum(whole))
        for rank, held_by in own.items():
            counted = stepped(layout, HETHUB, index, rank, held_by, whole)
            assert counted == pytest.approx(StateMap(layout).owned_elements[rank], abs=repeated + 8)


@pytest.mark.parametrize("named", [[0], [1], [0, 1]], ids=str)
def test_a_tied_head_is_stepped_by_the_embeddings_stage_where_an_end_names_shares(named: list[int]) -> None:
    shares = [{"state_shares": {2 * s: 0.3}} if s in named else {} for s in range(2)]
    stages = [
        stage((2 * s, 2 * s + 2), replica([2 * s], 4), replica([2 * s + 1], 4), zero=1, **own)
        for s, own in enumerate(shares)
    ]
    check_stepped(Case(name="named", stages=stages, model=MODEL.replace(tied_head=True)).layout())


def test_ranks_of_unlike_degrees_share_the_state_alike() -> None:
    """TP 4 beside TP 1: a fifth each, where a half of what each holds was counted."""
    layout = Case(name="unlike", stages=[stage((0, 4), replica([0, 1, 2, 3], 4), replica([4], 4), zero=1)]).layout()
    optimizer = [entry.parts["optimizer"] for entry in rank_memory(layout)]
    owned = StateMap(layout).owned_elements
    assert optimizer == pytest.approx([16 * owned[rank] for rank in range(5)], rel=0.02)
    assert max(optimizer) < 1.1 * min(optimizer)


@pytest.mark.parametrize("tied", [False, True])
def test_the_planner_counts_what_the_state_map_says(tied: bool) -> None:
    """Two stages of unlike degrees; six ranks of a vocabulary that they do not divide."""
    model = MODEL.replace(tied_head=tied, vocab=509, layers=3, heads=6, kv_heads=3, head_dim=8)
    stages = [
        {"layers": [[0, 1]], "replicas": [{"ranks": [0, 1, 2], "samples": 2, "micro_batch": 1}], "zero": 1},
        {"layers": [[1, 3]], "replicas": [{"ranks": [*range(3, 9)], "samples": 2, "micro_batch": 1}], "zero": 1},
    ]
    layout = Case(name="planned", stages=stages, vendors="a" * 9, global_batch=2, model=model).layout()
    found = rank_parameters(model, np.array([3, 6]), np.array([1, 2]), np.array([True, False]), np.array([False, True]))
    for index, count in enumerate(found):
        held = {a: own for a, own in held_by_rank(layout).items() if a.stage == index}
        assert count == max(total - apart for total, _, apart in held.values())
