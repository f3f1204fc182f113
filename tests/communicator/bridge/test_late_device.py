"""Every path of device tensors over late devices: 20 seeds here, 1,000 by `make evidence` (LATE_SEEDS).

That they would show a missing wait is shown by taking every one away, one at a time.
"""

import os

import pytest

from tests.communicator.bridge.late_paths import SIZE, give_up, run_paths
from tests.support.late.mutants import Mutant, mutants_of
from tests.support.ranks import start_ranks, values

SEEDS = int(os.environ.get("LATE_SEEDS", "20"))


@pytest.mark.parametrize(
    ("late_ranks", "relay", "wire"),
    [
        pytest.param([0, 1], "auto", "exact", id="two devices and a CPU"),
        pytest.param([0, 1, 2], "gloo", "bf16", id="all on devices", marks=pytest.mark.slow),
        pytest.param([2], "auto", "exact", id="two CPUs and a device", marks=pytest.mark.slow),
    ],
)
def test_no_order_of_the_devices_work_is_wrong(late_ranks: list[int], relay: str, wire: str) -> None:
    outcomes = start_ranks(SIZE, run_paths, late_ranks, range(SEEDS), relay, wire, timeout_seconds=60 + 5 * SEEDS)
    assert values(outcomes) == [SEEDS] * SIZE


def test_a_world_given_up_aborts_the_islands_libraries() -> None:
    assert values(start_ranks(SIZE, give_up, timeout_seconds=60)) == [["aborted"], ["aborted"], []]


MODULES = (
    "hethub.communicator.bridge.staging",
    "hethub.communicator.bridge.device_side",
    "hethub.communicator.bridge.launch_order",
    "hethub.communicator.bridge.messages",
    "hethub.runtime.memory.host_arena",
)
_NO_SUCH_RELAY = "only where MPI takes a device's memory, which no relay here does"
SURVIVORS = {
    "self._main.record().synchronize()": _NO_SUCH_RELAY,
    "self._main.record()": _NO_SUCH_RELAY,
    "wait_for(sends)": "a send has a copy of its own, held by its relay; it is waited for so that its failure is told",
}
"""What may be taken away unnoticed, and why it is not needed here."""

MUTANTS = [mutant for module in MODULES for mutant in mutants_of(module)]


def name_of(mutant: Mutant) -> str:
    return f"{mutant.module.rpartition('.')[2]}:{mutant.line} {mutant.text}"


def is_noticed(mutant: Mutant) -> bool:
    """Whether a rank fails, or never ends, without it."""
    runs = (
        start_ranks(SIZE, run_paths, [0, 1, 2], range(20), relay, wire, mutant, timeout_seconds=60)
        for relay, wire in (("auto", "exact"), ("gloo", "bf16"))
    )
    return any(outcome.failed for outcomes in runs for outcome in outcomes)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant, id=name_of(mutant), marks=[] if mutant.text == "copied.synchronize()" else pytest.mark.slow
        )
        for mutant in MUTANTS
    ],
)
def test_what_is_taken_away_is_noticed(mutant: Mutant) -> None:
    if not is_noticed(mutant):
        assert mutant.text in SURVIVORS, "nothing shows that this is needed"
        print(f"not noticed: {SURVIVORS[mutant.text]}")
