"""Every layout trains to the bits of tests/reference/layouts.json: what moves them is found with the change that does."""

import json
from pathlib import Path

import pytest

from tests.runtime.pipeline import test_layouts, test_layouts_schedules
from tests.support.layouts import Case, machine, trained

KNOWN = json.loads((Path(__file__).resolve().parents[2] / "reference/layouts.json").read_text())
CASES = [*test_layouts.CASES, *test_layouts_schedules.CASES]


def test_every_layout_has_its_reference() -> None:
    assert KNOWN["results"].keys() == {case.name for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_trains_to_the_bits_of_its_reference(case: Case) -> None:
    if machine() != KNOWN["machine"]:
        pytest.skip(f"the reference is of {KNOWN['machine']}, this is {machine()}")
    assert trained(case) == KNOWN["results"][case.name], "meant so? python benchmarks/reference.py layouts --write"
