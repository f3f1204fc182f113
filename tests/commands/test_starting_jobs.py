"""The jobs in configs/jobs to start from: every one loads and has a plan that fits; a laptop's defaults on devices are
warned of."""

import json
import shutil
from pathlib import Path

import pytest

from hethub.cli import run
from hethub.planner import plan
from hethub.runtime.launch.preflight import Facts
from hethub.runtime.loop.plan import left_at_defaults
from hethub.spec.job import load_job
from tests.support.job_files import write_job

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TO_START_FROM = ("two-racks", "continue-hf", "consumer-cards", "capacity-1t")
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "hidden_act": "silu",
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", TO_START_FROM)
def test_a_job_to_start_from_has_a_plan_that_fits(name: str, tmp_path: Path) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "my-llama").mkdir()
    (tmp_path / "my-llama" / "config.json").write_text(json.dumps(LLAMA))
    job = load_job(tmp_path / "configs" / "jobs" / f"{name}.yaml")
    assert job.cluster is not None
    constraints = job.spec.constraints.replace(time_limit_seconds=2)
    found = plan(job.model, job.cluster, job.spec.train.batch, constraints, with_bounds=False)
    assert found.prediction.fits
    assert set(found.plan.ranks) == set(range(job.cluster.size))


def test_a_laptops_defaults_on_devices_are_warned_of(tmp_path: Path) -> None:
    gpu = Facts(
        rank=0, host="nv0", local_rank=0, vendor="nvidia", device="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30,
        hethub="0.1.0", python="3.11.4", torch="2.13.0+cu130", byte_order="little", job="a1", tokens="b1",
    )  # fmt: skip
    cpu = Facts(**{**vars(gpu), "vendor": "cpu", "device": "CPU"})
    job = load_job(write_job(tmp_path))
    bare = job.spec.replace(train=type(job.spec.train)(), checkpoint=type(job.spec.checkpoint)())
    left = load_job(job.path)
    object.__setattr__(left, "spec", bare)
    told = left_at_defaults(left, [gpu, cpu])
    assert [text.split()[1] for text in told] == ["train.precision", "train.steps", "checkpoint.every_steps"]
    assert left_at_defaults(left, [cpu, cpu]) == []
    assert left_at_defaults(job, [gpu, gpu]) == []  # whose own these are


def test_tracebacks_that_launch_is_asked_for_are_its_ranks_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`launch --debug` showed those of its own alone, which has hardly any."""
    for given in ([], ["--debug"], ["--accept-changes"]):
        assert run(["launch", str(write_job(tmp_path)), "--dry-run", *given]) == 0
        told = capsys.readouterr().out
        assert [word for word in ("--debug", "--accept-changes") if word in told] == given
