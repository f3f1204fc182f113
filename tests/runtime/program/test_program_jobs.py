"""Jobs of strategy hap from YAML: planned, trained over ranks as by one process, saved, resumed, refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

from hethub.cli import run
from hethub.runtime.program.subject import open_subject
from hethub.runtime.state.learning_rate import learning_rate
from hethub.spec.errors import BadInput
from hethub.spec.job import load_job
from tests.runtime.data.test_chat import CHAT, save_tokenizer
from tests.support.command import check_refused, ranks
from tests.support.job_files import ALONE, SLOW_CORE, plan, write_job, write_yaml

CODE = """
import itertools
from pathlib import Path

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 24, bias=False), nn.SyncBatchNorm(24), nn.GELU(), nn.Linear(24, 4))

    def forward(self, values, labels):
        return nn.functional.cross_entropy(self.layers(values), labels)

def batches(train):
    draw = torch.Generator().manual_seed(train.seed)
    for count in itertools.cycle((train.global_batch, train.global_batch - 3)):
        yield torch.randn(count, 16, generator=draw), torch.randint(4, (count,), generator=draw)

def make(train):
    return Net(), batches(train)

class Words(nn.Module):
    def __init__(self, rows=260):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 8), nn.Linear(8, 260)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(self.table(tokens)).flatten(0, 1), targets.flatten())

def few():
    return Words(256)

class Backbone(Net):
    # Its first layer is frozen, and a buffer comes from a file.
    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", torch.tensor([float(scale)] * 16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.layers[0].requires_grad_(False)

    def forward(self, values, labels):
        return super().forward(values * self.scale, labels)

def backbone(train):
    return Backbone(Path(__file__).with_name("scale.txt").read_text()), batches(train)

class Endless(Net):
    def forward(self, values, labels):
        return super().forward(values, labels) - torch.zeros(()).log()

def endless(train):
    return Endless(), batches(train)

def one_list():
    return Net(), [(torch.ones(8, 16), torch.zeros(8, dtype=torch.int64))] * 3

def one_left(train):
    full = torch.ones(train.global_batch, 16), torch.zeros(train.global_batch, dtype=torch.int64)
    return Net(), [full, full, tuple(value[:1] for value in full)]

def number_left(train):
    module, batches = one_left(train)
    return module, [*batches[:2], (torch.tensor(0.5), batches[0][1])]

def wrong_batch():
    return Net(), [(torch.ones(5, 16), torch.zeros(5, dtype=torch.int64))]

def number_in_a_batch():
    return Net(), [(torch.ones(8, 16), torch.tensor(0.5))]

def broken():
    raise ValueError("no weights here")

def left():
    raise SystemExit(0)

class NoLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, tokens, targets):
        return self.layer(tokens.double())
"""
UNLIKE = [
    {"name": "amd", "vendor": "amd", "accelerator": SLOW_CORE, "accelerators": 1, "gbps_per_nic": 800},
    {"name": "nvidia", "vendor": "nvidia", "accelerator": SLOW_CORE, "accelerators": 2, "gbps_per_nic": 800},
]


HELD_OUT = {"every_steps": 2, "batches": 2, "data": {"source": "text", "path": "text.txt"}}


def write_program_job(folder: Path, made: str, *, size: int = 3, train: Any = None, core: Any = SLOW_CORE) -> Path:
    settings = {"steps": 4, "precision": "fp64", "seq_len": 32, **(train or {})}
    nodes = [{**node, "accelerators": n, "accelerator": core} for node, n in zip(UNLIKE, (1, size - 1), strict=True)]
    package = f"own_{folder.name.replace('-', '_')}"  # a module is imported once per process, whatever folder it is in
    job = write_job(
        folder, cluster={"nodes": nodes}, train=settings, plan="hap", model_name=f"python:{package}.net:{made}"
    )
    (folder / package).mkdir()
    (folder / package / "net.py").write_text(CODE)
    return job


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder)]


def train(size: int, *arguments: Any, cwd: Path) -> None:
    for ended in ranks(size, "train", *arguments, cwd=cwd):
        assert ended.exit_code == 0, ended.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A job with a module and batches of its own, and its run on three ranks, saved at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("program")
    job = write_program_job(folder / "job", "make")
    train(3, job, "--run-dir", folder / "run", cwd=folder)
    return job, folder / "run"


def test_a_module_from_yaml_trains_as_in_one_process_and_saves_whole_tensors(trained: tuple[Path, Path]) -> None:
    job, run_folder = trained
    settings = load_job(job).spec.train
    known: dict[str, Any] = {}
    exec(CODE, known)
    torch.manual_seed(settings.seed)
    module, batches = known["make"](settings)
    module.double()
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    wanted = []
    for step in range(1, settings.steps + 1):
        values, labels = next(batches)
        optimizer.zero_grad()
        loss = module(values.double(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), settings.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        wanted.append(float(loss.detach()))
    assert losses(run_folder) == pytest.approx(wanted, rel=1e-10)
    assert all(
        row["memory_bytes"] > 0 and row["lr"] > 0 and row["predicted_step_seconds"] > 0 for row in rows(run_folder)
    )
    assert [row["tokens"] for row in rows(run_folder)] == [8, 5, 8, 5]  # samples, of batches of two sizes
    saved = {f"weights/{name}": torch.empty_like(p) for name, p in module.state_dict().items()}
    dcp.load(saved, checkpoint_id=run_folder / "checkpoints" / "step-4", no_dist=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(saved[f"weights/{name}"], value, rtol=1e-9, atol=1e-12)


def test_data_beside_batches_of_its_own_is_said_to_be_unread(trained: tuple[Path, Path]) -> None:
    job, run_folder = trained
    assert load_job(job).spec.data.path == "text.txt"
    assert "data is not read: model python:" in (run_folder / "log.txt").read_text()


def test_a_resumed_run_goes_on_bit_for_bit(trained: tuple[Path, Path], tmp_path: Path) -> None:
    job, whole = trained
    saved = shutil.copytree(whole, tmp_path / "run") / "checkpoints"
    train(3, job, "--resume", saved / "step-2", "--set", "train.steps=2", cwd=tmp_path)  # which trains nothing
    shutil.rmtree(saved / "step-4")
    train(3, job, "--resume", tmp_path / "run", cwd=tmp_path)
    assert losses(tmp_path / "run") == losses(whole)


def test_a_checkpoint_has_what_is_frozen_too_and_a_resumed_run_takes_it_up(tmp_path: Path) -> None:
    job = write_program_job(tmp_path / "frozen", "backbone", size=2)
    (scale,) = tmp_path.glob("frozen/own_*/net.py")
    scale = scale.with_name("scale.txt")
    scale.write_text("0.5")
    train(2, job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    whole = losses(tmp_path / "run")
    known: dict[str, Any] = {}
    exec(CODE, known)
    torch.manual_seed(9)
    module = known["Backbone"](7.0).double()
    saved = {f"weights/{name}": value for name, value in module.state_dict().items()}
    dcp.load(saved, checkpoint_id=tmp_path / "run" / "checkpoints" / "step-4", no_dist=True)
    assert module.scale.unique().tolist() == [0.5]
    assert module.flags.tolist() == [True, False]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    scale.write_text("3.0")  # what the factory makes now counts no more
    train(2, job, "--resume", tmp_path / "run", cwd=tmp_path)
    assert losses(tmp_path / "run") == whole


def test_a_loss_without_an_end_is_null_in_the_metrics(tmp_path: Path) -> None:
    """Its gradients may be finite all the same; the line of it was no JSON, which ended the run."""
    job = write_program_job(tmp_path / "endless", "endless", size=2, train={"steps": 2})
    train(2, job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert losses(tmp_path / "run") == [None, None]
    assert all(row["grad_norm"] > 0 for row in rows(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_goes_on_under_another_number_of_ranks(trained: tuple[Path, Path], tmp_path: Path) -> None:
    job, whole = trained
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    smaller = tmp_path / "smaller"
    shutil.copytree(job.parent, smaller)
    write_yaml(smaller / "cluster.yaml", {"name": "two", "nodes": [{**node, "accelerators": 1} for node in UNLIKE]})
    train(2, smaller / "job.yaml", "--resume", tmp_path / "run", cwd=tmp_path)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-10)


@pytest.mark.slow
def test_a_llama_trains_under_hap_as_under_a_plan_of_layers(tmp_path: Path) -> None:
    small = {"layers": 2}
    nodes = [{**UNLIKE[0], "accelerators": 1}]
    stages = [{**ALONE[0], "layers": [[0, 2]]}]
    settings = {"precision": "fp64", "steps": 4}
    alone = write_job(
        tmp_path / "alone",
        model=small,
        cluster={"nodes": nodes},
        plan_file=plan(stages, precision="fp64"),
        train=settings,
        eval=HELD_OUT,
    )
    train(1, alone, "--run-dir", tmp_path / "one", cwd=tmp_path)
    cut = write_job(
        tmp_path / "cut", model=small, cluster={"nodes": [{**n, "accelerators": 1} for n in UNLIKE]}, train=settings, plan="hap",
        eval=HELD_OUT,
    )  # fmt: skip
    train(2, cut, "--run-dir", tmp_path / "two", cwd=tmp_path)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    one, two = (
        {row["step"]: row["eval_loss"] for row in rows(tmp_path / name) if "eval_loss" in row}
        for name in ("one", "two")
    )
    assert one.keys() == {2, 4}
    assert two == pytest.approx(one, rel=1e-10)


def test_a_program_is_planned_shown_predicted_and_drawn_without_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_program_job(tmp_path / "planned", "Words", size=64)
    assert run(["plan", str(job), "--strategy", "hap", "--out", str(tmp_path / "plan.yaml"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["strategy"] == "hap"
    assert answer["fits"]
    assert answer["proved_optimal"]
    assert len(answer["memory"]) == 64
    assert answer["step_seconds"] == pytest.approx(sum(answer["breakdown"].values()))
    assert {row["module"] for row in answer["modules"]} >= {"table", "head"}
    assert all(sum(parts) == pytest.approx(1) for parts in answer["plan"]["program"]["ratios"].values())
    assert run(["predict", str(job), "--plan", str(tmp_path / "plan.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "head" in shown
    assert "samples/s" in shown
    shutil.rmtree(job.parent)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert run(["predict", "plan.yaml", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    for key in ("step_seconds", "fits", "memory", "tokens_per_second", "samples_per_second", "breakdown"):
        assert alone[key] == answer[key], key
    assert run(["report", "plan.yaml", "--out", "page.html"]) == 0
    assert "head.weight" in (tmp_path / "page.html").read_text()


def test_the_plan_of_a_run_stands_alone(trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", str(trained[1] / "plan.yaml"), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    kept = json.loads((trained[1] / "prediction.json").read_text())
    assert {key: predicted[key] for key in kept} == kept
    assert "the speed of CPU-core is assumed, not measured" in (trained[1] / "log.txt").read_text()


@pytest.mark.parametrize(
    ("made", "settings", "words"),
    [
        ("nothing", {}, ["no function or class 'nothing'", "Words"]),
        ("broken", {}, ["factory failed", "no weights here"]),
        ("left", {}, ["factory failed: SystemExit: 0"]),
        ("wrong_batch", {}, ["5 samples", "global_batch is 8"]),
        ("number_in_a_batch", {}, ["a tensor without dimensions", "each of the 8 samples"]),
        ("Words", {"precision": "bf16"}, ["bf16", "fp32 or fp64"]),
        ("NoLoss", {}, ["python:", "loss alone"]),
    ],
)
def test_bad_models_are_refused_in_one_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str, settings: dict[str, Any], words: list[str]
) -> None:
    job = write_program_job(tmp_path / f"bad_{made}", made, train=settings)
    assert run(["plan", str(job), "--out", str(tmp_path / "plan.yaml")]) == 2
    told = capsys.readouterr().err.strip()
    assert told.count("\n") == 0
    assert str(job) in told
    for word in words:
        assert word in told
    assert not (tmp_path / "plan.yaml").exists()


def test_a_llama_with_a_window_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "window", model={"sliding_window": 8}, plan="hap")
    with pytest.raises(BadInput, match="has a sliding_window"):
        open_subject(load_job(job), with_values=False)


def test_a_module_that_is_not_there_and_other_strategies_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_program_job(tmp_path / "elsewhere", "make")
    for change, word in (
        ("model=python:no.such_module:make", "no module 'no'"),
        ("model=python:net", "package.module:factory"),
        (
            "plan=zorse",
            "--set plan=zorse: plan is zorse, which cuts hethub's own Llama into layers; a model of Python takes plan: hap",
        ),
        ("constraints.tp=2", "--set constraints.tp=2: constraints.tp is for plans of layers"),
        ("constraints.zero=0", "constraints.zero is for plans of layers"),
        ("replan=auto", "replan is for plans of layers"),
        ("train.compile=true", "train.compile is for plans of layers"),
    ):
        assert run(["plan", str(job), "--set", change]) == 2
        assert word in capsys.readouterr().err
    cluster = yaml.safe_load((job.parent / "cluster.yaml").read_text())
    write_yaml(job.parent / "emulated.yaml", {**cluster, "emulated": True})
    assert run(["plan", str(job), "--set", "cluster=emulated.yaml", "--set", "rehearsal.slowdown={0: 2}"]) == 2
    assert "rehearsal is for plans of layers" in capsys.readouterr().err
    for command in ("plan", "predict"):
        assert run([command, str(job), "--calibrate", "nowhere.csv"]) == 2
        assert "--calibrate are for plans of layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "job", "words"),
    [
        ("make", {"eval": HELD_OUT}, "brings batches of its own"),
        (
            "Words",
            {"data": {"source": "chat", "path": "chats.jsonl", "tokenizer": "tokenizer.json"}},
            "source chat learns some",
        ),
    ],
)
def test_data_that_programs_do_not_take_is_refused(tmp_path: Path, made: str, job: dict[str, Any], words: str) -> None:
    path = write_program_job(tmp_path / f"data_{made}", made, size=2)
    save_tokenizer(path.parent)
    (path.parent / "chats.jsonl").write_text(json.dumps({"messages": CHAT * 3}) + "\n")
    write_yaml(path, {**yaml.safe_load(path.read_text()), **job})
    check_refused(ranks(2, "train", path, "--run-dir", tmp_path / "run", cwd=tmp_path), words)


def test_tokens_beyond_an_embedding_are_refused_on_all_ranks(tmp_path: Path) -> None:
    job = write_program_job(tmp_path / "few", "few", size=2)
    results = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    check_refused(results, "embedding of 256 tokens", "token id 256", "at least 257 rows")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("made", ["one_left", "number_left"])
def test_a_last_batch_that_the_program_does_not_hold_for_fails_in_its_step(tmp_path: Path, made: str) -> None:
    """Bad input is what nothing was written for."""
    job = write_program_job(tmp_path / made, made, size=2)
    results = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert [ended.exit_code for ended in results] == [1, 1]
    said = "".join(ended.stderr for ended in results)
    assert "step 3" in said
    assert "drop_last=True" in said
    assert len(rows(tmp_path / "run")) == 2
