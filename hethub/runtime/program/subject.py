"""What a job of HAP trains: a module that returns its loss, and the batches of its steps."""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import FakeTensorMode

from hethub.runtime.program.llama import Llama, fill
from hethub.runtime.state.storage import DTYPES
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import Job
from hethub.spec.model import ModelSpec
from hethub.spec.program import Items

Batch = tuple[Tensor, ...]
FORM = "write python:package.module:factory; package.module is found beside the job file or where Python finds it"


class Batches:
    """A factory's own batches, step by step; a list begins anew at its end, a generator cannot."""

    def __init__(self, source: Iterable[Any], dtype: torch.dtype, place: str) -> None:
        self._source, self._dtype, self._place = source, dtype, place
        self._iterator: Iterator[Any] = iter(())  # the source's is begun where its faults are told
        self._taken = 0
        self.first = self._take(1)  # what the step is traced with
        self._ahead: Batch | None = self.first

    def at(self, step: int) -> Batch:
        """The batch of `step`, counted from 1; steps are asked for in order, those before the first are passed over.

        Raises RunFailed where a generator ends too early, or fails.
        """
        while self._taken < step:
            self._ahead = self._take(step)
        batch, self._ahead = self._ahead, None
        assert batch is not None, f"step {step} was asked for before"
        return batch

    def _take(self, step: int) -> Batch:
        try:
            batch = next(self._iterator, None)
            if batch is None and self._iterator is not self._source:
                self._iterator = iter(self._source)
                batch = next(self._iterator, None)
        except (Exception, SystemExit) as error:  # of the user's own code, so of any type
            raise self._fault(step, f"failed: {type(error).__name__}: {error}") from error
        if batch is None:
            raise self._fault(step, "ended; lower train.steps." if self._taken else "are empty; give at least one.")
        tensors = batch if isinstance(batch, (tuple, list)) else (batch,)
        if not tensors:
            raise self._fault(step, "hold an empty tuple; put the tensors that forward takes into it.")
        wrong = next((value for value in tensors if not isinstance(value, Tensor)), None)
        if wrong is not None:
            raise self._fault(step, f"hold {type(wrong).__name__}; make batches tuples of tensors.")
        self._taken += 1
        return tuple(_in_precision(value, self._dtype) for value in tensors)

    def _fault(self, step: int, what: str) -> BadInput | RunFailed:
        """Nothing is written before the first batch."""
        if not self._taken:
            return BadInput(f"{self._place}: its batches {what}")
        return RunFailed(f"{self._place}: before step {step} its batches {what}")


def _in_precision(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Complex numbers stay complex, where a module's own `.to` drops their imaginary parts; whole ones stay as they are."""
    if value.is_complex():
        return value.to(dtype.to_complex())
    return value.to(dtype) if value.is_floating_point() else value


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module in the job's precision, what one step of it takes, and its own batches where it has some."""

    name: str
    module: nn.Module
    example: Batch
    batches: Batches | None  # None: tokens of the job's data
    described: ModelSpec | None = None  # None: a module of Python's own

    @property
    def items(self) -> Items:
        """What a rate counts."""
        return "tokens" if self.batches is None else "samples"


def open_subject(job: Job, *, with_values: bool) -> Subject:
    """What the job trains. Without values nothing is allocated for a described model: enough to plan.

    Raises BadInput for a model that cannot be found or made.
    """
    train = job.spec.train
    tokens = torch.zeros(train.global_batch, train.seq_len, dtype=torch.int64)
    if job.factory is not None:
        return _made(job, job.factory, (tokens, tokens.clone()), with_values=with_values)
    return _described(job, (tokens, tokens.clone()), with_values=with_values)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _described(job: Job, example: Batch, *, with_values: bool) -> Subject:
    model = job.model
    model.check_trained(job.source, in_program=True)
    if model.sliding_window is not None:
        raise BadInput(
            f"{job.path}: model '{model.name}' has a sliding_window; the Llama of strategy 'hap' attends to all tokens before. Leave "
            "sliding_window out, or take another strategy."
        )
    allocating = nullcontext() if with_values else FakeTensorMode(allow_non_fake_inputs=True)
    with _default(DTYPES[job.spec.train.precision]), allocating:
        module = Llama(model, job.spec.train.seq_len)
    if with_values:
        fill(module, model, job.spec.train.seed, job.hugging_face_folder)
    return Subject(name=model.name, module=module, example=example, batches=None, described=model)


def _made(job: Job, reference: str, example: Batch, *, with_values: bool) -> Subject:
    place = f"{job.path}: model python:{reference}"
    factory = _find(reference, job.base, place)
    torch.manual_seed(job.spec.train.seed)
    try:
        made = factory(job.spec.train) if _wants_settings(factory) else factory()
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"{place}: the factory failed: {type(error).__name__}: {error}.") from error
    module, source = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise BadInput(
            f"{place}: the factory returned {type(made).__name__}; return a torch.nn.Module, or it and an iterable of batches."
        )
    dtype = DTYPES[job.spec.train.precision]
    if (name := next((name for name, value in module.named_parameters() if value.is_complex()), None)) is not None:
        raise BadInput(
            f"{place}: '{name}' is complex, which the optimizer of a job does not step; keep its real and imaginary part as a"
            " last dimension of 2, and let forward take torch.view_as_complex of it."
        )
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    if with_values and (name := next((name for name, value in held.items() if value.is_meta), None)) is not None:
        raise BadInput(
            f"{place}: '{name}' has no values (device 'meta'), enough to plan but not to train; let the factory make it on the CPU."
        )
    module._apply(lambda value: _in_precision(value, dtype))
    if source is None:
        return Subject(name=reference, module=module, example=example, batches=None)
    if not isinstance(source, Iterable):
        raise BadInput(f"{place}: the factory's batches are {type(source).__name__}; return an iterable of tuples.")
    batches = Batches(source, dtype, place)
    _check_batch(job, batches.first, place)
    return Subject(name=reference, module=module, example=batches.first, batches=batches)


def _find(reference: str, folder: Path, place: str) -> Any:
    module, colon, name = reference.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise BadInput(f"{place}: {FORM}.")
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadInput(f"{place}: there is no module '{error.name}'; {FORM}.") from error
    except (Exception, SystemExit) as error:  # of a script that ends itself
        raise BadInput(f"{place}: importing it failed: {type(error).__name__}: {error}.") from error
    factory = getattr(found, name, None)
    if not callable(factory):
        known = sorted(key for key, value in vars(found).items() if callable(value) and not key.startswith("_"))
        raise BadInput(f"{place}: '{module}' has no function or class '{name}'; it has {', '.join(known) or 'none'}.")
    return factory


def _wants_settings(factory: Any) -> bool:
    """Whether a factory takes the job's `train` settings: it has a parameter that must be given."""
    given = inspect.signature(factory).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is p.empty and p.kind in positional for p in given)


def _check_batch(job: Job, batch: Batch, place: str) -> None:
    wanted = job.spec.train.global_batch
    if any(not tensor.dim() for tensor in batch):
        raise BadInput(
            f"{place}: its first batch has a tensor without dimensions, but samples are dealt by the first one: give a number"
            f" for each of the {wanted} samples, or let the module keep it."
        )
    sizes = {tensor.shape[0] for tensor in batch}
    if sizes != {wanted}:
        raise BadInput(
            f"{place}: its first batch has tensors of {', '.join(map(str, sorted(sizes)))} samples, but train.global_batch is "
            f"{wanted}; make them equal."
        )
