"""The examples of docs/any-model.md run as a user would start them, and train what one process trains."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.command import ranks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "any-model.md"
CLUSTER = """
name: two makers
emulated: true
nodes:
  - {name: a, vendor: amd, accelerator: CPU-core, accelerators: 1, gbps_per_nic: 8}
  - {name: b, vendor: nvidia, accelerator: CPU-core, accelerators: 1, gbps_per_nic: 8}
"""
ONE_PROCESS = """
torch.manual_seed(0)
module, inputs = Net(), (torch.randn(32, 16), torch.randint(4, (32,)))
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
for _ in range(10):
    optimizer.zero_grad()
    loss = module(*inputs)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_documents_example_trains(tmp_path: Path) -> None:
    script = DOCUMENT.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss (\d+\.\d{4})", done.stdout)  # two ranks write at once: lines may run together
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert "ms a step" in done.stdout
    known: dict[str, object] = {}
    before_groups = script.split("dist.init_process_group")[0]
    exec(before_groups + ONE_PROCESS, known)
    state = torch.load(tmp_path / "net.pt")
    for name, value in known["module"].state_dict().items():  # type: ignore[attr-defined]
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_the_documents_job_trains(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split("## From a job file")[1]
    (tmp_path / "net.py").write_text(text.split("```python\n")[1].split("```")[0], encoding="utf-8")
    (tmp_path / "job.yaml").write_text(text.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    for ended in ranks(2, "train", "job.yaml", "--run-dir", "run", cwd=tmp_path):
        assert ended.exit_code == 0, ended.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 20
    known: dict[str, Any] = {}
    exec((tmp_path / "net.py").read_text(encoding="utf-8"), known)
    torch.manual_seed(1)
    module, batches = known["make"](SimpleNamespace(seed=1, global_batch=32))
    assert losses[0] == pytest.approx(float(module(*next(batches)).detach()), rel=1e-5)
