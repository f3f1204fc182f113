"""Chunks of one collective: how large, and under way at the same time in an order that is the same on every rank."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hethub.spec.ranges import Range, split

Stages = Iterator[None]
"""One chunk's work as a generator: it yields before it waits for what other ranks send."""

_FINISHED = object()


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes that change speed only, never a result."""

    chunk_bytes: int = 2 << 20
    small_bytes: int = 256 << 10
    lag: int = 3

    @classmethod
    def over(cls, relay_names: set[str], *, has_devices: bool) -> "Tuning":
        """Return the chunks for a group whose members reach each other over these relays.

        Between CPUs of one host there is no wire to keep busy: every chunk more is a switch between processes more (2+2
        ranks on 2 cores, 64 MiB: 80 ms in one chunk, 200 ms in 16). Devices have their copies to overlap.
        """
        if relay_names <= {"shm"} and not has_devices:
            return cls(chunk_bytes=64 << 20, lag=1)
        return cls()

    def num_chunks(self, num_bytes: int) -> int:
        return max(1, -(-num_bytes // self.chunk_bytes))


def chunked(ranges: Sequence[Range], num_chunks: int) -> list[list[Range]]:
    """`num_chunks` lists: the c-th piece of every range, so that each list is the same problem, smaller."""
    cuts = [[piece.shift(whole.start) for piece in split(whole.size, num_chunks)] for whole in ranges]
    return [list(pieces) for pieces in zip(*cuts, strict=True)]


def run_pipelined(chunks: Iterable[Stages], lag: int) -> None:
    """Runs all chunks to the end, each stage of a chunk `lag` steps after the one before it.

    A step starts one chunk, so a stage waits for messages that were sent while `lag` other chunks were begun. The order
    depends on the count of chunks and stages only, never on timing: every rank posts its messages in the same order.
    """
    active: deque[tuple[int, Stages]] = deque()
    step = 0
    for step, chunk in enumerate(chunks):
        active.append((step, chunk))
        _advance(active, step, lag)
    while active:
        step += 1
        _advance(active, step, lag)


def _advance(active: deque[tuple[int, Stages]], step: int, lag: int) -> None:
    """Runs the next stage of every chunk that is due, oldest first, and drops the finished ones."""
    for _ in range(len(active)):
        start, chunk = active.popleft()
        if (step - start) % lag or next(chunk, _FINISHED) is not _FINISHED:
            active.append((start, chunk))
