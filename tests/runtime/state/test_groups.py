"""Groups are connected before the first step: a library that connects at its first use would do it inside a backward."""

from typing import Any

import pytest

from hethub.communicator import torch_private
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks

NATIVE = [
    name for name in vars(torch_private) if name.startswith("native_") and name not in ("native_send", "native_receive")
]
REPLICAS = [replica([0], 3, 1), replica([1], 1), replica([2], 2), replica([3], 2)]


def first_used_in_a_step(world: Any, case: Case) -> tuple[int, list[str]]:
    """How many of the island's own groups were used while the trainer was built, and what first used another later."""
    used, late, built = set[int](), list[str](), False

    def watched(name: str) -> Any:
        function = getattr(torch_private, name)

        def call(native: Any, *arguments: Any) -> Any:
            if id(native) not in used and built:
                late.append(name)
            used.add(id(native))
            return function(native, *arguments)

        return call

    for name in NATIVE:
        setattr(torch_private, name, watched(name))
    trainer = build_trainer(world, case)
    built, before = True, len(used)
    trainer.run_step(1)
    return before, late


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bridged_groups_use_the_islands_library_before_the_first_step(zero: int) -> None:
    case = Case(name="replicas", stages=[stage((0, 4), *REPLICAS, zero=zero)], vendors="ggcc")
    found = run_ranks(4, first_used_in_a_step, case, islands=case.islands, staged_ranks=range(4))
    assert all(before > 0 and late == [] for before, late in found), found
