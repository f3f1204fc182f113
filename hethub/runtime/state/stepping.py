"""When owned state is stepped and new weights are sent: the stage as a whole, or a chunk of its layers at a time.

A stage that runs its chunks one after the other (ministages) steps each right after its backward. Where gradients are
clipped, or an fp16 overflow may skip the update, the factor is known only after the last chunk: then a chunk is stepped
when it is next at hand, before its first forward of the next step or before anything reads the weights (`flush`).
"""

import torch
from torch import Tensor

from hethub.runtime.pace import Pace
from hethub.runtime.state.optimizer import Optimizer, OwnedRun
from hethub.runtime.state.reduction import LocalPiece, Reducer
from hethub.runtime.state.zero_weights import ZeroWeights

Chunk = int | None  # None: what is complete only when another stage is through, too


class Stepping:
    """One rank's updates, in the same order on all ranks of its stage.

    `begin`, then `chunk_reduced`, `step_chunk` and `gather_chunk` for each chunk that is stepped by itself; `conclude`
    and `gather` once all ranks know the norm.
    """

    def __init__(
        self, optimizer: Optimizer, reducer: Reducer, pace: Pace, *, per_chunk: bool, waits_for_norm: bool
    ) -> None:
        self._optimizer, self._reducer, self._storage = optimizer, reducer, reducer.storage
        self._pace = pace
        self._per_chunk, self._waits = per_chunk, waits_for_norm
        self.weights: ZeroWeights | None = None
        num_chunks = len(self._storage.state.layout.stages[self._storage.assignment.stage].chunks)
        self._chunks: list[Chunk] = [*range(num_chunks), None]
        self._step = 0
        self._squares: list[Tensor] = []
        self._pending: dict[Chunk, tuple[int, float]] = {}

    def begin(self, step: int) -> None:
        """Starts step `step`, which sets the learning rate of updates that do not wait."""
        self._step = step
        self._squares = []

    def square_sum(self) -> Tensor:
        """The sum of squares of all gradients that this rank counts, 0-d in fp64."""
        if not self._per_chunk:
            return self._optimizer.square_sum()
        rest = self._optimizer.square_sum(self._runs(None))
        return torch.stack([*self._squares, rest]).sum()

    def chunk_reduced(self, chunk: int) -> None:
        """Takes up the norm of a chunk whose gradients are complete: they may be gone when the others are."""
        self._squares.append(self._optimizer.square_sum(self._runs(chunk)))

    def step_chunk(self, chunk: int) -> None:
        """Steps a chunk right after its reduction, unless that must wait for the norm."""
        if not self._waits:
            self._step_runs(self._runs(chunk), self._step, 1.0)

    def gather_chunk(self, chunk: int) -> None:
        """Begins to send the weights that `step_chunk` made."""
        if not self._waits:
            self._gather([chunk])

    def conclude(self, scale: float) -> None:
        """Steps what is due at the end of the step, gradients multiplied by `scale`, and notes what is due later."""
        if not self._per_chunk:
            self._step_runs(self._optimizer.runs, self._step, scale)
            return
        self._step_runs(self._runs(None), self._step, scale)
        if self._waits:
            self._pending = {chunk: (self._step, scale) for chunk in self._chunks if chunk is not None}

    def gather(self) -> None:
        """Begins to send the weights that `conclude` made; the next forward waits for them, layer by layer."""
        self._gather([None] if self._per_chunk else self._chunks)

    def catch_up(self, chunk: Chunk) -> None:
        """Steps a chunk that waited for the norm, and begins to send its weights."""
        if chunk in self._pending:
            step, scale = self._pending.pop(chunk)
            self._step_runs(self._runs(chunk), step, scale)
            self._gather([chunk])

    def flush(self) -> None:
        """Returns when no update is pending, all weights are here, and what is offloaded may be read; a call of all the
        stage's ranks."""
        for chunk in self._chunks:
            self.catch_up(chunk)
        self._reducer.finish_gather()
        if self._optimizer.arena is not None:
            self._optimizer.arena.synchronize()

    def _step_runs(self, runs: list[OwnedRun], step: int, scale: float) -> None:
        with self._pace.stepping(sum(run.local.size for run in runs)):
            self._optimizer.step_runs(runs, step, scale)

    def _runs(self, chunk: Chunk) -> list[OwnedRun]:
        return [run for run in self._optimizer.runs if run.bucket.chunk == chunk]

    def _gather(self, chunks: list[Chunk]) -> None:
        pieces = [piece for piece in self._reducer.pieces if piece.bucket.chunk in chunks]
        self._reducer.gather([piece for piece in pieces if not self._moves(piece)], set(chunks))
        units = dict.fromkeys(piece.bucket.unit for piece in pieces if self._moves(piece))
        if not self._storage.shards_weights:
            for unit in units:
                assert self.weights is not None
                assert unit is not None
                self.weights.spread(unit)

    def _moves(self, piece: LocalPiece) -> bool:
        return piece.bucket.unit is not None and self._storage.moves_weights
