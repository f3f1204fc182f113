"""The packed dataset: samples by (seed, step), whoever asks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hethub.runtime.data.fingerprint import fingerprint
from hethub.runtime.data.order import permuted
from hethub.spec.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One stream of tokens cut into windows of seq_len + 1; neighbours share a token, so each token is predicted once.

    Stateless: which windows a step takes depends on seed and step alone, never on rank, plan or what was asked before.
    """

    name: str  # where the tokens come from, for messages
    tokens: NDArray[Any]  # (num_tokens,), in memory or memory-mapped
    seq_len: int
    seed: int
    vocab: int  # of the model
    max_token: int
    end_of_document: int | None
    tokenizer: str  # Tokenizer.identity

    def __post_init__(self) -> None:
        if self.num_tokens < self.seq_len + 1:
            raise BadInput(
                f"{self.name}: {self.num_tokens:,} tokens are fewer than one window of seq_len + 1 = "
                f"{self.seq_len + 1:,}; give more text or shorten train.seq_len."
            )
        self._check_vocab(self.max_token)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_windows(self) -> int:
        """Samples in an epoch."""
        return (self.num_tokens - 1) // self.seq_len

    @property
    def vocab_needed(self) -> int:
        """The smallest model vocabulary that holds every token."""
        return self.max_token + 1

    def samples(self, step: int, global_batch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Samples [start, stop) of the step's batch, (stop - start, seq_len + 1); steps count from 0.

        Each epoch takes every window once, in its own order; a batch may reach over the edge of epochs.
        """
        assert 0 <= start <= stop <= global_batch, (start, stop, global_batch)
        drawn = step * global_batch + np.arange(start, stop, dtype=np.int64)
        epochs, positions = np.divmod(drawn, self.num_windows)
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permuted(positions[chosen], self.num_windows, self.seed, int(epoch))
        indices = windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)  # (samples, seq_len + 1)
        samples = self.tokens[indices].astype(np.int64)
        # A token file's header may promise less than the file holds; on a GPU such an id would end in an opaque fault.
        self._check_vocab(int(samples.max(initial=0)))
        return samples

    def documents(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """For every input position the number of its document within the sample, (samples, seq_len), from 0.

        `samples` is (samples, seq_len + 1) as `samples` returns it. The end-of-document token belongs to the document
        it ends. Any rank derives the same from the tokens alone.
        """
        assert self.end_of_document is not None, "open_dataset refuses document_mask without an end-of-document token"
        ends = samples[:, :-1] == self.end_of_document
        return np.cumsum(ends, axis=1) - ends

    def valid_tokens(self, step: int, global_batch: int) -> int:
        """The tokens that the step's loss is averaged over: in packed windows all of them."""
        return global_batch * self.seq_len

    def fingerprint(self) -> str:
        """A hash of tokens, tokenizer, seq_len and end of document: equal on ranks that draw equal batches from a seed.

        Whole up to 256 MiB of tokens, by 256 sampled blocks of 1 MiB and the length above.
        """
        return fingerprint(
            self.tokens, tokenizer=self.tokenizer, seq_len=self.seq_len, end_of_document=self.end_of_document
        )

    def _check_vocab(self, token: int) -> None:
        if token >= self.vocab:
            raise BadInput(
                f"{self.name}: token id {token} does not exist in the model's vocabulary of {self.vocab}. Take a model "
                f"with vocab >= {token + 1}, or tokenise with the tokenizer that belongs to the model."
            )
