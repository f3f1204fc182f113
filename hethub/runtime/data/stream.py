"""The tokens of one source, cut into windows that are numbered anew in every epoch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hethub.runtime.data.fingerprint import fingerprint
from hethub.runtime.data.order import permuted
from hethub.spec.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One stream of tokens cut into windows of seq_len + 1; neighbours share a token, so each token is predicted once.

    Stateless: the window at a position depends on the seed alone.
    """

    name: str  # where the tokens come from, for messages
    tokens: NDArray[Any]  # (num_tokens,), in memory or memory-mapped
    seq_len: int
    seed: int
    vocab: int  # of the model
    max_token: int
    end_of_document: int | None
    tokenizer: str  # Tokenizer.identity
    tokenizer_file: str = ""  # Tokenizer.file
    trained: NDArray[Any] | None = None  # (num_tokens,) of 0 and 1: tokens to be predicted; None: all
    ends: NDArray[np.int64] | None = None  # rising: behind which token each document ends; None: where its end token is

    def __post_init__(self) -> None:
        if self.num_tokens < self.seq_len + 1:
            raise BadInput(
                f"{self.name}: {self.num_tokens:,} tokens are fewer than one window of seq_len + 1 = "
                f"{self.seq_len + 1:,}; give more text or shorten train.seq_len."
            )
        self._check_vocab(self.max_token)
        if self.trained is not None and not self.trained[1:].any():
            raise BadInput(
                f"{self.name}: no message in it has the role `assistant`, whose turns alone are learnt, so there is nothing to learn. "
                "Give the answers that role, or name another file."
            )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_windows(self) -> int:
        """Samples in an epoch."""
        return (self.num_tokens - 1) // self.seq_len

    def starts(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the windows at `positions` begin in `tokens`: every epoch takes each window once, in its own order."""
        epochs, places = np.divmod(positions, self.num_windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permuted(places[chosen], self.num_windows, self.seed, int(epoch))
        return windows * self.seq_len

    def rows(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows that begin at `starts`, (len(starts), seq_len + 1)."""
        rows = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        # A token file's header may promise less than the file holds; on a GPU such an id would end in an opaque fault.
        self._check_vocab(int(rows.max(initial=0)))
        return rows

    def predicted(self, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which targets of these windows count for the loss, (len(starts), seq_len)."""
        if self.trained is None:
            return np.ones((len(starts), self.seq_len), dtype=np.bool_)
        return self.trained[starts[:, None] + np.arange(1, self.seq_len + 1)].astype(np.bool_)

    def documents(self, starts: NDArray[np.int64], inputs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for every position of these windows' `inputs` (len(starts), seq_len), the number of its document within the
        window, from 0. The end-of-document token belongs to the document it ends."""
        if self.ends is None:
            last = inputs == self.end_of_document
        else:
            last = np.zeros(inputs.shape, dtype=np.bool_)
            found = np.searchsorted(self.ends, (starts, starts + self.seq_len), side="right")
            for row, (start, first, stop) in enumerate(zip(starts, *found, strict=True)):
                last[row, self.ends[first:stop] - 1 - start] = True
        return np.cumsum(last, axis=1) - last

    def fingerprint(self, *, earlier: bool = False) -> str:
        """A hash of tokens, tokenizer, seq_len and end of document: equal on ranks that draw equal windows from a seed;
        or as `earlier` versions made it.

        Whole up to 256 MiB of tokens, by 256 sampled blocks of 1 MiB and the length above.
        """
        settings = {} if self.trained is None else {"trained": fingerprint(self.trained)}
        return fingerprint(
            self.tokens,
            tokenizer=self.tokenizer_file if earlier else self.tokenizer,
            seq_len=self.seq_len,
            end_of_document=self.end_of_document,
            **settings,
        )

    def _check_vocab(self, token: int) -> None:
        if token >= self.vocab:
            raise BadInput(
                f"{self.name}: token id {token} does not exist in the model's vocabulary of {self.vocab}. Take a model "
                f"with vocab >= {token + 1}, or tokenise with the tokenizer that belongs to the model."
            )
