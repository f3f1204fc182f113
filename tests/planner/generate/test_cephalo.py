"""Cephalo's shares of state: by memory, whatever rounding says."""

import random

import pytest

from hethub.planner.generate.families.cephalo import _state_shares


def test_no_share_of_state_is_larger_than_its_room() -> None:
    """Also where all rooms together just suffice: there rounding once gave equal shares, whatever the rooms."""
    draw = random.Random(0)
    for _ in range(300):
        rooms = [draw.random() for _ in range(draw.randint(2, 9))]
        for scale in (1.0, 1.5, 4.0):
            given = [scale * room / sum(rooms) for room in rooms]
            shares = _state_shares(given)
            if shares is None:
                assert scale == 1.0  # rounding may leave them short of one
                continue
            assert all(share <= room * (1 + 1e-9) for share, room in zip(shares, given, strict=True))
            assert sum(shares) == pytest.approx(1.0)
