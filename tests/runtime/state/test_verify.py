"""Ranks that cut the state unlike, and copies of a parameter that differ in a bit, are found on every rank and named."""

from typing import Any

import pytest
import torch

from hethub.runtime.state import verify
from hethub.runtime.state.verify import bit_hash, verify_copies, verify_owners
from hethub.spec.errors import RunFailed
from hethub.spec.layout import state
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks

CASE = Case(
    name="tp 2 beside tp 1",
    stages=[stage((0, 4), replica([0, 1], 4, 2), replica([2], 4, 2), zero=1)],
    precision="bf16",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_hash_sees_every_bit_and_the_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(250, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = bit_hash(values)
    monkeypatch.setattr(verify, "_CHUNK", 100)
    assert bit_hash(values) == whole  # however it is cut
    halves, seen = values.view(torch.int16), {whole}
    for place in range(len(halves)):
        changed = halves.clone()
        changed[place] ^= 1
        seen.add(bit_hash(changed.view(dtype)))
    assert len(seen) == 1 + len(halves)
    for other in (4, 103, 203):  # next to it, and where it is in another chunk
        swapped = values.clone()
        swapped[3], swapped[other] = values[other], values[3]
        assert bit_hash(swapped) != whole


def found(world: Any, case: Case, changed: int, what: str) -> str:
    """What this rank says of the copies after a change of one rank's."""
    trainer = build_trainer(world, case)
    bits = trainer.storage.weights.view(torch.int16)
    if world.rank == changed and what == "swap":
        bits[:2] = bits[:2].flip(0)
    elif world.rank == changed:
        bits[trainer.reducer.norms[0].start if what == "norm" else 0] ^= 1
    return found_in(world, trainer)


def found_in(world: Any, trainer: Any) -> str:
    try:
        verify_copies(world, trainer.reducer, 7)
    except RunFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changed", "what", "named"),
    [
        (3, "bit", ""),  # nobody's
        (2, "bit", "step 7: ranks 0 and 2 hold different bits"),  # of query heads that ranks 0 and 2 hold
        (1, "bit", "step 7: ranks 1 and 2 hold different bits"),
        (2, "swap", "step 7: ranks 0 and 2 hold different bits"),
        (1, "norm", "step 7: ranks 0 and 1 hold different bits of the same parameters (norms of chunk 0"),
    ],
)
def test_copies_that_differ_are_named_on_every_rank(changed: int, what: str, named: str) -> None:
    for said in run_ranks(3, found, CASE, changed, what):
        assert said.startswith(named)
        assert bool(said) == bool(named)


def found_offloaded(world: Any, case: Case) -> str:
    """What this rank says of the copies after a change of the second rank's in host memory."""
    trainer = build_trainer(world, case)
    (unit, *_) = trainer.storage.offloaded_weights
    before = found_in(world, trainer)
    if world.rank == 1:
        trainer.storage.offloaded_weights[unit].view(torch.int16)[0] ^= 1
    return before or found_in(world, trainer)


@pytest.mark.parametrize("zero", [0, 1])
def test_copies_in_host_memory_are_compared(zero: int) -> None:
    stages = [stage((0, 4), replica([0], 4, 2), replica([1], 4, 2), zero=zero, offload=["parameters"])]
    for said in run_ranks(2, found_offloaded, Case(name="offloaded", stages=stages, precision="bf16")):
        assert said.startswith("step 7: ranks 0 and 1 hold different bits")


def owners(world: Any, case: Case, other: int) -> str:
    """What this rank says of the owners where one rank's buckets are smaller."""
    if world.rank == other:
        state.BUCKET_ELEMENTS = 1000
    try:
        verify_owners(world, state.StateMap(case.layout()))
    except RunFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("other", "named"), [(3, ""), (2, "ranks 0 and 2 have cut the training state unlike (scipy")])
def test_owners_that_ranks_cut_unlike_are_named_on_every_rank(other: int, named: str) -> None:
    for said in run_ranks(3, owners, CASE, other):
        assert said.startswith(named)
        assert bool(said) == bool(named)
