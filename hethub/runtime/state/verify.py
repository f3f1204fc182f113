"""Checks that ranks agree: that all cut the state alike, and that copies of a parameter are equal bit by bit."""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from hethub.communicator import World
from hethub.runtime.json_hash import json_hash
from hethub.runtime.state.reduction import Reducer
from hethub.runtime.state.storage import take
from hethub.spec.errors import RunFailed
from hethub.spec.layout.state import StateMap

_CHUNK = 2**22


def verify_owners(world: World, state: StateMap) -> None:
    """Raises RunFailed on every rank if two ranks have not cut the state alike.

    Each rank solves for the owners itself; another version of the solver could take another of several best answers,
    and reductions of unlike sizes would hang.
    """
    pieces = [(p.runs, p.group.contributors, p.cuts) for bucket in state.buckets for p in bucket.pieces]
    rows = world.all_gather_objects([json_hash(pieces), version("scipy")])
    for rank, (cuts, solver) in enumerate(rows):
        if cuts != rows[0][0]:
            raise RunFailed(
                f"ranks 0 and {rank} have cut the training state unlike (scipy {rows[0][1]} and {solver}); install the same "
                "version of scipy on every node."
            )


def bit_hash(flat: Tensor) -> int:
    """A 64-bit hash of a flat tensor's bits and their order, computed on its device.

    Each 16-bit or 32-bit word times a weight that depends on its position, added modulo 2**64. It finds errors, not an
    adversary.
    """
    words = flat.contiguous().view(torch.int16 if flat.element_size() == 2 else torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=flat.device)
        weight = (position * 0x9E3779B1 + 0x7F4A7C15).bitwise_xor_(position << 17) | 1
        total += (part * weight).sum()
    return int(total)


def shared_hashes(reducer: Reducer) -> dict[str, int]:
    """The hash of everything this rank shares with others, by what is shared."""
    hashes: dict[str, int] = {}
    storage = reducer.storage
    for piece in reducer.pieces:
        weights = storage.held_weights(piece.bucket.unit)
        if piece.group is not None and weights is not None:
            key = f"{piece.piece.group.stage}:{piece.piece.runs[0].start}:{piece.piece.group.contributors}"
            hashes[key] = bit_hash(take(weights, piece.weights))
    for chunk, norms in reducer.norms.items():
        hashes[f"norms of chunk {chunk}, ranks {reducer.replica}"] = bit_hash(storage.weights[norms.start : norms.stop])
    return hashes


def verify_copies(world: World, reducer: Reducer | None, step: int) -> None:
    """Raises RunFailed on every rank, naming the ranks, if two copies of a parameter differ; an unused rank, which has
    no reducer, holds none."""
    rows: list[dict[str, Any]] = world.all_gather_objects({} if reducer is None else shared_hashes(reducer))
    seen: dict[str, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for key, value in row.items():
            first, expected = seen.setdefault(key, (rank, value))
            if value != expected:
                raise RunFailed.everywhere(
                    world.rank,
                    f"step {step}: ranks {first} and {rank} hold different bits of the same parameters ({key}). Copies must be "
                    "equal; the last checkpoint is not affected. Resume from it, and report this with the plan file.",
                )
