"""Training on late devices: whatever the order of their work, it is that of one process. A seed a step; 20 here, 1,000 by
`make evidence` (LATE_SEEDS)."""

import os
from dataclasses import replace
from typing import Any

import pytest

from hethub.communicator import Rendezvous, connect
from hethub.kernels.device import Device
from tests.support.device_cases import CASES
from tests.support.late import device as late
from tests.support.late.mutants import Mutant, apply, mutants_of
from tests.support.late.tensor import may_wait
from tests.support.layouts import Case, build_trainer, train
from tests.support.ranks import run_ranks, start_ranks, values

STEPS = 20
SEEDS = int(os.environ.get("LATE_SEEDS", str(STEPS)))
UNKNOWN = {
    "recompute selective": "torch's checkpoint ends the process on a device of the tests' own",
    "offload activations": "its tensors have no storage that activations could be told apart by",
}
QUICK = ("two beside a CPU",)


def train_late(rank: int, store: Any, case: Case, seeds: int, mutant: Mutant | None = None) -> list[list[float]]:
    """Losses of as many runs as have a seed for each of their steps, the case's ranks "g" on late devices."""
    device = late.install() if case.vendors[rank] == "g" else Device(vendor="cpu")
    may_wait.set(True)  # for a step's loss and norm
    world = connect(Rendezvous.on_one_host(store, rank, case.size), device=device, islands=case.islands)
    if mutant is not None:
        apply(mutant)
    losses = []
    for first in range(0, seeds, case.steps):
        trainer = build_trainer(world, case)
        losses.append([])
        for step in range(1, case.steps + 1):
            late.reseed((first + step) * case.size + rank)
            losses[-1].append(trainer.run_step(step).loss)
        device.synchronize()
    world.close()
    return losses


def losses_of(world: Any, case: Case) -> list[float]:
    return train(world, case)[0]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow) for case in CASES if case.name not in UNKNOWN],
)  # fmt: skip
def test_training_on_late_devices_equals_one_process(case: Case) -> None:
    case = replace(case, steps=STEPS)
    [expected] = run_ranks(1, losses_of, case.alone())
    for of_rank in values(start_ranks(case.size, train_late, case, SEEDS, timeout_seconds=60 + 5 * SEEDS)):
        assert len(of_rank) == SEEDS // STEPS
        for losses in of_rank:
            assert losses == pytest.approx(expected, rel=1e-10)


MODULES = (
    "hethub.runtime.pipeline.transport",
    "hethub.runtime.state.zero_weights",
    "hethub.runtime.state.zero_gradients",
    "hethub.runtime.state.reduction",
    "hethub.runtime.state.stepping",
    "hethub.communicator.groups.uneven",
)
MUTANTS = [mutant for module in MODULES for mutant in mutants_of(module)]
SURVIVORS: dict[str, str] = {}
"""What may be taken away unnoticed, and why it is not needed here."""


def name_of(mutant: Mutant) -> str:
    return f"{mutant.module.rpartition('.')[2]}:{mutant.line} {mutant.text}"


def what_shows(mutant: Mutant) -> str:
    """The case that goes wrong without it, and how; empty where all go well."""
    for case in sorted(CASES, key=lambda case: -case.size):
        if case.name in UNKNOWN or case.size == 1:
            continue
        case = replace(case, steps=STEPS)
        [expected] = run_ranks(1, losses_of, case.alone())
        outcomes = start_ranks(case.size, train_late, case, STEPS, mutant, timeout_seconds=200)
        if any(outcome.failed for outcome in outcomes):
            told = [": ".join(outcome.error) for outcome in outcomes if outcome.error is not None]
            return f"{case.name}: {told[0] if told else 'it never ends'}"[:150]
        if any(outcome.value[0] != pytest.approx(expected, rel=1e-10) for outcome in outcomes):
            return f"{case.name}: other losses"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=name_of(mutant)) for mutant in MUTANTS])
def test_what_is_taken_away_is_noticed(mutant: Mutant) -> None:
    shown = what_shows(mutant)
    assert shown or name_of(mutant) in SURVIVORS, "nothing shows that this is needed"
    print(f"shown by {shown}" if shown else f"not noticed: {SURVIVORS[name_of(mutant)]}")
