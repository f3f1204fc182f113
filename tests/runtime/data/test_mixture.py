"""Weighted sources: each gives its share, and a run that goes on elsewhere neither skips a sample nor repeats one."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data.mixture import counts, draws, shares_of
from hethub.runtime.data.stream import Stream
from hethub.runtime.loop.read import open_data
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec, load_job
from tests.support.job_files import write_job

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)
SIZES, SEQ_LEN = (40, 7, 300), 4


@given(weights=WEIGHTS, num_samples=st.integers(1, 400))
def test_each_source_gives_its_share_at_every_moment(weights: list[float], num_samples: int) -> None:
    shares = shares_of(weights)
    sources, places = draws(np.arange(num_samples), shares)
    taken = [0] * len(weights)
    for number, (source, place) in enumerate(zip(sources.tolist(), places.tolist(), strict=True), 1):
        assert place == taken[source]  # one after the other, none left out
        taken[source] += 1
        assert counts(number, shares) == taken
        fair = [number * weight / sum(weights) for weight in weights]
        assert all(abs(own - due) <= len(weights) for own, due in zip(taken, fair, strict=True))


def test_the_first_source_takes_its_share_rounded() -> None:
    """A run that goes on counts on this very order: a quarter of n samples, rounded half up, grows at the 2nd, 6th and 10th."""
    sources, _ = draws(np.arange(10), shares_of([1, 3]))
    assert sources.tolist() == [1, 0, 1, 1, 1, 0, 1, 1, 1, 0]


def test_shares_stay_exact_after_billions_of_samples() -> None:
    shares = shares_of([0.7, 0.2, 0.1])
    first = 3 * 10**11
    sources, places = draws(np.arange(first, first + 1000), shares)
    before, after = counts(first, shares), counts(first + 1000, shares)
    for number in range(3):
        assert places[sources == number].tolist() == list(range(before[number], after[number]))
    assert before == pytest.approx([0.7 * first, 0.2 * first, 0.1 * first], rel=1e-6)


def mixed(*weights: float) -> Dataset:
    """Three sources of unlike length whose tokens say which source and window they are from."""
    streams = []
    for number, size in enumerate(SIZES):
        tokens = np.arange(size * SEQ_LEN + 1) // SEQ_LEN + 1000 * number
        streams.append(
            Stream(
                name=f"source {number}", tokens=tokens, seq_len=SEQ_LEN, seed=1, vocab=10**6, max_token=3000,
                end_of_document=None, tokenizer="none",
            )
        )  # fmt: skip
    return Dataset(streams, weights)


def windows(data: Dataset, step: int, batch: int) -> list[int]:
    """What names each sample of a step."""
    return data.samples(step, batch, 0, batch)[:, 0].tolist()


def test_a_run_resumed_five_times_takes_every_sample_once() -> None:
    """Another global batch each time, and another number of steps; the weights change once."""
    alone = mixed(0.5, 0.2, 0.3)
    whole = [windows(alone, step, 6) for step in range(200)]
    position, done, seen = (0, 0, 0), 0, []
    for batch, steps in [(6, 10), (4, 30), (10, 7), (1, 41), (25, 3), (6, 50)]:
        resumed = mixed(0.5, 0.2, 0.3)
        resumed.resume(done, position)
        seen += [name for step in range(done, done + steps) for name in windows(resumed, step, batch)]
        done += steps
        position = resumed.position(done, batch)
    assert seen == [name for step in whole for name in step][: len(seen)]  # as uninterrupted, in the same order
    assert sum(position) == len(seen)


def test_changed_weights_go_on_where_each_source_stopped() -> None:
    first, then = mixed(0.5, 0.2, 0.3), mixed(0.1, 0.1, 0.8)
    then.resume(20, first.position(20, 6))
    names = [name for step in range(20) for name in windows(first, step, 6)]
    names += [name for step in range(20, 60) for name in windows(then, step, 6)]
    taken = then.position(60, 6)
    assert sum(taken) == len(names)
    for number, size in enumerate(SIZES):
        found = Counter(name for name in names if name // 1000 == number)
        assert found.total() == taken[number]
        assert max(found.values()) - min(found.get(1000 * number + window, 0) for window in range(size)) <= 1
    share = then.position(60, 6)[2] - first.position(20, 6)[2]
    assert share == pytest.approx(0.8 * 240, abs=1)


def test_sources_of_all_kinds_are_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 400)
    (tmp_path / "b.jsonl").write_text('{"body": "' + "b" * 400 + '"}\n')
    sources = [
        {"source": "text", "path": "a.txt", "weight": 3},
        {"source": "jsonl", "path": "b.jsonl", "text": "body", "weight": 1},
    ]
    job = load_job(write_job(tmp_path / "job", data={"sources": [{**s, "path": f"../{s['path']}"} for s in sources]}))
    data = open_dataset(job.spec.data, job.base, seq_len=4, seed=1, vocab=257)
    first = data.samples(0, 40, 0, 40)[:, 0]
    assert Counter(first.tolist()) == {ord("a"): 30, ord("b"): 10}
    again = DataSpec.model_validate(job.spec.data.model_dump(mode="json"))  # as a run folder keeps it
    assert again == job.spec.data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"sources": []}, r"data\.sources is \[\], but it needs at least 1 item"),
        (
            {"sources": [{"source": "text", "path": "a", "weight": 0}]},
            r"data\.sources\[0\]\.weight: weight 0 gives no samples",
        ),
        ({"sources": [{"source": "text", "path": "a", "weight": -1}]}, "weight -1 gives no samples"),
        (
            {"sources": [{"source": "text", "path": "a"}], "source": "text", "path": "b"},
            r"line \d+: data\.source: `source` and `path` cannot stand beside `sources`. Take them .* take `sources` out",
        ),
        (
            {"sources": [{"source": "text", "path": "a"}], "path": "b"},
            r"data\.path: `path` cannot stand beside `sources`. Take it",
        ),
        ({"sources": [{"source": "text", "path": "a"}], "source": "text"}, r"data\.source: `source` cannot stand"),
        ({"sources": [{"source": "jsonl", "path": "a"}], "text": "body"}, r"data\.text: `text` cannot stand beside"),
        ({"sources": [{}], "source": "python-stdlib"}, r"data\.source: `source` cannot stand"),
        ({"sources": [{"source": "text", "path": "a"}] * 2}, "names text a twice"),
        ({"sources": [{"source": "text", "path": path} for path in ("a", "./a")]}, "names text a twice"),
        ({"sources": [{"source": "jsonl", "path": "a", "text": key} for key in (None, "text")]}, "jsonl a twice"),
        ({"source": "text", "path": "a", "text": "body"}, "source text has no columns"),
        ({"source": "parquet"}, r"path: source parquet needs one"),
        ({"sources": [{"source": "txt", "path": "a"}]}, r"data\.sources\[0\]\.source is 'txt'"),
    ],
)
def test_a_mixture_that_is_none_is_refused(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load_job(write_job(tmp_path, data=data))


def test_sources_of_unlike_tokenizers_are_refused(tmp_path: Path) -> None:
    from hethub.runtime.data.tokenise import tokenise
    from tests.runtime.data.test_sources import save_tokenizer

    (tmp_path / "a.txt").write_text("a b c a b c")
    tokenise([tmp_path / "a.txt"], str(save_tokenizer(tmp_path / "tokenizer.json")), tmp_path / "a.bin", progress=False)
    sources = [{"source": "text", "path": "a.txt"}, {"source": "tokens", "path": "a.bin"}]
    with pytest.raises(BadInput, match=r"a\.bin: these tokens were made with another tokenizer than those of .*a\.txt"):
        open_dataset(DataSpec(sources=sources), tmp_path, seq_len=2, seed=1, vocab=257)


def test_batches_are_what_is_asked_for_whoever_asks() -> None:
    data = mixed(0.5, 0.2, 0.3)
    for step in range(20):
        whole = data.samples(step, 9, 0, 9)
        assert all(
            np.array_equal(data.samples(step, 9, start, stop), whole[start:stop])
            for start, stop in pairwise((0, 2, 3, 9))
        )


def test_a_source_of_tiny_weight_still_gives_samples() -> None:
    assert shares_of([1e9, 10]) == [2**24 - 1]
    assert counts(2**25, shares_of([1e9, 10]))[1] == 2
    assert shares_of([10, 1e9]) == [1]
    assert counts(2**25, shares_of([10, 1e9])) == [2, 2**25 - 2]


def test_epochs_of_each_source_are_told_and_too_many_warned_of(tmp_path: Path) -> None:
    data = mixed(0.5, 0.25, 0.25)
    sizes = [stream.num_windows for stream in data.streams]
    assert data.epochs(100, 8) == [400 / sizes[0], 200 / sizes[1], 200 / sizes[2]]
    (tmp_path / "a.txt").write_text("x" * 320)
    job = load_job(write_job(tmp_path, data={"source": "text", "path": "a.txt"}, train={"steps": 6}))
    found = open_data(job, 257)
    windows = 320 // job.spec.train.seq_len
    epochs = 6 * job.spec.train.global_batch / windows
    notes, (warning,) = found.epochs(job.spec.train, 0)
    assert notes == [f"data: {6 * job.spec.train.global_batch} samples, {epochs:.3g} epochs of {tmp_path / 'a.txt'}"]
    assert warning.startswith(f"the job takes {epochs:.3g} epochs of {tmp_path / 'a.txt'}, which has {windows} samples")
    few = load_job(write_job(tmp_path, data={"source": "text", "path": "a.txt"}, train={"steps": 1, "global_batch": 8}))
    assert not open_data(few, 257).epochs(few.spec.train, 0)[1]


def test_epochs_of_a_resumed_run_count_its_steps_as_they_were_trained(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 320)  # ten samples
    job = load_job(
        write_job(tmp_path, data={"source": "text", "path": "a.txt"}, train={"steps": 6, "global_batch": 40})
    )
    resumed = open_data(job, 257)
    resumed.training.resume(5, resumed.training.position(5, 1))
    assert resumed.epochs(job.spec.train, 5)[0] == [f"data: 45 samples, 4.5 epochs of {tmp_path / 'a.txt'}"]
    assert resumed.epochs(job.spec.train, 9)[0] == [f"data: 165 samples, 16.5 epochs of {tmp_path / 'a.txt'}"]
