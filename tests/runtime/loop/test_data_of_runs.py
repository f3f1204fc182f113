"""Whole runs and their data: samples over five resumes, held-out losses, tokens made once a host, tokenizers that fit."""

import json
import math
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from hethub.runtime.checkpoint.record import LoopState
from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data.opening import overlap
from hethub.runtime.data.token_file import HEADER_BYTES
from hethub.runtime.data.tokenise import tokenise
from hethub.runtime.loop.trainer import TrainingRank
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec, TrainSpec
from tests.runtime.data.test_chat import CHAT, opened, save_tokenizer
from tests.support.command import Ended, check_refused, ranks
from tests.support.job_files import ALONE, OTHER_STAGES, STAGES, plan, write_job

SEQ_LEN = 32


def note_samples(rank: int) -> None:
    """Has a rank write down every sample that it embeds or takes the loss of."""
    from hethub.runtime.loop.batch_loader import BatchLoader

    load = BatchLoader.load

    def noted(loader: Any, step: int, microbatch: Any) -> Any:
        given = load(loader, step, microbatch)
        if loader._needs_tokens:
            with Path(f"samples-{rank}.jsonl").open("a") as file:
                for number, row in enumerate(given.tokens.tolist()):
                    file.write(json.dumps([step, microbatch.samples.start + number, row]) + "\n")
        return given

    BatchLoader.load = noted


def write_sources(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("".join(f"{number:07d}\n" for number in range(1000)))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"b{number:030d}"}) + "\n" for number in range(200)))
    sources = [
        {"source": "text", "path": "a.txt", "weight": 0.75},
        {"source": "jsonl", "path": "b.jsonl", "weight": 0.25},
    ]
    return {"sources": sources}


def resized(stages: list[dict[str, Any]], factor: int) -> list[dict[str, Any]]:
    """The same plan for `factor` times as many samples."""
    return [
        {**stage, "replicas": [{**each, "samples": factor * each["samples"]} for each in stage["replicas"]]}
        for stage in stages
    ]


def cluster(size: int) -> dict[str, Any]:
    nodes = [
        {"name": f"n{rank}", "accelerator": "CPU-core", "accelerators": 1, "gbps_per_nic": 8} for rank in range(size)
    ]
    return {"name": f"of {size}", "nodes": nodes}


PAIR = [{"layers": [[0, 4]], "replicas": [{"ranks": [r], "micro_batch": 2, "samples": 4} for r in range(2)], "zero": 1}]
# ranks, stages, samples of a step, and the step up to which it trains
LEGS = [
    (4, STAGES, 1, 3),
    (2, PAIR, 2, 5),
    (1, ALONE, 1, 6),
    (4, OTHER_STAGES, 3, 8),
    (2, PAIR, 1, 11),
    (1, ALONE, 2, 13),
]


def train(
    folder: Path, run: Path, size: int, stages: list[dict[str, Any]], factor: int, steps: int, **more: Any
) -> None:
    is_new = not run.exists()
    content = plan(resized(stages, factor), cluster=f"of {size}", global_batch=8 * factor)
    job = write_job(
        folder, cluster=cluster(size), plan_file=content, data=write_sources(folder),
        train={"steps": steps, "global_batch": 8 * factor}, **more,
    )  # fmt: skip
    for ended in ranks(size, "train", job, *resume_options(run, is_new), cwd=folder, hook=note_samples):
        assert ended.exit_code == 0, ended.stderr


def resume_options(run: Path, is_new: bool) -> list[Any]:
    return ["--run-dir", run] if is_new else ["--resume", run, "--accept-changes"]


@pytest.mark.parametrize(
    "legs", [pytest.param(LEGS, marks=pytest.mark.slow, id="five"), pytest.param([LEGS[0], LEGS[5]], id="one")]
)
def test_resumes_under_other_plans_and_batches_take_every_sample_once(legs: list[Any], tmp_path: Path) -> None:
    folder, run = tmp_path / "job", tmp_path / "run"
    seen: dict[tuple[int, int], list[int]] = {}
    for size, stages, factor, steps in legs:
        train(folder, run, size, stages, factor, steps)
        for path in folder.glob("samples-*.jsonl"):
            for line in path.read_text().splitlines():
                step, number, row = json.loads(line)
                assert seen.setdefault((step, number), row) == row  # both ends of the model, and all ranks, agree
            path.unlink()
    data = open_dataset(DataSpec(**write_sources(folder)), folder, seq_len=SEQ_LEN, seed=1, vocab=272)
    expected = Counter(map(tuple, data.batch(0, len(seen), 0, len(seen)).inputs.tolist()))
    ends = [0, *(steps for *_, steps in legs)]
    assert len(seen) == sum(
        8 * factor * (last - first) for (first, last), (_, _, factor, _) in zip(pairwise(ends), legs, strict=True)
    )
    assert Counter(map(tuple, seen.values())) == expected
    rates = [json.loads(line)["lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rates) == ends[-1]
    # Each leg has a later train.steps: the rate fell when the first one ended, and nothing lifted it.
    assert all(later <= earlier for earlier, later in pairwise(rates[1:]))
    assert rates[-1] == rates[2] < rates[1]


def evaluated(run: Path) -> dict[int, tuple[float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["eval_loss"], row["eval_perplexity"]) for row in rows if "eval_loss" in row}


def held_out_job(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "held-out.txt").write_text(
        "".join(f"{number} is a number that nobody trains on\n" for number in range(400))
    )
    settings = {"precision": "fp64", "steps": 3}
    return write_job(folder, train=settings, **more)


def test_a_run_is_evaluated_alike_under_another_plan(tmp_path: Path) -> None:
    evaluation = {"every_steps": 2, "batches": 3, "data": {"source": "text", "path": "held-out.txt"}}
    found = {}
    for name, size, stages in (("four", 4, STAGES), ("one", 1, ALONE)):
        job = held_out_job(
            tmp_path / name,
            cluster=cluster(size),
            plan_file=plan(stages, cluster=f"of {size}", precision="fp64"),
            eval=evaluation,
        )
        results = ranks(size, "train", job, "--run-dir", tmp_path / f"{name}-run", cwd=tmp_path)
        assert [ended.exit_code for ended in results] == [0] * size, results[0].stderr
        assert "step 2: held-out loss" in results[0].stdout
        assert "trained on too" not in results[0].stdout
        found[name] = evaluated(tmp_path / f"{name}-run")
    assert found["four"].keys() == {2, 3}  # and behind the last step
    for step, (loss, perplexity) in found["four"].items():
        assert loss == pytest.approx(found["one"][step][0], rel=1e-10)
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-12)


def one_process(folder: Path, **more: Any) -> list[Ended]:
    job = held_out_job(folder, cluster=cluster(1), plan_file=plan(ALONE, cluster="of 1", precision="fp64"), **more)
    return ranks(1, "train", job, "--run-dir", folder / "run", cwd=folder)


def test_an_evaluation_longer_than_its_data_is_refused(tmp_path: Path) -> None:
    evaluation = {"batches": 500, "data": {"source": "text", "path": "held-out.txt"}}
    check_refused(one_process(tmp_path, eval=evaluation), "held-out.txt", "takes 4,000 samples", "lower eval.batches")
    assert not (tmp_path / "run").exists()


def test_an_evaluation_on_training_data_is_warned_of(tmp_path: Path) -> None:
    (ended,) = one_process(tmp_path, eval={"data": {"source": "text", "path": "text.txt"}})
    assert ended.exit_code == 0, ended.stderr
    assert "warning: eval reads" in ended.stdout
    assert "text.txt, which is trained on too" in ended.stdout


def test_an_evaluation_on_a_copy_of_training_data_is_warned_of(tmp_path: Path) -> None:
    """It was known by its path alone; another file of the same size is none."""
    (tmp_path / "texts").mkdir()
    for name, number in (("a.txt", 1), ("b.txt", 2)):
        (tmp_path / "texts" / name).write_text(f"the number {number} is trained on\n" * 100)
    other = tmp_path / "other.txt"
    other.write_text("the number 3 is trained on\n" * 100)
    copy = Path(shutil.copy(tmp_path / "texts" / "b.txt", tmp_path / "copy.txt"))
    trained, *held_out = (DataSpec(source="text", path=str(path)) for path in (tmp_path / "texts", copy, other))
    assert overlap(trained, held_out[0], tmp_path) == f"{copy}, a copy of {tmp_path / 'texts' / 'b.txt'}"
    assert overlap(trained, held_out[1], tmp_path) is None


def count_encodings(rank: int) -> None:
    from hethub.runtime.data import opening

    keep = opening.keep

    def counted(source: Any, cache: Path, *more: Any) -> Path:
        if not source.kept_in(cache).exists():
            Path(f"encoded-by-{rank}").touch()
        return keep(source, cache, *more)

    opening.keep = counted
    from hethub.runtime.data import tokenise

    tokenise.keep, tokenise.SHOWN_BYTES = counted, 0


def test_one_rank_of_a_host_makes_the_tokens_and_shows_it(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=count_encodings)
    assert [ended.exit_code for ended in results] == [0] * 4, results[0].stderr
    assert [path.name for path in tmp_path.glob("encoded-by-*")] == ["encoded-by-0"]
    assert "text.txt" in results[0].stderr
    assert "(100 %)" in results[0].stderr
    assert not results[1].stderr


def dawdle(rank: int) -> None:
    """Makes tokens for longer than any rank would wait in a collective."""
    import time

    from hethub.runtime.loop import read

    make = read.tokenise_data

    def slowly(*arguments: Any, **more: Any) -> None:
        time.sleep(30)
        make(*arguments, **more)

    read.tokenise_data = slowly


def restored(data: Dataset, tokens: str, sources: tuple[str, ...] | None = None) -> list[str]:
    """The warnings of a rank that takes up a checkpoint whose data had the fingerprint `tokens`."""
    samples = (4,) * len(data.streams)
    state = LoopState(step=2, seed=1, tokens=tokens, loss_scale=1.0, good_steps=0, samples=samples, sources=sources)
    rank: Any = TrainingRank.__new__(TrainingRank)
    rank.layout, rank.dataset, rank.train, rank.warnings = None, data, TrainSpec(), []
    rank.loss_scale = SimpleNamespace()
    checkpoints: Any = SimpleNamespace(load=lambda *_: SimpleNamespace(extra=state, updates=2))
    assert rank.restore(checkpoints, Path("step-2")) == 2
    return rank.warnings


def test_a_run_of_an_earlier_version_goes_on_and_is_told_what_is_otherwise(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    chats = opened(tmp_path, [CHAT])
    (tmp_path / "a.txt").write_text("some text")
    spec = DataSpec(source="text", path="a.txt", tokenizer="tokenizer.json")
    text = open_dataset(spec, tmp_path, seq_len=4, seed=1, vocab=200)
    for data, warned in ((chats, True), (text, False)):
        (earlier,) = [stream.fingerprint(earlier=True) for stream in data.streams]
        assert earlier != data.fingerprint
        assert not restored(data, data.fingerprint)
        assert ["conversations are kept whole" in warning for warning in restored(data, earlier)] == [True] * warned
    with pytest.raises(BadInput, match=r"trained with tokens of .*a\.txt other.*data\.bos=false"):
        restored(text, "other")


def test_the_source_that_has_changed_since_a_checkpoint_is_named(tmp_path: Path) -> None:
    """Two hashes were told, of all sources together."""
    sources = [{"source": "text", "path": f"{name}.txt", "weight": 1} for name in "ab"]
    mixture = DataSpec.model_validate({"sources": sources})

    def of(text: str) -> Dataset:
        (tmp_path / "a.txt").write_text("some text")
        (tmp_path / "b.txt").write_text(text)
        return open_dataset(mixture, tmp_path, seq_len=4, seed=1, vocab=272)

    before, now = of("more text"), of("other text")
    assert not restored(before, before.fingerprint, before.fingerprints)
    with pytest.raises(BadInput, match=r"trained with tokens of [^ ]*/b\.txt [0-9a-f]+, the job has"):
        restored(now, before.fingerprint, before.fingerprints)
    with pytest.raises(BadInput, match=r"trained with tokens of [^ ]*/a\.txt and [^ ]*/b\.txt [0-9a-f]+, the job has"):
        restored(now, before.fingerprint)  # of a checkpoint from before that was kept
    mixture = mixture.model_copy(update={"sources": mixture.sources[::-1]})
    with pytest.raises(BadInput, match=r"tokens of the same sources in another order: [0-9a-f]+, the job has"):
        restored(of("more text"), before.fingerprint, before.fingerprints)
    mixture = DataSpec.model_validate({"sources": sources[:1]})
    with pytest.raises(BadInput, match=r"tokens of 2 sources where the job names 1: [0-9a-f]+, the job has"):
        restored(of("more text"), before.fingerprint, before.fingerprints)


def test_a_token_beyond_the_vocabulary_that_a_step_meets_fails_the_run(tmp_path: Path) -> None:
    """It ended with 2, as if nothing were written, and the folder was neither gone on in nor begun again."""
    data = {"source": "tokens", "path": "tokens.bin"}
    job = write_job(
        tmp_path / "job", cluster=cluster(1), plan_file=plan(ALONE, cluster="of 1"), data=data, checkpoint={"every_steps": 20}
    )  # fmt: skip
    file = tmp_path / "job" / "tokens.bin"
    tokenise([tmp_path / "job" / "text.txt"], "bytes", file, progress=False)
    whole = bytearray(file.read_bytes())
    (stream,) = open_dataset(DataSpec.model_validate(data), job.parent, seq_len=SEQ_LEN, seed=1, vocab=272).streams
    place = HEADER_BYTES + 2 * int(stream.starts(np.array([16]))[0])  # of the third step's first sample
    file.write_bytes(whole[:place] + b"\xff\xff" + whole[place + 2 :])
    again = ["train", job, "--run-dir", tmp_path / "run", "--resume", "auto"]
    (ended,) = ranks(1, *again, cwd=tmp_path)
    assert (ended.exit_code, len(ended.paragraphs)) == (75, 1)
    assert "token id 65535 does not exist in the model's vocabulary of 272" in ended.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    file.write_bytes(whole)
    (ended,) = ranks(1, *again, cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert "it begins again at step 1" in ended.stdout


@pytest.mark.slow
def test_making_tokens_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", communicator={"timeout_seconds": 20}, train={"steps": 1})
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=dawdle)
    assert [ended.exit_code for ended in results] == [0] * 4, results[0].stderr


def hugging_face_job(folder: Path, has_tokenizer: bool, **data: Any) -> Path:
    """A job that starts from a Hugging Face folder, with or without a tokenizer in it."""
    from tests.cli.test_hugging_face import folder_of
    from tests.runtime.data.test_sources import save_tokenizer

    folder.mkdir()
    folder_of(folder / "tiny")
    (folder / "words.txt").write_text("a b c a b " * 300)
    if has_tokenizer:
        save_tokenizer(folder / "tiny" / "tokenizer.json")
    job = write_job(folder, cluster=cluster(1), plan_file=plan(ALONE, cluster="of 1"), train={"steps": 1})
    content = {
        **yaml.safe_load(job.read_text()),
        "model": "hf:tiny",
        "data": {"source": "text", "path": "words.txt", **data},
    }
    job.write_text(yaml.safe_dump(content))
    return job


def test_the_tokenizer_of_the_hugging_face_folder_is_taken(tmp_path: Path) -> None:
    job = hugging_face_job(tmp_path / "own", has_tokenizer=True)
    (ended,) = ranks(1, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    kept = yaml.safe_load((tmp_path / "run" / "job.yaml").read_text())
    assert kept["data"]["tokenizer"] == str(tmp_path / "own" / "tiny" / "tokenizer.json")
    other = hugging_face_job(tmp_path / "other", has_tokenizer=True, tokenizer="bytes")
    check_refused(
        ranks(1, "train", other, "--run-dir", tmp_path / "run2", cwd=tmp_path),
        "another tokenizer than the folder's own",
    )
    none = hugging_face_job(tmp_path / "none", has_tokenizer=False)
    (ended,) = ranks(1, "train", none, "--run-dir", tmp_path / "run3", cwd=tmp_path)
    assert "has no tokenizer.json; whether its model was trained on tokens of bytes, nobody can tell" in ended.stdout
