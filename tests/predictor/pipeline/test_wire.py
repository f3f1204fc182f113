"""What ranks send over a link, by the kernel's counters, against what the plan sends over it."""

import os

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

from tests.support.hosts.namespaces import namespaces, why_no_namespaces
from tests.support.hosts.wire import PLANS, carried, measured


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_link_carries_what_the_plan_says(name: str) -> None:
    """Within 3 % once headers are off, in both directions. Seconds are `make evidence EVIDENCE=wire`'s."""
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(f"two machines on one {reason}")
    with namespaces(f"hethub-wire-{os.getpid()}") as found:
        ranks = measured(found, name, steps=2, rounds=1, profiles=False)
    shares = carried(name, ranks)
    assert len(shares) == 2
    assert shares == pytest.approx([1.0, 1.0], abs=0.03)
