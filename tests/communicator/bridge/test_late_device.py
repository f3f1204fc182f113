"""Every path of device tensors over late devices: 20 seeds here, 1,000 by `make evidence` (LATE_SEEDS).

That they would show a missing wait is shown by taking every one away, one at a time.
"""

import contextlib
import os
from itertools import product
from typing import Any

import pytest

from hethub.communicator.context import Context
from tests.communicator.bridge.late_paths import (
    AWARE,
    LARGER_ISLAND,
    PATHS,
    PATHS_OF_SHARES,
    SIZE,
    Paths,
    give_up,
    run_paths,
)
from tests.support.late import engine
from tests.support.late.mutants import Mutant, mutants_of
from tests.support.ranks import start_ranks, values

SEEDS = int(os.environ.get("LATE_SEEDS", "20"))


@pytest.mark.parametrize(
    ("late_ranks", "relay", "wire"),
    [
        pytest.param([0, 1], "auto", "exact", id="two devices and a CPU"),
        pytest.param([0, 1, 2], "gloo", "bf16", id="all on devices", marks=pytest.mark.slow),
        pytest.param([2], "auto", "exact", id="two CPUs and a device", marks=pytest.mark.slow),
        pytest.param([0, 1, 2], AWARE, "exact", id="a relay that takes device memory", marks=pytest.mark.slow),
    ],
)
def test_no_order_of_the_devices_work_is_wrong(late_ranks: list[int], relay: str, wire: str) -> None:
    outcomes = start_ranks(SIZE, run_paths, late_ranks, range(SEEDS), relay, wire, timeout_seconds=60 + 5 * SEEDS)
    assert values(outcomes) == [SEEDS] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "paths", "islands"),
    [
        pytest.param(4, PATHS_OF_SHARES, LARGER_ISLAND, id="shares are moved one by one"),
        pytest.param(SIZE, PATHS, [[0], [1], [2]], id="totals travel back"),
    ],
)
def test_no_order_is_wrong_in_other_islands(size: int, paths: Any, islands: list[list[int]]) -> None:
    arguments = [0, 1, 2], range(SEEDS), "auto", "exact", None, paths, islands
    outcomes = start_ranks(size, run_paths, *arguments, timeout_seconds=60 + 5 * SEEDS)
    assert values(outcomes) == [SEEDS] * size


def launch_as_it_comes(rank: int, store: Any) -> None:
    """Native collectives and bridged ones where native ones take no turn.

    A rank that fails ends, so that the others, whose devices wait for its own, hear of it at once.
    """
    engine.STUCK_SECONDS = 3.0
    Context.turn_of = lambda self, tensors: contextlib.nullcontext()
    run_paths(rank, store, [0, 1], range(20), paths=(Paths.native_between,))


def test_launched_as_they_come_collectives_never_end() -> None:
    errors = [outcome.error for outcome in start_ranks(SIZE, launch_as_it_comes)]
    assert any(error is not None and "has not come to this point" in error[1] for error in errors), errors


def test_a_world_given_up_aborts_the_islands_libraries() -> None:
    assert values(start_ranks(SIZE, give_up, timeout_seconds=60)) == [["aborted"], ["aborted"], []]


MODULES = (
    "hethub.communicator.torch_private",
    "hethub.communicator.groups.process_group",
    "hethub.communicator.bridge.staging",
    "hethub.communicator.bridge.exchange",
    "hethub.communicator.bridge.device_side",
    "hethub.communicator.bridge.island_library",
    "hethub.communicator.bridge.launch_order",
    "hethub.communicator.bridge.links",
    "hethub.communicator.bridge.messages",
    "hethub.runtime.memory.host_arena",
)
_SHOWN_ALONE = (
    "needed, but seldom late enough here: tests/communicator/bridge/test_launch_order.py holds it to its order"
)
_GIVES_UP = "breaks a group that failed: tests/communicator/test_torch_private.py shows it alone"
SURVIVORS = {
    "group.recv([torch.empty(1)], (rank + 1) % size, _UNUSED_TAG).wait(timedelta(milliseconds=1))": _GIVES_UP,
    "pass_over: group.allreduce([torch.empty(0)], dist.AllreduceOptions()).wait()": (
        "counts what one rank refuses: tests/communicator/groups/test_refused_alone.py shows it alone"
    ),
    "before.wait()": _SHOWN_ALONE,
    "succeeded: work.wait()": "asked of what is done: so that its failure is told (tests/communicator/groups/test_native.py)",
    "stages: wait_for(sends)": "a total's send holds its own memory; it is waited for so that its failure is told",
    "end_layer: copy.wait()": "saves memory alone: tests/runtime/memory/test_late_arena.py holds it to that",
    "finish: self.event.synchronize()": "needed by an offloaded update: tests/runtime/memory/test_late_arena.py shows it alone",
    "connecting.wait()": "connects the island's messages; nobody reads what is moved",
}
"""What may be taken away unnoticed, everywhere or in the function named, and why it is not needed here."""


def why_not_needed(mutant: Mutant) -> str | None:
    return SURVIVORS.get(mutant.text, SURVIVORS.get(f"{mutant.holder}: {mutant.text}"))


MUTANTS = [
    mutant
    for module in MODULES
    for mutant in mutants_of(module)
    if why_not_needed(mutant) is None or "LATE_SEEDS" in os.environ
]
"""What is taken away. Where nothing need show, nothing can fail: only `make evidence` tries that, minutes each, and tells."""


def name_of(mutant: Mutant) -> str:
    return f"{mutant.module.rpartition('.')[2]}:{mutant.line} {mutant.text}"


def what_shows(mutant: Mutant) -> str:
    """How a rank fails without it, or that one never ends; empty where all goes well.

    Some are late enough in one seed of four only, and in fewer on a busy machine: further seeds, where the first show nothing.
    """
    worlds: tuple[tuple[Any, ...], ...] = (
        (SIZE, "auto", "exact", mutant),
        (SIZE, "gloo", "bf16", mutant),
        (SIZE, AWARE, "exact", mutant),
        (4, "auto", "exact", mutant, PATHS_OF_SHARES, LARGER_ISLAND),
    )
    for seeds, (size, *arguments) in product((range(20), range(20, 80)), worlds):
        outcomes = start_ranks(size, run_paths, [0, 1, 2], seeds, *arguments, timeout_seconds=200)
        told = [outcome.error for outcome in outcomes if outcome.error is not None]
        told.sort(key=lambda error: error[0] == "RunFailed")  # the others only felt it
        if any(outcome.failed for outcome in outcomes):
            return " ".join(": ".join(told[0]).split())[:100] if told else "it never ends"
    return ""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant, id=name_of(mutant), marks=[] if mutant.text == "self._copied.synchronize()" else pytest.mark.slow
        )
        for mutant in MUTANTS
    ],
)
def test_what_is_taken_away_is_noticed(mutant: Mutant) -> None:
    shown = what_shows(mutant)
    assert shown or why_not_needed(mutant), "nothing shows that this is needed"
    print(f"shown by {shown}" if shown else f"not noticed: {why_not_needed(mutant)}")
