"""Flat storage: where runs lie, ranges as one tensor and back, and gradients that are complete."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hethub.runtime.state import parameter
from hethub.runtime.state.parameter import Parameter
from hethub.runtime.state.storage import FlatMap, put, take
from hethub.spec.ranges import Range


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_a_view_of_its_place_is_not_written_back(copied: bool) -> None:
    """On a device that would be a pass over all weights and gradients at every step."""
    flat, ranges = torch.arange(10.0), [Range(2, 6)]
    values = take(flat, ranges, copied=copied)
    values.add_(1)
    before = flat._version
    put(flat, ranges, values)
    assert (flat._version > before) == copied
    assert flat.tolist() == [0, 1, 3, 4, 5, 6, 6, 7, 8, 9]


def test_ranges_that_lie_apart_are_one_after_the_other_and_go_back_to_their_places() -> None:
    flat, ranges = torch.arange(10.0), [Range(1, 3), Range(6, 7), Range(8, 10)]
    values = take(flat, ranges)
    assert values.tolist() == [1, 2, 6, 8, 9]
    put(flat, ranges, -values)
    assert flat.tolist() == [0, -1, -2, 3, 4, 5, -6, 7, -8, -9]
    assert take(flat, []).numel() == 0


def test_runs_that_touch_where_they_lie_are_one_whether_they_touch_on_the_axis_or_not() -> None:
    tensor: Any = SimpleNamespace()
    laid = FlatMap([(tensor, Range(*run)) for run in ((10, 20), (30, 35), (35, 40))])
    assert laid.numel == 20
    assert laid.local(Range(32, 34)) == Range(12, 14)
    assert laid.locals([Range(12, 20), Range(30, 35), Range(35, 37)]) == [Range(2, 17)]
    assert laid.locals([Range(10, 15), Range(16, 20), Range(30, 31), Range(33, 35)]) == [
        Range(0, 5),
        Range(6, 11),
        Range(13, 15),
    ]
    with pytest.raises(AssertionError, match="is not here"):
        laid.local(Range(20, 21))


@pytest.mark.parametrize("uses", [1, 2])
def test_a_gradient_is_complete_with_the_last_microbatch_s_last_use(uses: int) -> None:
    """A tied embedding is used at both ends of a stage; its sum was to begin when all have come from both."""
    complete: list[str] = []
    parameter = Parameter("embedding", torch.zeros(2), torch.full((2,), 9.0))
    parameter.uses = uses
    for _ in range(2):
        parameter.start_step(3, lambda own: complete.append(own.name))
        for number in range(3 * uses):
            assert not complete
            parameter.add(torch.tensor([1.0, number]))
        assert complete.pop() == "embedding"
        assert parameter.grad.tolist() == [3 * uses, sum(range(3 * uses))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounds", [None, "mm", "addmm"])
def test_products_that_are_rounded_before_they_are_added_are_not_taken(
    rounds: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may take `out_dtype` and round to the inputs' type all the same; hipBLASLt's was wrong (vllm 48688)."""

    def product(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        wide = left.float() @ right.float()
        return wide.to(dtype).float() if name == rounds else wide

    def addmm(total: torch.Tensor, left: Any, right: Any, *, out: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return out.copy_(total + product("addmm", left, right))

    def mm(left: Any, right: Any, *, out: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return out.copy_(product("mm", left, right))

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", mm)
    assert parameter._accumulates_wide.__wrapped__(torch.device("cpu"), dtype) == (rounds is None)
