"""A checkpoint's weights in one process, without process groups: tensor by tensor, or as a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from hethub.runtime.checkpoint.dcp import Reader
from hethub.runtime.checkpoint.elements import WEIGHTS, entry
from hethub.runtime.checkpoint.integrity import newest_intact
from hethub.runtime.checkpoint.record import read_record
from hethub.runtime.model.huggingface import write_folder
from hethub.runtime.run_folder import RunFolder
from hethub.runtime.state.storage import DTYPES
from hethub.spec.errors import BadInput
from hethub.spec.layout.tensors import TensorInfo, model_tensors
from hethub.spec.model import ModelSpec


def export(run: Path, to: Path) -> str:
    """Writes the newest whole checkpoint of the run folder `run` to the folder `to`; says which step it was.

    Weights are rounded to the precision the run trained in. Raises BadInput where there is no whole checkpoint, or
    `to` already holds something.
    """
    checkpoints = RunFolder(run).checkpoints
    if not checkpoints.is_dir():
        raise BadInput(
            f"{run}: there is no run with checkpoints here; name the run folder that `hethub train` printed."
        )
    path = newest_intact(checkpoints)
    if path is None:
        raise BadInput(f"{checkpoints}: there is no whole checkpoint yet; train until the first one is written.")
    record = read_record(path)
    tensors = (
        (info.name, values.view(info.stored_shape).t() if info.split_dim == 1 else values.view(info.shape))
        for info, values in iterate_weights(path, record.model)
    )
    write_folder(to, record.model, tensors, DTYPES[record.precision])
    return f"step {record.step} of {run}"


def iterate_weights(path: Path, model: ModelSpec) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Every parameter of the model with its values (numel,) in fp32 or fp64, in stored order; a tied head comes once.

    `.view(info.stored_shape)`, transposed where `info.split_dim` is 1, is the tensor as Hugging Face has it. Raises
    BadInput where the checkpoint is of another model.
    """
    reader = Reader(path)
    for info in model_tensors(model):
        yield info, reader.whole(entry(WEIGHTS, info.name), info.numel)
