"""Training on late devices: whatever the order of their work, it is that of one process. A seed a step; 20 here, 1,000
by `make evidence` (LATE_SEEDS)."""

import os
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hethub.communicator import Rendezvous, World, connect
from hethub.kernels.bodies import choose
from hethub.kernels.device import Device, Vendor
from hethub.runtime.measure.profiler import warm_up
from tests.support.device_cases import CASES
from tests.support.late import device as late
from tests.support.late import engine
from tests.support.late.mutants import Mutant, apply, mutants_of
from tests.support.late.tensor import may_wait
from tests.support.layouts import Case, Shards, build_trainer, train, worst_difference
from tests.support.ranks import run_ranks, start_ranks, values

STEPS = 20
SEEDS = int(os.environ.get("LATE_SEEDS", str(STEPS)))
UNKNOWN = {
    "recompute selective": "torch's checkpoint ends the process on a device of the tests' own",
    "offload activations": "its tensors have no storage that activations could be told apart by",
}
QUICK = ("two beside a CPU",)


Trained = tuple[list[float], list[float], Shards]
"""Losses, gradient norms and weights of a run."""


def join(rank: int, store: Any, case: Case, seed: int = 0, vendor: Vendor = "nvidia", *, is_warm: bool = True) -> World:
    """The rank's world, warmed up as a job is."""
    device = late.install(seed, vendor) if case.vendors[rank] == "g" else Device(vendor="cpu")
    may_wait.set(True)  # for a step's loss and norm
    world = connect(Rendezvous.on_one_host(store, rank, case.size), device=device, islands=case.islands)
    choose(False)
    if device.is_gpu and is_warm:
        warm_up(case.layout(), rank, device, document_mask=case.document_mask)
    return world


def train_late(rank: int, store: Any, case: Case, seeds: int, mutant: Mutant | None = None) -> list[Trained]:
    """As many runs as have a seed for each of their steps, the case's ranks "g" on late devices."""
    world = join(rank, store, case)
    if mutant is not None:
        apply(mutant)
    runs = []
    for first in range(0, seeds, case.steps):
        runs.append(train(world, case, lambda step, first=first: late.reseed((first + step) * case.size + rank)))
        world.device.synchronize()
    world.close()
    return runs


def differs(expected: Trained, of_ranks: list[Trained]) -> str:
    """What is not that of one process; empty where all is."""
    losses, norms, weights = expected
    if any(own[0] != pytest.approx(losses, rel=1e-10) for own in of_ranks):
        return "losses"
    if any(own[1] != pytest.approx(norms, rel=1e-10) for own in of_ranks):
        return "norms"
    return "" if worst_difference([own[2] for own in of_ranks], weights) <= 1e-10 else "weights"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow) for case in CASES if case.name not in UNKNOWN],
)  # fmt: skip
def test_training_on_late_devices_equals_one_process(case: Case) -> None:
    case = replace(case, steps=STEPS)
    [expected] = run_ranks(1, train, case.alone())
    of_ranks = values(start_ranks(case.size, train_late, case, SEEDS, timeout_seconds=60 + 5 * SEEDS))
    assert [len(runs) for runs in of_ranks] == [SEEDS // STEPS] * case.size
    assert [differs(expected, list(runs)) for runs in zip(*of_ranks, strict=True)] == [""] * (SEEDS // STEPS)


def receives_under_way(rank: int, store: Any, case: Case) -> list[int]:
    """The most microbatches of a step whose receives were posted at once."""
    world = join(rank, store, case)
    trainer = build_trainer(world, case)
    transport, most = trainer.executor._transport, [0]
    posts = transport.post_receives

    def post_receives(upcoming: Any) -> None:
        posts(upcoming)
        most[-1] = max(most[-1], len(transport._arrivals))

    transport.post_receives = post_receives
    for step in range(1, case.steps + 1):
        trainer.run_step(step)
        most.append(0)
    world.close()
    return most[:-1]


def test_the_first_steps_post_no_receive_ahead() -> None:
    """Kernels are loaded in them, for which CUDA waits until the device stands still."""
    [case] = [case for case in CASES if case.name == "pipeline over their link"]
    for first, second, *others in values(start_ranks(2, receives_under_way, replace(case, steps=4))):
        assert first == second == 1
        assert all(most > 1 for most in others)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first steps of a new process: kernels are loaded, and which streams share a queue is drawn from the seed."""

    case: Case
    seed: int
    vendor: Vendor = "nvidia"
    is_warm: bool = True  # else as with kernels that the warm-up does not know
    num_queues: int | None = None
    looks_ahead: bool = False


def train_first_steps(rank: int, store: Any, start: Start) -> None:
    engine.STUCK_SECONDS = 3.0
    if start.num_queues is not None:
        os.environ[engine.QUEUES[start.vendor][0]] = str(start.num_queues)
    case = replace(start.case, steps=3)
    world = join(rank, store, case, start.seed * case.size + rank, start.vendor, is_warm=start.is_warm)
    trainer = build_trainer(world, case)
    if start.looks_ahead:
        trainer.executor._transport._num_loading = 0
    for step in range(1, case.steps + 1):
        trainer.run_step(step)
    world.close()


def stands_still(start: Start) -> str:
    """How a rank tells that its device stands still, or fails otherwise; empty where all goes well."""
    errors = [outcome.error for outcome in start_ranks(start.case.size, train_first_steps, start, timeout_seconds=60)]
    told = sorted(": ".join(error) for error in errors if error is not None)
    return next((each for each in told if "stands at" in each), " ".join(told))


PIPELINE, MINISTAGES = (
    next(case for case in CASES if case.name == f"{name} over their link") for name in ("pipeline", "ministages")
)


@pytest.mark.parametrize(
    "start",
    [
        *(Start(case=PIPELINE, seed=seed, is_warm=False) for seed in range(3)),
        Start(case=PIPELINE, seed=0, vendor="amd", is_warm=False),
        Start(case=MINISTAGES, seed=0),
        Start(case=MINISTAGES, seed=0, vendor="amd"),
    ],
    ids=lambda start: f"{start.case.name}, {start.vendor} {start.seed}",
)
def test_no_device_stands_still(start: Start) -> None:
    """With the queues that hethub asks for, its warm-up, and no receive posted ahead while kernels are loaded."""
    assert stands_still(start) == ""


@pytest.mark.parametrize("seed", range(2))
def test_a_receive_holds_up_what_shares_its_queue(seed: int) -> None:
    told = stands_still(Start(case=PIPELINE, seed=seed, num_queues=2))
    assert re.search(r"done nothing in 3 s: .*\d stream\(s\) on a queue that stands at (recv|send)", told)


def test_a_receive_posted_ahead_holds_up_a_kernels_first_launch() -> None:
    told = stands_still(Start(case=PIPELINE, seed=0, is_warm=False, looks_ahead=True))
    assert re.search(r"deadlock: \S+ of .* is loaded once the device stands still, .* stands at recv", told)


MODULES = {
    "hethub.runtime.pipeline.transport": ("ministages over their link", "pipeline"),
    "hethub.runtime.state.zero_weights": ("offload parameters", "two beside a CPU, offloaded", "layered, zero3"),
    "hethub.runtime.state.zero_gradients": ("two beside a CPU", "zero3 of two"),
    "hethub.runtime.state.reduction": ("degrees 2 and 1", "replicas"),
    "hethub.runtime.state.stepping": ("offload optimizer", "offload parameters"),
}
"""Whose waits are taken away, and the plans that need them."""
SURVIVORS = {
    ("transport", "finish", "work.wait()"): "a send holds what it sends; it is waited for so that its failure is told",
    (
        "stepping",
        "flush",
        "self._optimizer.arena.synchronize()",
    ): "needed, but seldom late enough: who reads offloaded weights has read those on the device first",
}
"""What may be taken away unnoticed, and why it is not needed here."""


def survives(mutant: Mutant) -> bool:
    return (mutant.module.rpartition(".")[2], mutant.holder, mutant.text) in SURVIVORS


def name_of(mutant: Mutant) -> str:
    return f"{mutant.module.rpartition('.')[2]}:{mutant.holder}:{mutant.line} {mutant.text}"


MUTANTS = [mutant for module in MODULES for mutant in mutants_of(module) if not survives(mutant)]


def what_shows(mutant: Mutant) -> str:
    """The plan that goes wrong without it, and how; empty where all go well."""
    for case in (case for name in MODULES[mutant.module] for case in CASES if case.name == name):
        case = replace(case, steps=STEPS)
        [expected] = run_ranks(1, train, case.alone())
        outcomes = start_ranks(case.size, train_late, case, STEPS, mutant, timeout_seconds=200)
        if any(outcome.failed for outcome in outcomes):
            told = [": ".join(outcome.error) for outcome in outcomes if outcome.error is not None]
            return f"{case.name}: {told[0] if told else 'it never ends'}"[:150]
        if wrong := differs(expected, [outcome.value[0] for outcome in outcomes]):
            return f"{case.name}: other {wrong}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=name_of(mutant)) for mutant in MUTANTS])
def test_what_is_taken_away_is_noticed(mutant: Mutant) -> None:
    shown = what_shows(mutant)
    assert shown, "nothing shows that this is needed"
    print(f"shown by {shown}")
