"""`hethub doctor --acceptance`: on CPUs everything runs but the rows of devices, which say why; what is wrong is told."""

import gc
import json
import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

import torch

from hethub.cli import run
from hethub.kernels import bodies
from hethub.kernels.device import Device
from hethub.runtime.acceptance import acceptance, staging, start, training
from hethub.runtime.acceptance.start import environments
from hethub.runtime.acceptance.training import LLAMA_1B, subject_for
from hethub.runtime.launch import launcher_environment
from hethub.runtime.launch.launcher_environment import launch_info
from hethub.runtime.launch.session import session
from hethub.runtime.measure.profile_run import subject_of
from hethub.runtime.parity.row import Row
from hethub.spec.accelerator import find_accelerator
from hethub.spec.job import load_job
from tests.support.command import hethub
from tests.support.job_files import write_job

needs_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


def check_rows(told: dict[str, Any], *, on_devices: bool) -> dict[str, dict[str, Any]]:
    rows = {row["what"]: row for row in told["rows"]}
    assert [row for row in told["rows"] if row["state"] == "fail"] == []
    assert {
        "collectives",
        "large collectives",
        "messages",
        "layer",
        "head",
        "optimizer step",
        "the same bits twice",
    } <= rows.keys()
    skipped = {row["what"] for row in told["rows"] if row["state"] == "skipped"}
    if not on_devices:
        assert skipped == {
            "device", "staging", "memory by the allocator", "1 B parameters, MFU", "bridge between NCCL or RCCL and CPUs",
        }  # fmt: skip
    assert all(row["reason"] for row in told["rows"] if row["state"] in ("skipped", "note"))
    return rows


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_cpus_all_but_the_devices_rows_are_run(tmp_path: Path) -> None:
    out = tmp_path / "acceptance.json"
    ended = hethub("doctor", "--acceptance", "--json", "--out", out, cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told == json.loads(out.read_text())
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
    rows = check_rows(told, on_devices=False)
    assert {row["where"] for row in told["rows"] if row["what"] == "collectives"} == {
        "all islands, bridged",
        "island 0",
    }
    assert rows["collectives"]["state"] == rows["messages"]["state"] == rows["layer"]["state"] == "pass"
    assert rows["the same bits twice"]["state"] == "pass"
    assert 0 < rows["memory, ZeRO-3 over 2"]["figures"]["share_of_prediction"] < 2
    assert rows["training"]["figures"].keys() == {"step_seconds", "plain_step_seconds", "ratio"}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(3000)
@needs_a_device
def test_on_devices_everything_is_run(tmp_path: Path) -> None:
    ended = hethub("doctor", "--acceptance", "--json", cwd=tmp_path, hang_seconds=2900)
    assert ended.exit_code == 0, ended.stderr
    rows = check_rows(json.loads(ended.stdout), on_devices=True)
    assert rows["copies to the host"]["state"] in ("pass", "note")


def test_ranks_that_hethub_starts_see_the_devices_and_the_last_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    places = environments(2, 2)
    assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["0,1", "0,1", "", ""]
    assert len({place["MASTER_PORT"] for place in places}) == len({place["HETHUB_TOKEN"] for place in places}) == 1
    assert not any("OMPI_COMM_WORLD_RANK" in place for place in places)
    assert environments(0, 3, ((0, 1), (2,)))[2]["HETHUB_ISLANDS"] == "0,1|2"


class Card:
    """A device by its memory alone."""

    def __init__(self, gbytes: int) -> None:
        self._bytes = gbytes * 2**30

    def memory_bytes(self) -> int:
        return self._bytes

    def supports(self, dtype: torch.dtype) -> bool:
        return True


@pytest.mark.parametrize(("gbytes", "layers"), [(80, 16), (24, 7)])
def test_a_small_card_trains_fewer_layers(gbytes: int, layers: int) -> None:
    subject: Any = subject_for(Card(gbytes))  # type: ignore[arg-type]
    assert (subject.model.layers, subject.steps, subject.seq_len) == (layers, 20, 4096)
    assert subject.model.replace(layers=16) == LLAMA_1B


def test_a_card_without_bf16_is_held_to_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """V100 and T4 emulate it."""
    card: Any = PaidCopies(16)
    assert subject_of(None, card).train.precision == subject_for(card).precision == "bf16"
    monkeypatch.setattr(Card, "supports", lambda card, dtype: dtype != torch.bfloat16)
    assert subject_of(None, card).train.precision == subject_for(card).precision == "fp16"


def test_two_ranks_on_one_device_fail() -> None:
    ranks = [{"rank": rank, "identity": "GPU-0", "device": "card", "memory_bytes": 2**30} for rank in range(2)]
    rows = list(acceptance._identity(ranks))
    assert [row.state for row in rows] == ["fail", "fail"]
    assert rows[0].reason == "ranks [0, 1] drive one device"


def test_a_part_that_breaks_is_a_row_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "run", lambda words, places, **options: (1, "", "Traceback\nCUDA out of memory"))
    rows = [row for row in acceptance._training() if row.state == "fail"]
    assert [row.reason for row in rows] == ["exit code 1: CUDA out of memory"] * 3


def test_rows_are_found_beside_what_nccl_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL_DEBUG has it write to standard output."""
    said = 'host:1 NCCL INFO cudaDriverVersion 13000\n[{"what": "speed", "where": "card", "state": "pass"}]\nhost:1 NCCL INFO done\n'
    monkeypatch.setattr(acceptance, "run", lambda words, places, **options: (0, said, ""))
    assert [row.state for row in acceptance._training() if row.what == "speed"] == ["pass"] * 3


def test_a_rank_with_much_to_say_holds_nobody_up(tmp_path: Path) -> None:
    """More than a pipe takes, while the first rank waits for it."""
    said = tmp_path / "said"
    code = (
        "import os, sys, time\n"
        f"if os.environ['RANK'] == '1': sys.stderr.write('x' * 10**6); open({str(said)!r}, 'w')\n"
        f"while not os.path.exists({str(said)!r}): time.sleep(0.01)"
    )
    code_of_exit, _, errors = start.run(
        ["timeit", "-n1", "-r1", code], [{**os.environ, "RANK": str(rank)} for rank in range(2)], timeout_seconds=30
    )
    assert (code_of_exit, len(errors)) == (0, 10**6)


@pytest.mark.parametrize("compiles", [None, True, False])
def test_the_layer_of_a_job_is_compared_as_the_job_runs_it(
    compiles: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bool] = []
    monkeypatch.setattr(bodies._Choice, "compiles", None)
    monkeypatch.setattr(
        acceptance, "check_device", lambda *given, **more: compared.append(bodies.compiles_on(torch.device("cpu")))
    )
    job = load_job(write_job(tmp_path, train={"compile": compiles}))
    acceptance._parity(SimpleNamespace(device=Device(vendor="cpu")), job, lambda what: None)  # type: ignore[arg-type]
    assert compared == [bool(compiles)]


def test_the_first_of_two_runs_is_gone_before_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a device's memory is a run's to take; weights and gradients go with a collection of cycles only."""
    before: list[Any] = []
    make = training.make_trainer

    def make_trainer(*given: Any) -> Any:
        assert not any(reference() for reference in before)
        trainer = make(*given)
        before.append(weakref.ref(trainer.storage.grads))
        return trainer

    monkeypatch.setattr(training, "make_trainer", make_trainer)
    gc.disable()  # as it may well be that it does not come by itself
    try:
        with session(None) as (world, cluster):
            [row] = training.repeats(world, cluster)
    finally:
        gc.enable()
    assert (row.state, len(before)) == ("pass", 2)


@pytest.mark.parametrize(("again", "state"), [(11.9, "pass"), (11.9001, "note"), (11.0, "fail"), (math.nan, "fail")])
def test_losses_that_no_order_of_sums_explains_are_no_note(
    again: float, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices whose runs had nothing in common were told that sums come in any order."""
    losses = iter([11.9, again])
    monkeypatch.setattr(training, "lay_out", lambda *given: None)
    monkeypatch.setattr(training, "make_trainer", lambda *given: next(losses))
    monkeypatch.setattr(training, "_bits", lambda loss: ([loss], torch.tensor([loss])))
    card: Any = PaidCopies(80)
    [row] = training.repeats(SimpleNamespace(device=card), None)  # type: ignore[arg-type]
    assert row.state == state


class PaidCopies(Card):
    """A device whose copies take as long as is said, in `rates`."""

    is_gpu, name = True, "card"

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(1)

    torch_device = torch.device("meta")

    def new_stream(self) -> None:
        return None

    def release_memory(self) -> None:
        return None


@pytest.mark.parametrize(("gbytes", "states"), [(50.0, ["pass"] * 3), (40.0, ["fail", "fail", "note"])])
def test_copies_both_ways_fail_no_host(gbytes: float, states: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_rate", lambda *given: gbytes)
    rows = list(staging.check_staging(PaidCopies(80), find_accelerator("H100-SXM5-80GB")))  # type: ignore[arg-type]
    assert [row.state for row in rows] == states


def test_out_without_acceptance_is_refused(tmp_path: Path) -> None:
    ended = hethub("doctor", "--out", "acceptance.json", cwd=tmp_path)
    assert ended.exit_code == 2
    assert "add --acceptance" in ended.stderr


def test_ranks_that_hethub_starts_are_asked_for_tracebacks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--debug` stayed behind: the ranks, which do the work, said a paragraph."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(start, "start_here", lambda *words: asked.append(words))
    for given in (["--debug"], []):
        assert run(["doctor", "--acceptance", *given]) == 0
    assert asked == [("doctor", "--acceptance", "--debug"), ("doctor", "--acceptance")]


def test_what_failed_is_the_commands_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row(what="attention", where="card", state="fail", found="90 noises", reason="the mask is dropped")]
    found = acceptance.Acceptance(date="today", hethub="0", ranks=[], rows=rows)
    monkeypatch.setattr(acceptance, "accept", lambda job, progress: found)
    alone = launch_info()
    monkeypatch.setattr(launcher_environment, "launch_info", lambda: replace(alone, launcher="torchrun"))
    out = tmp_path / "acceptance.json"
    assert run(["doctor", "--acceptance", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert "1 of 1 checks failed: attention." in printed.err
    assert "the mask is dropped" in printed.out
    assert json.loads(out.read_text())["rows"][0]["found"] == "90 noises"
