"""A checkpoint's weights, tensor by tensor, in one process."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hethub.runtime.checkpoint.dcp import Reader
from hethub.runtime.checkpoint.elements import WEIGHTS, Chunk, entry
from hethub.spec.layout.tensors import TensorInfo, model_tensors
from hethub.spec.model import ModelSpec


def iterate_weights(path: Path, model: ModelSpec) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Every parameter of the model with its values (numel,) in fp32 or fp64, in stored order; a tied head comes once.

    `.view(info.stored_shape)`, transposed where `info.split_dim` is 1, is the tensor as Hugging Face has it. Raises
    BadInput where the checkpoint is of another model.
    """
    reader = Reader(path)
    for info in model_tensors(model):
        key = entry(WEIGHTS, info.name)
        values = torch.empty(info.numel, dtype=reader.dtype(key))
        reader.read([Chunk(key, info.numel, 0, values)])
        yield info, values
