"""Mistakes in data, evaluation, logs and the run folder: one paragraph from the command line that names key and file,
exit code 2, and nothing written."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hethub.runtime.run_claim import RunClaim
from tests.runtime.data.test_chat import CHAT, save_tokenizer
from tests.support.command import check_refused, files_below, ranks
from tests.support.job_files import ALONE, plan, write_job

TEXT = {"source": "text", "path": "text.txt"}
CHATS = {"source": "chat", "path": "chats.jsonl", "tokenizer": "tokenizer.json"}


def parquet(folder: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'hethub[data]'")
    tables = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'hethub[data]'")
    tables.write_table(arrow.table({"id": [1, 2], "content": ["one", "two"]}), folder / "web.parquet")


def lines(folder: Path) -> None:
    (folder / "web.jsonl").write_text(json.dumps({"content": "one"}) + "\n")


def no_template(folder: Path) -> None:
    save_tokenizer(folder, template=None)
    (folder / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")


def short(folder: Path) -> None:
    (folder / "held-out.txt").write_text("a few words that are held out, and not many more of them than that\n")


# Each: what is changed in the job, what lies beside it, and what the paragraph must say.
CASES: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "a column that parquet has not": (
        {"data": {"source": "parquet", "path": "web.parquet", "text": "contents"}}, parquet,
        ["web.parquet: has no column 'contents'", "did you mean 'content'", "`text` names its column"],
    ),
    "a key that lines have not": (
        {"data": {"source": "jsonl", "path": "web.jsonl"}}, lines,
        ["web.jsonl, line 1: the object has no key `text`; it has content", "In a job a source's `text` names another key"],
    ),
    "a column that is no text": (
        {"data": {"source": "parquet", "path": "web.parquet", "text": "id"}}, parquet,
        ["web.parquet: column 'id' holds int64, no text", "it has id, content"],
    ),
    "an empty mixture": (
        {"data": {"sources": []}}, None, ["job.yaml, line", "data.sources is []", "at least 1 item; add one"],
    ),
    "a weight of 0": (
        {"data": {"sources": [{**TEXT, "weight": 0}]}}, None,
        ["job.yaml, line", "data.sources[0].weight", "weight 0 gives no samples", "take the source out"],
    ),
    "an evaluation longer than its data": (
        {"eval": {"batches": 8, "data": {"source": "text", "path": "held-out.txt"}}}, short,
        ["held-out.txt", "takes 64 samples", "it has 2 of seq_len 32", "lower eval.batches"],
    ),
    "a sink that is not known": (
        {"log": {"tensorbord": True}}, None, ["job.yaml, line", "log.tensorbord is not a known key", "did you mean 'tensorboard'"],
    ),
    "a sink of another make": (
        {"log": {"mlflow": "ours"}}, None, ["job.yaml, line", "log.mlflow is not a known key", "tensorboard", "wandb"],
    ),
    "steps to trace that never come": (
        {"log": {"profile_steps": [5, 7]}}, None,
        ["job.yaml, line", "log.profile_steps is [5, 7]", "train.steps is 4", "name steps that are trained"],
    ),
    "a chat template that is missing": (
        {"data": CHATS}, no_template, ["tokenizer.json", "has none", "chat_template.jinja beside it", "tokenizer_config.json"],
    ),
}  # fmt: skip


def write(folder: Path, **job: Any) -> Path:
    nodes = [{"name": "here", "accelerator": "CPU-core", "accelerators": 1}]
    return write_job(folder / "job", cluster={"nodes": nodes}, plan_file=plan(ALONE), **job)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_paragraph_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    changes, beside, words = CASES[name]
    job = write(tmp_path, **changes)
    if beside is not None:
        beside(job.parent)
    before = set(files_below(tmp_path))
    paragraph = check_refused(ranks(1, "train", job, cwd=tmp_path), *words)
    assert paragraph[-1] in ".?"
    assert set(files_below(tmp_path)) == before


def test_a_run_folder_in_use_is_refused_with_its_owner(tmp_path: Path) -> None:
    job = write(tmp_path)
    claim = RunClaim()
    with claim:
        claim.take(tmp_path / "run")
        before = set(files_below(tmp_path))
        paragraph = check_refused(
            ranks(1, "train", job, "--run-dir", "run", cwd=tmp_path), f"process {os.getpid()}", "uses this run folder"
        )
        assert "--run-dir" in paragraph
        assert set(files_below(tmp_path)) == before
