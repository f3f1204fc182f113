"""What a factory of the user's gives: its module in the job's precision, and its batches, whose faults are said in a paragraph."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hethub.cli import run
from hethub.runtime.program.subject import Batches, open_subject
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import load_job
from tests.support.job_files import write_job

CODE = """
import torch
from torch import nn

class Turned(nn.Module):
    def __init__(self, trained=False):
        super().__init__()
        turns = torch.polar(torch.ones(4), torch.arange(4.0))
        self.layer = nn.Linear(4, 4)
        self.turns = nn.Parameter(turns) if trained else nn.Buffer(turns)

    def forward(self, values):
        return (self.layer(values) * self.turns).imag.square().mean()

def buffer():
    return Turned(), [(torch.ones(8, 4) * 2j,)]

def talking():
    print("a layer is made")
    return nn.Sequential(nn.Linear(4, 4), Turned()), [(torch.ones(8, 4),)]

def parameter():
    return Turned(trained=True), [(torch.ones(8, 4),)]
"""


def job(folder: Path, made: str) -> Path:
    package = f"own_{folder.name.replace('-', '_')}"  # a module is imported once per process, whatever folder it is in
    path = write_job(
        folder, plan="hap", model_name=f"python:{package}:{made}", train={"precision": "fp64", "global_batch": 8}
    )
    (folder / f"{package}.py").write_text(CODE)
    return path


def test_complex_numbers_stay_complex_in_the_jobs_precision(tmp_path: Path) -> None:
    """A module's own `.to` takes their real parts, and a rotary table turns nothing any more."""
    subject = open_subject(load_job(job(tmp_path / "buffer", "buffer")), with_values=True)
    turns = subject.module.turns
    assert isinstance(turns, torch.Tensor)
    assert turns.dtype == torch.complex128
    torch.testing.assert_close(turns.angle(), torch.arange(4.0, dtype=torch.float64), atol=1e-6, rtol=0)
    assert subject.example[0].dtype == torch.complex128
    assert subject.module.layer.weight.dtype == torch.float64
    with pytest.raises(BadInput, match=r"'turns' is complex.*view_as_complex"):
        open_subject(load_job(job(tmp_path / "parameter", "parameter")), with_values=True)


def test_what_the_users_code_prints_is_no_part_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(job(tmp_path / "talking", "talking")), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["strategy"] == "hap"
    assert told.err == "a layer is made\n"


def failing(after: int) -> Iterator[tuple[torch.Tensor]]:
    yield from [(torch.ones(2),)] * after
    raise FileNotFoundError("no such picture")


def test_batches_that_fail_are_bad_input_before_the_first_step_and_a_failed_run_after_it() -> None:
    with pytest.raises(BadInput, match="net: its batches failed: FileNotFoundError: no such picture"):
        Batches(failing(0), torch.float32, "net")
    with pytest.raises(BadInput, match="are empty"):
        Batches([], torch.float32, "net")
    with pytest.raises(BadInput, match="hold an empty tuple; put the tensors that forward takes into it"):
        Batches([()], torch.float32, "net")
    with pytest.raises(BadInput, match="hold str"):
        Batches([("a",)], torch.float32, "net")
    given = Batches(failing(2), torch.float32, "net")
    assert given.at(2)[0].tolist() == [1.0, 1.0]
    with pytest.raises(RunFailed, match="net: before step 3 its batches failed: FileNotFoundError"):
        given.at(3)
    with pytest.raises(RunFailed, match=r"before step 3 its batches ended; lower train\.steps"):
        Batches(iter([(torch.ones(2),)] * 2), torch.float32, "net").at(3)
    assert Batches([(torch.ones(2),), (torch.zeros(2),)], torch.float32, "net").at(3)[0].tolist() == [1.0, 1.0]


def test_a_module_without_values_is_planned_and_not_trained(tmp_path: Path) -> None:
    """It ended in torch's NotImplementedError on every rank."""
    path = write_job(tmp_path / "unfilled", plan="hap", model_name="python:unfilled:make")
    (path.parent / "unfilled.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(4, 4, device='meta')\n"
    )
    job = load_job(path)
    assert open_subject(job, with_values=False).module.weight.is_meta
    with pytest.raises(BadInput, match=r"unfilled:make: 'weight' has no values \(device 'meta'\).*on the CPU"):
        open_subject(job, with_values=True)
