"""Initial values that depend on nothing but seed and tensor name, so that every plan starts from the same model."""

import hashlib
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from hethub.runtime.model.huggingface import Weights, open_weights
from hethub.runtime.state.storage import FlatStorage
from hethub.spec.layout.tensors import TensorInfo
from hethub.spec.model import ModelSpec


def generator_of(name: str) -> torch.Generator:
    """A generator seeded by a name: equal numbers for equal names, wherever they are drawn."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_value(info: TensorInfo, model: ModelSpec, seed: int) -> Tensor:
    """The full tensor in stored shape, fp32 on the CPU: norms 1, matrices normal with the model's init_std."""
    if not info.decays:
        return torch.ones(info.stored_shape)
    generator = generator_of(f"{seed}:{info.name}")
    value = torch.empty(info.shape).normal_(0.0, model.init_std, generator=generator)
    return value.t() if info.split_dim == 1 else value


def initialise(storage: FlatStorage, model: ModelSpec, seed: int) -> None:
    """Fills this rank's weights with its part of the initial values."""
    for placed, parts in groupby(storage.persistent(), key=lambda part: part[0]):
        value = initial_value(placed.info, model, seed).reshape(-1)
        for _, run, weights in parts:
            weights.copy_(value[slice(*run.shift(-placed.span.start))])


def load_hugging_face(storage: FlatStorage, model: ModelSpec, folder: Path) -> Weights:
    """Fills this rank's weights from a Hugging Face folder, reading only its own slices; the folder's weights, for who
    wants them as they are there. Raises BadInput."""
    weights = open_weights(folder, model)
    for placed, run, values in storage.persistent():
        values.copy_(weights.read(placed.info, run.shift(-placed.span.start)))
    return weights
