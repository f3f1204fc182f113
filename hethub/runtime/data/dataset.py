"""The samples of a run: by seed and number, whoever asks, from one source or a weighted mixture."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hethub.runtime.data.mixture import counts, draws, shares_of
from hethub.runtime.data.stream import Stream
from hethub.spec.errors import BadInput
from hethub.spec.layout.tensors import IGNORED


class Batch(NamedTuple):
    """Samples as a model takes them: token ids and what follows each, (samples, seq_len)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


class Dataset:
    """Packed windows of every source, shared out by weight.

    Which windows a step takes depends on the seed and on how many samples came before, never on rank or plan. A run
    counts its samples per source: `position` is kept with a checkpoint, and `resume` goes on there, whatever the
    global batch and the weights are now.
    """

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float] = (1.0,)) -> None:
        self.streams, self._shares = tuple(streams), shares_of(weights)
        self._origin = 0  # the step, counted from 0, that `_before` samples come before
        self._before = 0
        self._offsets = [0] * len(self.streams)  # what each source has given beyond its share of those

    @classmethod
    def one(cls, **stream: Any) -> "Dataset":
        """Return the dataset of a single stream."""
        return cls([Stream(**stream)])

    @property
    def seq_len(self) -> int:
        return self.streams[0].seq_len

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def num_windows(self) -> int:
        """Samples in an epoch of every source."""
        return sum(stream.num_windows for stream in self.streams)

    @property
    def max_token(self) -> int:
        return max(stream.max_token for stream in self.streams)

    @property
    def vocab_needed(self) -> int:
        """The smallest model vocabulary that holds every token."""
        return self.max_token + 1

    @property
    def end_of_document(self) -> int | None:
        """The end-of-document token of the tokenizer, which all sources share."""
        return self.streams[0].end_of_document

    @property
    def tokenizer(self) -> str:
        """The identity of that tokenizer."""
        return self.streams[0].tokenizer

    def check_epoch(self, num_samples: int) -> None:
        """Raises BadInput where an evaluation, of the first `num_samples` samples, takes more than a source has, or no token
        that is learnt."""
        for stream, taken in zip(self.streams, counts(num_samples, self._shares), strict=True):
            if taken > stream.num_windows:
                raise BadInput(
                    f"{stream.name}: an evaluation of eval.batches takes {taken:,} samples of it, and it has "
                    f"{stream.num_windows:,} of seq_len {self.seq_len}, so some would count twice. Give more data, or lower eval.batches."
                )
        if not self.valid_tokens(0, num_samples):
            raise BadInput(
                f"{self.streams[0].name}: the {num_samples:,} samples that an evaluation of eval.batches takes hold nothing that the "
                "assistant says, so there is no loss to take. Raise eval.batches, or give other data."
            )

    def position(self, steps: int, global_batch: int) -> tuple[int, ...]:
        """Samples that each source has given when `steps` steps are done."""
        total = self._before + (steps - self._origin) * global_batch
        return tuple(offset + taken for offset, taken in zip(self._offsets, counts(total, self._shares), strict=True))

    def epochs(self, steps: int, global_batch: int) -> list[float]:
        """How often every window of each source has been taken when `steps` steps are done."""
        taken = self.position(steps, global_batch)
        return [number / stream.num_windows for number, stream in zip(taken, self.streams, strict=True)]

    def resume(self, steps: int, position: Sequence[int]) -> None:
        """Goes on behind step `steps`, when each source had given `position` samples: none is skipped or repeated."""
        assert len(position) == len(self.streams)
        self._origin, self._before = steps, sum(position)
        self._offsets = [taken - fair for taken, fair in zip(position, counts(self._before, self._shares), strict=True)]

    def samples(self, step: int, global_batch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Samples [start, stop) of the step's batch, (stop - start, seq_len + 1); steps count from 0.

        Each epoch takes every window of a source once, in its own order; a batch may reach over the edge of epochs.
        """
        rows = np.empty((stop - start, self.seq_len + 1), dtype=np.int64)
        for stream, chosen, starts in self._drawn(step, global_batch, start, stop):
            rows[chosen] = stream.rows(starts)
        return rows

    def batch(self, step: int, global_batch: int, start: int, stop: int) -> Batch:
        """Return `samples` as inputs and targets; a target that is not to be learnt is IGNORED."""
        rows = self.samples(step, global_batch, start, stop)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.predicts_all:
            return Batch(inputs, targets)
        return Batch(inputs, np.where(self._predicted(step, global_batch, start, stop), targets, IGNORED))

    def _drawn(
        self, step: int, global_batch: int, start: int, stop: int
    ) -> Iterator[tuple[Stream, NDArray[np.bool_], NDArray[np.int64]]]:
        """Each stream with the samples [start, stop) of a step that it gives: which they are, and where they begin."""
        assert 0 <= start <= stop <= global_batch, (start, stop, global_batch)
        first = self._before + (step - self._origin) * global_batch
        sources, places = draws(np.arange(first + start, first + stop, dtype=np.int64), self._shares)
        for number, stream in enumerate(self.streams):
            chosen = sources == number
            yield stream, chosen, stream.starts(places[chosen] + self._offsets[number])

    @property
    def predicts_all(self) -> bool:
        """Whether every token counts for the loss, as in text."""
        return all(stream.trained is None for stream in self.streams)

    def _predicted(self, step: int, global_batch: int, start: int, stop: int) -> NDArray[np.bool_]:
        found = np.empty((stop - start, self.seq_len), dtype=np.bool_)
        for stream, chosen, starts in self._drawn(step, global_batch, start, stop):
            found[chosen] = stream.predicted(starts)
        return found

    def valid_tokens(self, step: int, global_batch: int) -> int:
        """The tokens that the step's loss is averaged over: in packed windows of text all of them."""
        if self.predicts_all:
            return global_batch * self.seq_len
        return int(self._predicted(step, global_batch, 0, global_batch).sum())

    def documents(
        self, step: int, global_batch: int, start: int, stop: int, inputs: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return, for every position of the `inputs` returned by `batch`, the number of its document within the sample, from 0:
        (samples, seq_len)."""
        found = np.empty_like(inputs)
        for stream, chosen, starts in self._drawn(step, global_batch, start, stop):
            found[chosen] = stream.documents(starts, inputs[chosen])
        return found

    @cached_property
    def fingerprint(self) -> str:
        """The stream's; of several the hash of all theirs in order. Weights do not count."""
        return _joined(self.fingerprints)

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint of each stream."""
        return tuple(stream.fingerprint() for stream in self.streams)

    def changed(self, saved: Sequence[str] | None) -> str:
        """The streams that have other fingerprints than a checkpoint has `saved`, by name; all where it has none. What
        has become of them where they are not as many, or in another order."""
        before, now = saved or [""] * len(self.streams), self.fingerprints
        if len(before) != len(now):
            return f"{len(before)} sources where the job names {len(now)}:"
        if sorted(before) == sorted(now):
            return "the same sources in another order:"
        return " and ".join(own.name for own, was, is_ in zip(self.streams, before, now, strict=True) if was != is_)

    def is_of(self, fingerprint: str) -> bool:
        """Whether a checkpoint's fingerprint, perhaps one of an earlier version, is this data's."""
        return fingerprint == self.fingerprint or fingerprint == _joined(
            [stream.fingerprint(earlier=True) for stream in self.streams]
        )


def _joined(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else hashlib.blake2b("".join(found).encode(), digest_size=16).hexdigest()
