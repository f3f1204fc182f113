"""A checkpoint's weights in one process, without process groups: tensor by tensor, or as a Hugging Face folder."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor

from hethub.runtime.checkpoint.elements import WEIGHTS, entry
from hethub.runtime.checkpoint.index import INDEX, DamagedCheckpoint
from hethub.runtime.checkpoint.integrity import (
    MARKER,
    candidates,
    check_at_a_glance,
    check_present,
    refusal,
    step_of,
)
from hethub.runtime.checkpoint.reader import Reader
from hethub.runtime.checkpoint.record import CheckpointRecord, read_record
from hethub.runtime.data.token_file import read_token_file
from hethub.runtime.data.tokenizer import byte_tokenizer, load_tokenizer
from hethub.runtime.model.huggingface import write_folder
from hethub.runtime.run_folder import RunFolder, run_and_step
from hethub.runtime.state.storage import DTYPES
from hethub.spec.base import build
from hethub.spec.documents import read_yaml
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import TOKENIZER, DataSpec, JobSpec
from hethub.spec.layout.tensors import TensorInfo, model_tensors
from hethub.spec.model import ModelSpec

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Trained(NamedTuple):
    """A checkpoint of a run, and what its text was made tokens with."""

    run: Path
    checkpoint: Path
    record: CheckpointRecord
    folder: Path | None  # the Hugging Face folder that training started from
    tokenizer: str | None  # as a job names it, its path whole; None: tokens of a tokenizer that nobody named
    end_of_document: int | None
    bos: bool = True  # data.bos


def with_newest(named: Path, use: Callable[[Trained], Result]) -> Result:
    """`use` of the newest whole checkpoint of the run folder `named`, or of the checkpoint RUN_DIR/checkpoints/step-N.

    The data are checked as they are read, and only what is read: where that finds damage, or training has removed the
    checkpoint meanwhile, `use` is called again, with the newest of the others. Raises BadInput where there is no whole
    checkpoint of a plan, RunFailed where one cannot be read, and what `use` raises.
    """
    run, step = run_and_step(named)
    checkpoints, bad = RunFolder(run).checkpoints, dict[Path, str]()
    if not checkpoints.is_dir():
        raise BadInput(
            f"{run}: there is no run with checkpoints here; name the run folder that `hethub train` printed."
        )
    check_present(checkpoints, step)
    while left := [path for path in candidates(checkpoints) if path not in bad and step in (None, step_of(path))]:
        path = left[0]
        try:
            check_at_a_glance(path)
            return use(_trained(run, path))
        except (BadInput, RunFailed) as error:
            is_damaged = isinstance(error, DamagedCheckpoint)
            if not is_damaged and (path / MARKER).exists():  # which goes first where training removes it
                raise
            is_told = is_damaged and path.exists()
            why = str(error).removeprefix(f"{path}: ").removesuffix(".") if is_told else "removed while it was read"
            bad[path] = f"{path}: {why}."
            _log.warning("a checkpoint cannot be used, another one is looked for. %s", bad[path])
    if bad:
        raise BadInput(f"no checkpoint can be used. {' '.join(bad.values())} Name another one, or train on.")
    raise BadInput(f"{checkpoints}: there is no whole checkpoint yet; train until the first one is written.")


def _trained(run: Path, path: Path) -> Trained:
    """Raises BadInput where the checkpoint is no plan's, or not of this version."""
    if not (path / INDEX).exists():
        raise BadInput(
            f"{path}: has no {INDEX}, as a program's (strategy hap); only checkpoints of plans are taken. "
            "torch.distributed.checkpoint.load reads it (docs/any-model.md)."
        )
    try:
        record = read_record(path)
    except BadInput as error:
        raise refusal(path, error) from None
    if not (run / "job.yaml").exists():  # checkpoints alone
        return Trained(run, path, record, None, None, None)
    data, source = read_yaml(run / "job.yaml", "job file")
    spec = build(JobSpec, data, source, "job file")
    folder = Path(spec.model.removeprefix("hf:")) if spec.model.startswith("hf:") else None
    return Trained(run, path, record, folder, *_tokenizer_of(spec.data, record), spec.data.bos)


def _tokenizer_of(data: DataSpec, record: CheckpointRecord) -> tuple[str | None, int | None]:
    """The tokenizer of a run's data, and its end of document. The record knows both, so the data may be gone."""
    identity, end = record.tokenizer, record.end_of_document
    first = data.weighted[0]
    if first.source == "tokens" and data.tokenizer == "bytes":
        if identity is None:
            header, _ = read_token_file(Path(str(first.path)))
            identity, end = header.tokenizer, header.end_of_document
        return "bytes" if identity == "bytes" else None, end
    return data.tokenizer, end if identity is not None else load_tokenizer(data.tokenizer, Path()).end_of_document


def export(run: Path, to: Path) -> str:
    """Writes the newest whole checkpoint of the run folder `run`, or the one that `run` names (`with_newest`), to the
    folder `to`; says which step it was.

    Weights are rounded to the precision the run trained in; tokenizer, special tokens, generation config and chat
    template come from where the run had them; after training without `bos` the tokenizer puts none in front. Raises BadInput
    where there is no whole checkpoint, the tokenizer is gone, or `to` already holds something.
    """
    to = to.resolve()
    return with_newest(run, lambda trained: _export(trained, to))


def _export(trained: Trained, to: Path) -> str:
    record = trained.record
    tensors = (
        (info.name, values.view(info.stored_shape).t() if info.split_dim == 1 else values.view(info.shape))
        for info, values in iterate_weights(trained.checkpoint, record.model)
    )
    source: Path | str | None = None if trained.tokenizer is None else Path(trained.tokenizer)
    if trained.tokenizer == "bytes":
        source = byte_tokenizer()
    elif trained.folder is not None and (source is None or (trained.folder / TOKENIZER).is_file()):
        source = trained.folder  # whose tokenizer it is
    if source is None:
        _log.warning(
            "the run was trained on tokens whose tokenizer it does not know, so none is written; set data.tokenizer in %s "
            "and export again, or put the tokenizer's files beside the weights",
            trained.run / "job.yaml",
        )
    dtype = DTYPES[record.precision]
    write_folder(to, record.model, tensors, dtype, source, end_of_document=trained.end_of_document, bos=trained.bos)
    return f"step {record.step} of {trained.run}"


def iterate_weights(path: Path, model: ModelSpec) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Every parameter of the model with its values (numel,) in fp32 or fp64, in stored order; a tied head comes once.

    `.view(info.stored_shape)`, transposed where `info.split_dim` is 1, is the tensor as Hugging Face has it. Raises
    BadInput where the checkpoint is of another model.
    """
    reader = Reader(path)
    for info in model_tensors(model):
        yield info, reader.whole(entry(WEIGHTS, info.name), info.numel)
