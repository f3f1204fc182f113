"""Plan, run, calibrate by what the run wrote, plan again: on emulated ranks that are not as fast as the catalogue says."""

import json

import pytest

import hethub
from hethub.cli import run
from hethub.planner import plan
from hethub.predictor import predict
from hethub.predictor.cost.profile import ProfileSpec, load_profile
from hethub.predictor.cost.profiled_layer import estimated_device
from hethub.spec.job import load_job
from hethub.spec.layout.bind import bind
from hethub.spec.plan import load_plan, save_plan
from tests.support.command import ranks
from tests.support.job_files import write_job

NODES = [
    {"name": "a", "accelerator": "T4", "accelerators": 2, "nics": 1, "gbps_per_nic": 100},
    {"name": "b", "accelerator": "V100-PCIe-16GB", "accelerators": 2, "nics": 1, "gbps_per_nic": 100},
]
TRUE = {"T4": 1.0, "V100-PCIe-16GB": 1.86}  # 30 % above and 30 % below 1.43 times what the catalogue says
SLOWDOWN = {2: 1.86, 3: 1.86}


def measured_seconds(run):
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    settled = sorted(step["step_seconds"] for step in steps[2:])
    return settled[len(settled) // 2]


@pytest.mark.slow
def test_the_second_prediction_and_the_second_plan_hold(tmp_path, capsys):
    job = write_job(
        tmp_path / "job", model={"hidden": 64, "ffn": 176, "heads": 4, "kv_heads": 2},
        cluster={"name": "unlike", "emulated": True, "nodes": NODES}, train={"steps": 6, "global_batch": 24},
        plan="auto", rehearsal={"slowdown": SLOWDOWN}, checkpoint={"every_steps": None, "keep": 1},
    )  # fmt: skip
    runs, spec = [], load_job(job)
    cluster, batch = spec.cluster, spec.spec.train.batch
    calibration = None
    for name in ("first", "second"):
        found = plan(spec.model, cluster, batch, with_bounds=False, profile=calibration)
        runs.append(found)
        path = tmp_path / f"{name}.yaml"
        save_plan(found.plan, path)
        ended = ranks(4, "train", job, "--plan", path, "--run-dir", tmp_path / name, cwd=tmp_path)
        assert [end.exit_code for end in ended] == [0] * 4, ended[0].stderr
        calibration = load_profile(tmp_path / name / "calibration.json")
    first, second = (measured_seconds(tmp_path / name) for name in ("first", "second"))
    assert runs[0].prediction.step_seconds < 0.85 * first  # the catalogue is wrong
    assert runs[1].prediction.step_seconds == pytest.approx(second, rel=0.05)
    own = bind(load_plan(tmp_path / "first.yaml"), spec.model, cluster)
    calibrated = load_profile(tmp_path / "first" / "calibration.json")  # by the run itself, its slow ranks' updates too
    assert predict(own, profile=calibrated).step_seconds == pytest.approx(first, rel=0.05)
    named = ["--plan", tmp_path / "second.yaml", "--calibrate", tmp_path / "first" / "calibration.json", "--json"]
    capsys.readouterr()
    assert run(["predict", str(job), *map(str, named)]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(runs[1].prediction.step_seconds)
    true = true_profile(spec)
    best = plan(spec.model, cluster, batch, with_bounds=False, profile=true).prediction.step_seconds
    again = predict(bind(load_plan(tmp_path / "second.yaml"), spec.model, cluster), profile=true).step_seconds
    assert again < 1.03 * best


def true_profile(job):
    """The speeds that the ranks really have."""
    sequences, seq_len, precision = job.spec.train.batch
    devices = {node.device.name: node.device for node in job.cluster.nodes}
    own = [
        estimated_device(job.model, device, seq_len, precision, sequences).slower(TRUE[name])
        for name, device in devices.items()
    ]
    about = {"date": "", "hethub": hethub.__version__, "software": "test"}
    return ProfileSpec(**about, model=job.model, devices=tuple(own))
