"""Sums of gradients over replicas are under way while backward goes on with the layers before."""

from typing import Any

import pytest
import torch

from hethub.runtime.state import reduction
from hethub.runtime.state.parameter import Parameter
from hethub.spec.layout.execution import Kind
from tests.runtime.state.test_gathers import ENTER, WAIT, Logged
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks

BEGIN = "begin"


def log_step(world: Any, case: Case) -> list[tuple[str, int]]:
    """The sums of matrices' gradients that a step of this rank begins and waits for, and the layers it goes back through."""
    trainer, log = build_trainer(world, case), list[tuple[str, int]]()
    begin, enter = reduction.LocalPiece.start_reduction, trainer.pace.enter

    def start_reduction(piece: reduction.LocalPiece, flat: Any) -> Any:
        work = begin(piece, flat)
        if work is None or not piece.bucket.decays:
            return work
        log.append((BEGIN, piece.bucket.layer))
        return Logged(work, log, piece.bucket.layer)

    def enter_layer(kind: Kind, layer: int) -> None:
        if kind is Kind.BACKWARD:
            log.append((ENTER, layer))
        enter(kind, layer)

    reduction.LocalPiece.start_reduction = start_reduction  # type: ignore[method-assign]
    trainer.pace.enter = enter_layer  # type: ignore[method-assign]
    trainer.run_step(1)
    return log


@pytest.mark.parametrize("zero", [0, 1])
def test_a_layers_sum_is_begun_before_the_layer_before_it_and_waited_for_behind_all(zero: int) -> None:
    case = Case(name="sums", stages=[stage((0, 4), replica([0], 4, 4), replica([1], 4, 4), zero=zero)])
    for log in run_ranks(2, log_step, case):
        begun = [layer for what, layer in log if what == BEGIN]
        assert set(begun) == set(range(4))
        assert begun == sorted(begun, reverse=True) == [layer for what, layer in log if what == WAIT]
        for layer in range(1, 4):
            assert log.index((BEGIN, layer)) < log.index((ENTER, layer - 1))
        assert all(log.index((WAIT, layer)) > log.index((ENTER, 0)) for layer in range(4))


def test_a_units_sum_is_begun_before_the_one_before_it_is_waited_for() -> None:
    """Under ZeRO 2 two are under way, and never three."""
    case = Case(name="sums", stages=[stage((0, 4), replica([0], 4, 4), replica([1], 4, 4), zero=2)])
    for log in run_ranks(2, log_step, case):
        under_way, most = set[int](), 0
        for what, layer in log:
            if what != ENTER:
                under_way = under_way | {layer} if what == BEGIN else under_way - {layer}
            most = max(most, len(under_way))
        assert under_way == set()
        assert most == 2


def test_a_product_in_parts_is_one_contribution() -> None:
    """The head's, whose logits come some tokens at a time: a sum begun before the last part would leave it out."""
    parameter, done = Parameter("head", torch.zeros(3, 2), torch.empty(3, 2)), list[Parameter]()
    parameter.uses = 1
    parameter.start_step(2, done.append)
    left, right = torch.arange(24.0).view(3, 8), torch.arange(16.0).view(8, 2)
    for start in range(0, 8, 2):
        assert not done
        parameter.add_product(left[:, start : start + 2], right[start : start + 2], completes=start in (2, 6))
    assert done == [parameter]
    assert torch.equal(parameter.grad, left @ right)
