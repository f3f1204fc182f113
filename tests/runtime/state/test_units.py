"""Which units take gradients, or are needed, in which pass where weight gradients are deferred."""

from typing import Any

import pytest
import torch

from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.state.reduction import Reducer
from hethub.runtime.state.storage import FlatStorage
from hethub.runtime.state.zero import ZeroManager
from hethub.spec.layout.execution import Kind
from hethub.spec.layout.state import StateMap
from tests.support.layouts import MODEL, Case, replica, stage

PAIRS = (replica([0], 4), replica([1], 4)), (replica([2], 4), replica([3], 4))


def manager(case: Case, rank: int) -> ZeroManager:
    """That of a rank that meets no other."""
    layout = case.layout()
    (assignment,) = [own for own in layout.assignments if own is not None and own.rank == rank]
    state = StateMap(layout)
    storage = FlatStorage(state, assignment, "fp64", torch.device("cpu"))
    return ZeroManager(Reducer(state, storage, lambda ranks: None, (rank,)), MemoryMeter([]))


def opened(of: ZeroManager, kind: Kind) -> list[tuple[int, ...]]:
    """By layer of the stage."""
    return [of._gradients_for(kind, layer) for layer in range(of._spec.num_layers)]


def test_a_tied_embedding_alone_takes_gradients_before_the_deferred_ones() -> None:
    """The head's in its forward, the embedding's in its backward: four layers, and what both ends use as the fifth unit."""
    stages = [stage((0, 4), *PAIRS[0], zero=2)]
    own = manager(Case(name="tied", stages=stages, schedule="zero_bubble", model=MODEL.replace(tied_head=True)), 0)
    assert opened(own, Kind.FORWARD) == [(), (), (), (4,)]
    assert opened(own, Kind.BACKWARD) == [(4,), (), (), ()]
    assert opened(own, Kind.WEIGHT) == [(0, 4), (1,), (2,), (3, 4)]


@pytest.mark.parametrize(("rank", "forward", "backward"), [(0, [(), ()], [(0,), ()]), (2, [(), (1,)], [(), ()])])
def test_a_stage_opens_its_units_before_their_weight_gradients_only_at_the_model_s_ends(
    rank: int, forward: list[Any], backward: list[Any]
) -> None:
    """A buffer opened in the backward of a stage between would lie there for all microbatches in flight."""
    stages = [stage((0, 2), *PAIRS[0], zero=2), stage((2, 4), *PAIRS[1], zero=2)]
    own = manager(Case(name="two", stages=stages, schedule="zero_bubble"), rank)
    assert (opened(own, Kind.FORWARD), opened(own, Kind.BACKWARD)) == (forward, backward)
    assert opened(own, Kind.WEIGHT) == [(0,), (1,)]


def test_deferred_weight_gradients_need_no_weights() -> None:
    stages = [stage((0, 4), *PAIRS[0], zero=3)]
    own = manager(Case(name="three", stages=stages, schedule="zero_bubble"), 0)
    passes = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
    assert [own._weights_for(kind, 2) for kind in passes] == [(2,), (2,), ()]


def test_weights_of_both_ends_stay_until_both_are_through() -> None:
    """A model chunk of the whole model: its last layer is released while the first one, which uses the embedding too, is at
    work."""
    stages = [stage((0, 4), *PAIRS[0], zero=3)]
    own = manager(Case(name="tied", stages=stages, schedule="ministages", model=MODEL.replace(tied_head=True)), 0)
    assert own.weights is not None
    for layer in (3, 2, 1, 0):
        own.prefetch(Kind.BACKWARD, layer)
        own.acquire(Kind.BACKWARD, layer)
    left = []
    for layer in (3, 2, 1, 0):
        own.release(Kind.BACKWARD, layer)
        left.append(set(own.weights._present))
    assert left == [{0, 1, 2, 4}, {0, 1, 4}, {0, 4}, set()]
