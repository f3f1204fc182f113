"""A checkpoint's weights in one process, without process groups: tensor by tensor, or as a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from hethub.runtime.checkpoint.elements import WEIGHTS, entry
from hethub.runtime.checkpoint.integrity import newest_intact
from hethub.runtime.checkpoint.reader import Reader
from hethub.runtime.checkpoint.record import CheckpointRecord, read_record
from hethub.runtime.data.token_file import read_token_file
from hethub.runtime.data.tokenizer import byte_tokenizer, load_tokenizer
from hethub.runtime.model.huggingface import write_folder
from hethub.runtime.run_folder import RunFolder
from hethub.runtime.state.storage import DTYPES
from hethub.spec.base import build
from hethub.spec.documents import read_yaml
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec, JobSpec
from hethub.spec.layout.tensors import TensorInfo, model_tensors
from hethub.spec.model import ModelSpec


class Trained(NamedTuple):
    """The newest whole checkpoint of a run, and what its text was made tokens with."""

    checkpoint: Path
    record: CheckpointRecord
    folder: Path | None  # the Hugging Face folder that training started from
    tokenizer: str | None  # as a job names it, its path whole; None: tokens of a tokenizer that nobody named
    end_of_document: int | None


def newest_of(run: Path) -> Trained:
    """Raises BadInput where `run` is no run folder with a whole checkpoint of a plan."""
    checkpoints = RunFolder(run).checkpoints
    if not checkpoints.is_dir():
        raise BadInput(
            f"{run}: there is no run with checkpoints here; name the run folder that `hethub train` printed."
        )
    path = newest_intact(checkpoints)
    if path is None:
        raise BadInput(f"{checkpoints}: there is no whole checkpoint yet; train until the first one is written.")
    record = read_record(path)
    if not (run / "job.yaml").exists():  # checkpoints alone
        return Trained(path, record, None, None, None)
    data, source = read_yaml(run / "job.yaml", "job file")
    spec = build(JobSpec, data, source, "job file")
    folder = Path(spec.model.removeprefix("hf:")) if spec.model.startswith("hf:") else None
    return Trained(path, record, folder, *_tokenizer_of(spec.data))


def _tokenizer_of(data: DataSpec) -> tuple[str | None, int | None]:
    """The tokenizer of a run's data, and its end of document."""
    first = data.weighted[0]
    if first.source == "tokens" and data.tokenizer == "bytes":
        header, _ = read_token_file(Path(str(first.path)))
        return "bytes" if header.tokenizer == "bytes" else None, header.end_of_document
    return data.tokenizer, load_tokenizer(data.tokenizer, Path()).end_of_document


def export(run: Path, to: Path) -> str:
    """Writes the newest whole checkpoint of the run folder `run` to the folder `to`; says which step it was.

    Weights are rounded to the precision the run trained in; tokenizer, special tokens, generation config and chat
    template come from where the run had them. Raises BadInput where there is no whole checkpoint, the tokenizer is gone,
    or `to` already holds something.
    """
    trained = newest_of(run)
    record = trained.record
    tensors = (
        (info.name, values.view(info.stored_shape).t() if info.split_dim == 1 else values.view(info.shape))
        for info, values in iterate_weights(trained.checkpoint, record.model)
    )
    source: Path | str | None = None if trained.tokenizer is None else Path(trained.tokenizer)
    if trained.tokenizer == "bytes":
        source = byte_tokenizer()
    elif trained.folder is not None:
        source = trained.folder  # whose tokenizer it is
    dtype = DTYPES[record.precision]
    write_folder(to, record.model, tensors, dtype, source, end_of_document=trained.end_of_document)
    return f"step {record.step} of {run}"


def iterate_weights(path: Path, model: ModelSpec) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Every parameter of the model with its values (numel,) in fp32 or fp64, in stored order; a tied head comes once.

    `.view(info.stored_shape)`, transposed where `info.split_dim` is 1, is the tensor as Hugging Face has it. Raises
    BadInput where the checkpoint is of another model.
    """
    reader = Reader(path)
    for info in model_tensors(model):
        yield info, reader.whole(entry(WEIGHTS, info.name), info.numel)
