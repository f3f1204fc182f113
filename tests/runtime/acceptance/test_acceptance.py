"""`hethub doctor --acceptance`: on CPUs everything runs but the rows of devices, which say why; what is wrong is told."""

import gc
import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

import torch
import torch.distributed as dist

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
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import load_job
from tests.support.command import hethub
from tests.support.job_files import write_job
from tests.support.ranks import run_ranks

DEVICES_AND_CPUS = ClusterSpec.model_validate(
    {
        "name": "mixed",
        "nodes": [
            {"name": "h100", "accelerator": "H100-SXM5-80GB", "accelerators": 2, "gbps_per_nic": 100},
            {"name": "cpu", "accelerator": "CPU-core", "accelerators": 2, "gbps_per_nic": 100},
        ],
    }
)
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


def exchange_with(wrong: str | None, world: Any) -> list[dict[str, Any]]:
    """The rows of a world whose rank 1 gets one number wrong in one way of communicating."""
    from hethub.runtime.acceptance import exchange

    broadcast, all_reduce, receive = dist.broadcast, dist.all_reduce, world.receive

    def spoilt(tensor: torch.Tensor, **options: Any) -> Any:
        if options.get("async_op"):  # the large ones
            return broadcast(tensor, **options)
        broadcast(tensor, **options)
        tensor[5] += 1
        return None

    def spoilt_behind_the_first_chunks(tensor: torch.Tensor, **options: Any) -> Any:
        work = all_reduce(tensor, **options)
        if options.get("async_op"):
            work.wait()
            tensor[-1] += 1
        return work

    def received(tensor: torch.Tensor, src: int, tag: int) -> Any:
        receive(tensor, src, tag).wait()
        tensor[-1] += 1

        class Done:
            def wait(self) -> None:
                return None

        return Done()

    if world.rank == 1 and wrong == "broadcast":
        dist.broadcast = spoilt
    if world.rank == 1 and wrong == "large":
        dist.all_reduce = spoilt_behind_the_first_chunks
    exchange.bench.run = lambda *given: []  # times are another test's
    if world.rank == 1 and wrong == "messages":
        world.receive = received
    cluster = ClusterSpec.model_validate(
        {"name": "c", "nodes": [{"name": "n", "accelerator": "CPU-core", "accelerators": world.size}]}
    )
    return [row.to_dict() for row in exchange.check_exchange(world, cluster, lambda what: None)]


def exchange_on_rank(world: Any, wrong: str | None) -> list[dict[str, Any]]:
    return exchange_with(wrong, world)


@pytest.mark.parametrize("wrong", [None, "broadcast", "large", "messages"])
def test_a_wrong_number_is_told_by_operation_and_place(wrong: str | None) -> None:
    told = run_ranks(3, exchange_on_rank, wrong, islands=[[0, 1], [2]])
    assert told[0] == told[1] == told[2]
    failed = {(row["what"], row["where"]): row["reason"] for row in told[0] if row["state"] == "fail"}
    expected = {
        None: {},
        "broadcast": {("collectives", place): "wrong: broadcast" for place in ("all islands, bridged", "island 0")},
        "large": {
            ("large collectives", place): "wrong: all_reduce, mean in bf16"
            for place in ("all islands, bridged", "island 0")
        },
        "messages": {("messages", "all ranks"): "wrong: 0 to 1, 2 to 1"},
    }
    assert failed == expected[wrong]


def test_devices_of_one_island_exchange_messages_without_a_circle() -> None:
    """A message's first use of the library waits for its peer: three ranks that receive first would wait in a ring."""
    told = run_ranks(3, exchange_on_rank, None, islands=[[0, 1, 2]], staged_ranks=range(3), timeout_seconds=60)
    assert all(row["state"] != "fail" for row in told[0])


def test_ranks_that_hethub_starts_see_the_devices_and_the_last_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    places = environments(2, 2)
    assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["0,1", "0,1", "", ""]
    assert len({place["MASTER_PORT"] for place in places}) == len({place["HETHUB_TOKEN"] for place in places}) == 1
    assert not any("OMPI_COMM_WORLD_RANK" in place for place in places)
    assert environments(0, 3, ((0, 1), (2,)))[2]["HETHUB_ISLANDS"] == "0,1|2"


def bridged_row(world: Any, gpus: list[bool]) -> dict[str, Any]:
    """That of a world whose ranks are these, and whose bridge reaches half of its bound."""
    from hethub.runtime.acceptance import exchange

    reached = {
        "operation": "all_reduce", "path": "world", "ranks": 2, "bytes": 64 << 20, "bytes_per_second": 1e9, "seconds": 2.0,
        "bound_seconds": 1.0,
    }  # fmt: skip
    exchange.bench.run = lambda *given: [reached]
    told = SimpleNamespace(device=world.device, islands=((0,), (1,)), all_gather_objects=lambda value: gpus)
    [row] = exchange._bandwidth(told, None)  # type: ignore[arg-type]
    return row.to_dict()


@pytest.mark.parametrize(("gpus", "state"), [([True, True], "fail"), ([True, False], "note")])
def test_a_bridge_is_held_to_its_bound_between_devices_alone(gpus: list[bool], state: str) -> None:
    """CPUs of the acceptance test have one core each, to move and to add."""
    assert run_ranks(1, bridged_row, gpus)[0]["state"] == state


def island_rows(world: Any) -> list[dict[str, Any]]:
    """Those of two devices and of two CPUs beside them."""
    from hethub.runtime.acceptance import exchange

    row = {
        "operation": "all_reduce",
        "path": "island",
        "ranks": 2,
        "bytes": 64 << 20,
        "seconds": 1.0,
        "bound_seconds": None,
    }
    exchange.bench.run = lambda *given: [{**row, "bytes_per_second": 90e9}, {**row, "bytes_per_second": 2e9}]
    told = SimpleNamespace(
        device=world.device, islands=((0, 1), (2, 3)), all_gather_objects=lambda value: [True, True, False, False]
    )
    return [found.to_dict() for found in exchange._bandwidth(told, DEVICES_AND_CPUS)]  # type: ignore[arg-type]


def test_an_island_is_held_against_its_own_link() -> None:
    """CPUs beside devices were told how little of the devices' link they reach."""
    devices, cpus = run_ranks(1, island_rows)[0]
    assert devices["where"] == "island of ranks 0, 1"
    assert devices["figures"]["share_of_link"] == pytest.approx(0.2)
    assert cpus["where"] == "island of ranks 2, 3"
    assert "share_of_link" not in cpus["figures"]


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


class PaidCopies(Card):
    """A device whose copies take as long as is said, in `rates`."""

    is_gpu, name = True, "card"

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(1)

    torch_device = torch.device("meta")

    def new_stream(self) -> None:
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
