"""The dataset: batches depend on seed and step alone, every window comes once an epoch, bad data is refused."""

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data import fingerprint as fingerprint_module
from hethub.runtime.data import stream as stream_module
from hethub.runtime.data.fingerprint import fingerprint
from hethub.runtime.data.opening import text_sources
from hethub.runtime.data.order import permuted
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec
from tests.runtime.data.test_sources import save_tokenizer

SEQ_LEN = 8


def dataset(num_tokens: int = 1000, seed: int = 1, seq_len: int = SEQ_LEN, vocab: int = 2**16) -> Dataset:
    """Tokens that are their own positions, so that a sample says where it was taken from."""
    tokens = np.arange(num_tokens, dtype="<u2")
    return Dataset.one(
        name="counting",
        tokens=tokens,
        seq_len=seq_len,
        seed=seed,
        vocab=vocab,
        max_token=num_tokens - 1,
        end_of_document=5,
        tokenizer="none",
    )


@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = permuted(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


def test_the_order_is_random_access_and_differs_by_seed_and_epoch() -> None:
    whole = permuted(np.arange(1000), 1000, 1, 0)
    assert permuted(np.array([7, 999]), 1000, 1, 0).tolist() == whole[[7, 999]].tolist()
    for seed, epoch in ((2, 0), (1, 1)):
        # Two unrelated permutations agree in one place on average.
        assert (permuted(np.arange(1000), 1000, seed, epoch) == whole).sum() < 10


def test_the_order_has_no_visible_pattern() -> None:
    order = permuted(np.arange(100_000), 100_000, 1, 0)
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) < 100).mean() < 0.004  # 0.002 expected


def test_the_order_stays_as_it_is() -> None:
    """Resumed runs rely on it. The numbers come from the same network written with Python's own integers."""
    assert permuted(np.arange(6), 10**12, 1, 3).tolist() == [
        352470652541, 451055072049, 241636706345, 164216732978, 96216327192, 177959964096,
    ]  # fmt: skip
    # Of sizes at the edges of the network's domains, 4^k.
    assert permuted(np.arange(4), 4, 1, 4).tolist() == [1, 0, 3, 2]
    assert permuted(np.arange(5), 5, 1, 3).tolist() == [1, 3, 0, 2, 4]
    assert permuted(np.arange(16), 16, 1, 3).tolist() == [1, 7, 9, 11, 4, 12, 8, 3, 15, 13, 14, 2, 0, 6, 5, 10]


@given(step=st.integers(0, 500), cut=st.integers(0, 6))
@settings(max_examples=50, deadline=None)
def test_parts_of_a_batch_join_to_the_batch(step: int, cut: int) -> None:
    whole = dataset().samples(step, 6, 0, 6)
    parts = [dataset().samples(step, 6, 0, cut), dataset().samples(step, 6, cut, 6)]
    assert whole.dtype == np.int64
    assert whole.shape == (6, SEQ_LEN + 1)
    assert np.array_equal(np.concatenate(parts), whole)


def test_an_epoch_takes_every_window_once_and_predicts_every_token_once() -> None:
    data = dataset(num_tokens=1000)
    assert data.num_windows == 124
    steps = [data.samples(step, 4, 0, 4) for step in range(3 * 31)]
    for epoch in range(3):
        taken = np.concatenate(steps[31 * epoch : 31 * (epoch + 1)])
        assert sorted(taken[:, 0].tolist()) == list(range(0, 992, SEQ_LEN))
        assert sorted(taken[:, 1:].ravel().tolist()) == list(range(1, 993))
    assert not np.array_equal(steps[0], steps[31])


def test_batches_cross_the_edge_of_epochs_and_may_hold_several() -> None:
    data = dataset(num_tokens=3 * SEQ_LEN + 1)
    first_of_each = data.samples(0, 10, 0, 10)[:, 0].reshape(-1) // SEQ_LEN
    for epoch in range(3):
        assert sorted(first_of_each[3 * epoch : 3 * epoch + 3].tolist()) == [0, 1, 2]


def test_a_batch_does_not_depend_on_its_size_in_other_steps() -> None:
    assert np.array_equal(dataset().samples(2, 4, 0, 4), dataset().samples(1, 8, 0, 8)[:4])


def test_documents_are_numbered_from_the_end_tokens() -> None:
    samples = np.array([[1, 5, 2, 3, 5, 5, 4, 9, 9], [5, 1, 1, 1, 1, 1, 1, 5, 1]])
    (stream,), starts = dataset().streams, np.array([0, SEQ_LEN])
    assert stream.documents(starts, samples[:, :-1]).tolist() == [[0, 0, 1, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1]]


def test_documents_are_numbered_from_their_ends_where_those_are_known() -> None:
    data = dataset()
    stream = replace(data.streams[0], ends=np.array([1, 8, 11, 11, 16, 999]))
    data = Dataset([stream])
    inputs = data.batch(0, 124, 0, 124).inputs
    found = dict(zip(inputs[:, 0].tolist(), data.documents(0, 124, 0, 124, inputs).tolist(), strict=True))
    assert found[0] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert found[8] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert found[16] == [0] * 8


def test_all_tokens_of_packed_windows_are_valid() -> None:
    data = dataset()
    assert data.valid_tokens(3, 6) == data.samples(3, 6, 0, 6)[:, 1:].size


def test_fewer_tokens_than_a_window_are_refused() -> None:
    with pytest.raises(BadInput, match=r"counting: 8 tokens are fewer than one window .* 9; .* shorten train.seq_len"):
        dataset(num_tokens=8)
    assert dataset(num_tokens=9).num_windows == 1


def test_no_sample_of_an_evaluation_counts_twice() -> None:
    data = dataset(num_tokens=5 * SEQ_LEN + 1)
    data.check_epoch(5)
    with pytest.raises(
        BadInput, match=r"counting: an evaluation of eval.batches takes 6 samples of it, and it has 5 of seq_len 8"
    ):
        data.check_epoch(6)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match=r"token id 999 .* vocabulary of 999.* vocab >= 1000"):
        dataset(vocab=999)
    assert dataset(vocab=1000).vocab_needed == 1000


def test_the_fingerprint_tells_tokens_and_settings_apart() -> None:
    base = dataset().fingerprint
    assert base == dataset(seed=2, vocab=5000).fingerprint
    assert base != dataset(seq_len=9).fingerprint
    assert base != dataset(num_tokens=1001).fingerprint


def test_tokens_are_hashed_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds the hash, and a save must not wait for hundreds of megabytes to be read again."""
    data = dataset()
    found = data.fingerprint
    monkeypatch.setattr(stream_module, "fingerprint", None)
    assert data.fingerprint == found


def test_the_fingerprint_of_large_data_samples_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(fingerprint_module, "NUM_BLOCKS", 4)
    tokens = np.zeros(1000, dtype="<u2")
    changed = {position: tokens.copy() for position in (0, 100, 999)}
    for position, copy in changed.items():
        copy[position] = 1
    assert len({fingerprint(tokens), *map(fingerprint, changed.values())}) == 4
    monkeypatch.setattr(fingerprint_module, "WHOLE_BYTES", 100)
    sampled = fingerprint(tokens)
    assert fingerprint(changed[0]) != sampled
    assert fingerprint(changed[999]) != sampled
    assert fingerprint(changed[100]) == sampled, "position 100 lies in no block"
    assert fingerprint(tokens[:-1]) != sampled


def test_python_stdlib_is_text_of_documents() -> None:
    data = open_dataset(DataSpec(), Path(), seq_len=128, seed=1, vocab=272)
    assert 2**20 < data.num_tokens < 9 * 2**20
    assert data.end_of_document == 256
    assert data.vocab_needed == 257
    assert (data.streams[0].tokens == 256).sum() > 100
    start = bytes(data.streams[0].tokens[: int(np.argmax(data.streams[0].tokens == 256))].astype(np.uint8))
    compile(start, "first module", "exec")
    again = open_dataset(DataSpec(), Path("/"), seq_len=128, seed=2, vocab=300)
    assert again.fingerprint == data.fingerprint


def test_the_standard_library_is_kept_for_its_python_and_not_as_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_dataset(DataSpec(), tmp_path, seq_len=2, seed=1, vocab=257, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    save_tokenizer(tmp_path / "tokenizer.json")
    (source,) = text_sources(DataSpec(source="python-stdlib", tokenizer="tokenizer.json"), tmp_path)
    assert not source.is_cheap
    here = source.kept_in(tmp_path)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99")
    assert source.kept_in(tmp_path) != here


def test_bytes_need_a_vocabulary_of_257() -> None:
    with pytest.raises(BadInput, match="token id 256 does not exist in the model's vocabulary of 256"):
        open_dataset(DataSpec(), Path(), seq_len=128, seed=1, vocab=256)


def test_a_token_that_a_header_did_not_promise_is_refused_where_it_is_read() -> None:
    """On a GPU it would end in an opaque fault of the embedding."""
    lying = replace(dataset(num_tokens=1001).streams[0], max_token=500, vocab=1000)
    with pytest.raises(BadInput, match="token id 1000 does not exist in the model's vocabulary of 1000"):
        Dataset([lying]).samples(0, lying.num_windows, 0, lying.num_windows)
