"""Ranges of flat storage as one tensor and back: a view where there is one, else a copy."""

import pytest
import torch

from hethub.runtime.state.storage import put, take
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
