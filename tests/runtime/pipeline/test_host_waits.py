"""Between two actions of a step the host waits for no result, and what it sends a device lies in pinned memory."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hethub.kernels.squares import sum_of_squares
from hethub.runtime.loop import batch_loader
from hethub.runtime.loop.batch_loader import BatchLoader
from hethub.spec.ranges import Range
from hethub.spec.schedule.microbatches import MicrobatchRange
from tests.support.layouts import Case, build_trainer, random_tokens, replica, stage
from tests.support.ranks import run_ranks

# Operations whose result the host must have to go on: a number, or a shape that depends on values.
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}


class Waits(TorchDispatchMode):
    """Counts operations for which the host would wait, were its tensors on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in WAITS or (name.startswith("index") and _by_mask(args)):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def test_waits_are_seen() -> None:
    x = torch.arange(3.0)
    with Waits() as waits:
        float(x.sum()), x[x > 1], x.nonzero(), x + 1, x[torch.tensor([0])]
    assert waits.found == {"_local_scalar_dense": 1, "index": 1, "nonzero": 1}


def waits_of_a_step(world: Any, case: Case) -> tuple[Counter[str], int]:
    """What the host waits for in the actions of a step, and at their end."""
    trainer = build_trainer(world, case)
    trainer.run_step(1)
    trainer.stepping.begin(2)
    within, run, waits = [], trainer.executor._run, Waits()

    def look(*args: Any) -> None:
        with waits:
            run(*args)
        within.append(args[0])

    trainer.executor._run = look  # type: ignore[method-assign]
    trainer.executor.run_step(lambda microbatch: trainer._batches.load(2, microbatch), 1.0)
    return waits.found, len(within)


CASES = [
    Case(name="pp2, bf16", stages=[stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]),
    Case(name="tp2, full recompute", stages=[stage((0, 4), replica([0, 1], 8, 4), recompute="full")]),
    Case(name="zero3", stages=[stage((0, 4), replica([0], 4, 2), replica([1], 4, 2), zero=3)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_action_waits_for_the_device(case: Case) -> None:
    case = Case(**{**vars(case), "precision": "bf16", "document_mask": True})
    for found, actions in run_ranks(2, waits_of_a_step, case):
        assert actions >= 4
        assert not found


class Names(TorchDispatchMode):
    """The operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def operations_of_a_step(world: Any, case: Case) -> tuple[list[str], int]:
    """Those of the second step, and how many runs of parameters have a norm."""
    trainer = build_trainer(world, case)
    trainer.run_step(1)
    with Names() as names:
        trainer.run_step(2)
    return names.found, sum(run.counts for run in trainer.optimizer.runs)


def test_the_norm_is_begun_before_the_loss_is_waited_for() -> None:
    """In as many launches for many runs as for one: a device computes nothing until the host has both."""
    case = Case(name="alone", stages=[stage((0, 4), replica([0], 8, 8))], bucket_elements=1)
    [(names, runs)] = run_ranks(1, operations_of_a_step, case)
    assert runs > 20
    norm, waits = names.index("_foreach_norm"), [i for i, name in enumerate(names) if name == "_local_scalar_dense"]
    assert norm < waits[0] < norm + 6
    assert "linalg_vector_norm" not in names


def test_a_device_s_norm_takes_no_running_sum() -> None:
    """torch.use_deterministic_algorithms refuses one in floats there."""
    for where, sums in (("cpu", "cumsum"), ("meta", "sum")):
        with Names() as names:
            sum_of_squares([torch.ones(size, device=where) for size in (4, 9)])
        assert {"sum", "cumsum"}.intersection(names.found) == {sums}


def test_a_device_is_sent_pinned_memory_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case, pinned, sent = CASES[0], [], []
    copy = Tensor.to

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        sent.append((id(tensor), options))
        return copy(tensor, *args, **options)

    monkeypatch.setattr(batch_loader, "is_gpu", lambda device: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(Tensor, "to", to)
    of_stage = SimpleNamespace(
        layout=case.layout(), storage=SimpleNamespace(device=torch.device("meta")), is_first=True, is_last=False
    )
    loader = BatchLoader(random_tokens(case), of_stage, document_mask=True)  # type: ignore[arg-type]
    data = loader.load(1, MicrobatchRange(0, 0, 0, Range(0, 2)))
    assert len(sent) == 3  # tokens, targets, where documents start
    assert [each for each, _ in sent] == [id(tensor) for tensor in pinned]
    assert all(options == {"non_blocking": True} for _, options in sent)
    assert data.tokens is not None
    assert data.tokens.is_meta
