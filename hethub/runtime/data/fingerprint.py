"""A hash of tokens by which ranks see, before step 1, whether they all read the same data."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

WHOLE_BYTES = 256 * 2**20  # tokens up to this size are hashed whole
BLOCK_BYTES = 2**20
NUM_BLOCKS = 256


def fingerprint(tokens: NDArray[Any], **settings: Any) -> str:
    """A hash of the tokens, their number and type, and whatever else decides the batches.

    Up to 256 MiB of tokens are hashed whole. Of larger data, 256 evenly spaced blocks of 1 MiB are hashed, the first
    and the last among them: a change that touches none of these blocks and no length goes unseen.
    """
    digest = hashlib.blake2b(digest_size=16)
    described = {"tokens": len(tokens), "dtype": tokens.dtype.str, **settings}
    digest.update(json.dumps(described, sort_keys=True).encode())
    for block in _blocks(tokens):
        digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _blocks(tokens: NDArray[Any]) -> Iterator[NDArray[Any]]:
    per_block = BLOCK_BYTES // tokens.itemsize
    last = len(tokens) - per_block
    whole = tokens.nbytes <= WHOLE_BYTES
    starts = range(0, len(tokens), per_block) if whole else [last * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)]
    for start in starts:
        yield tokens[start : start + per_block]
