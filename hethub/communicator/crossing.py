"""Partials on their way over the bridge: encoded for the wire, decoded on arrival, the same on both sides."""

from collections.abc import Sequence

import torch

from hethub.communicator.relay import Incoming, Transfer
from hethub.communicator.wire import Wire
from hethub.spec.ranges import Range


def encode_pieces(
    partial: torch.Tensor, pieces: Sequence[Range], wire: Wire, residual: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The messages for `pieces` (which tile the flat `partial`), and the partial as their receivers will see it.

    With error feedback, `residual` is what earlier calls rounded away here: it is added first, and what this call
    rounds away replaces it (1-bit SGD, Seide et al. 2014; Karimireddy et al. 2019 for why it converges).
    """
    if wire.dtype == partial.dtype:
        return [partial[piece.start : piece.stop] for piece in pieces], partial
    wanted = partial if residual is None else partial + residual
    messages = [wire.encode(wanted[piece.start : piece.stop]) for piece in pieces]
    seen = [wire.decode(message, piece.size) for message, piece in zip(messages, pieces, strict=True)]
    own = seen[0] if len(seen) == 1 else torch.cat(seen) if seen else wanted
    if residual is not None:
        residual.copy_(wanted - own)
    return messages, own


class Assembled:
    """A partial that arrives in parts, put where they belong."""

    def __init__(self, whole: torch.Tensor, transfers: Sequence[Transfer]) -> None:
        self._whole = whole
        self._transfers = transfers

    def wait(self) -> torch.Tensor:
        for transfer in self._transfers:
            transfer.wait()
        return self._whole

    def release(self) -> None:
        return None


class Decoded:
    """A partial that arrives as messages of a narrow wire, in the order of its pieces."""

    def __init__(self, wire: Wire, messages: Sequence[tuple[Incoming, int]]) -> None:
        self._wire = wire
        self._messages = messages

    def wait(self) -> torch.Tensor:
        parts = [self._wire.decode(message.wait(), num_elements) for message, num_elements in self._messages]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def release(self) -> None:
        for message, _ in self._messages:
            message.release()
