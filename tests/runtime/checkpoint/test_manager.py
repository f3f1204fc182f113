"""Damaged, half-written and unreachable checkpoints; retention; failures while writing. Two ranks in two islands."""

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hethub.runtime.checkpoint import CheckpointManager, integrity, iterate_weights, read_record, shared
from hethub.runtime.checkpoint.integrity import checksums, faults
from hethub.runtime.checkpoint.shared import require_shared
from hethub.spec.errors import BadInput, RunFailed
from tests.runtime.checkpoint.test_folder import OneRank, steps
from tests.support.checkpoints import newest_intact, train_and_save
from tests.support.command import HANG_SECONDS
from tests.support.layouts import MODEL, Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks

CASE = Case(
    name="zero1 over two islands",
    stages=[stage((0, 4), replica([0], 5, 2), replica([1], 3), zero=1)],
    vendors="an",
    precision="fp32",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1, 2 and 3 of one run."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    run_ranks(2, train_and_save, CASE, folder, [1, 2, 3], 3, islands=CASE.islands)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def data_file(path: Path, rank: int = 1) -> Path:
    (file,) = path.glob(f"__{rank}_*")
    return file


def flip_bit(path: Path) -> None:
    file = data_file(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(path: Path) -> None:
    data_file(path).write_bytes(data_file(path).read_bytes()[:-1])


def lose_file(path: Path) -> None:
    data_file(path).unlink()


def lose_marker(path: Path) -> None:
    (path / "COMPLETE").unlink()


def spoil_marker(path: Path) -> None:
    (path / "COMPLETE").write_text('{"files": {"__0')


def spoil_record(path: Path) -> None:
    record = json.loads((path / "record.json").read_text())
    (path / "record.json").write_text(json.dumps(record | {"updates": 7}))


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (flip_bit, "file __1_0.distcp has another checksum than was written"),
    (truncate, "bytes were written"),
    (lose_file, "file __1_0.distcp is missing"),
    (lose_marker, "it has no COMPLETE marker"),
    (spoil_marker, "its COMPLETE marker cannot be read, so nobody knows whether the rest is whole"),
    (spoil_record, "file record.json has"),
]


@pytest.mark.parametrize(("damage", "complaint"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: Callable[[Path], None], complaint: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest_intact(folder) == folder / "step-3"
    assert not caplog.records
    damage(folder / "step-3")
    assert newest_intact(folder) == folder / "step-2"
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "step-3" in warning.getMessage()
    assert complaint.replace("bytes were", "were") in warning.getMessage()


def test_where_none_is_whole_all_are_named(folder: Path, tmp_path: Path) -> None:
    truncate(folder / "step-3")
    lose_marker(folder / "step-2")
    flip_bit(folder / "step-1")
    with pytest.raises(BadInput, match=r"step-3: file __1_0.*step-2: it has no COMPLETE.*step-1: file __1_0"):
        newest_intact(folder)
    assert newest_intact(tmp_path / "nothing here") is None


def resume_and_save(world: Any, case: Case, folder: Path) -> Any:
    """What `latest` chose, what the search warned of, and the checkpoints after training to step 5."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hethub.runtime.checkpoint").addHandler(handler)
    trainer = build_trainer(world, case)
    store = CheckpointManager(folder, 2, world)
    path = store.latest()
    start = trainer.restore(store, path)
    store.begin_behind(start)
    found = []
    for step in range(start + 1, 6):
        trainer.run_step(step)
        trainer.save(store, step, blocking=True)
        world.barrier()
        found.append(steps(folder))
    trainer.save(store, 5, blocking=True)  # nothing new to save
    return path.name, records, found


def test_resume_passes_over_damage_and_sets_it_aside(folder: Path) -> None:
    flip_bit(folder / "step-3")
    (folder / "step-4.partial").mkdir()
    (folder / "step-3.set-aside").mkdir()  # of an earlier time
    first, second = run_ranks(2, resume_and_save, CASE, folder, islands=CASE.islands)
    assert first[0] == second[0] == "step-2"
    damaged, aside = first[1]
    assert "step-3: file __1_0" in damaged
    assert "step-3 is newer" in aside
    assert second[1] == []  # rank 0 speaks for all
    assert not (folder / "step-4.partial").exists()
    assert "another checksum" in faults(folder / "step-3.set-aside-2")[0]
    assert first[2] == [["step-3", "step-2"], ["step-4", "step-3"], ["step-5", "step-4"]]
    assert faults(folder / "step-5") == []


def meet_a_stale_file(world: Any, case: Case, folder: Path) -> str:
    """Rank 1 cannot read the newest checkpoint for a while, as on a network file system whose server restarts."""
    store, digest = CheckpointManager(folder, 2, world), integrity._digest

    def stale(path: Path) -> str:
        if world.rank == 1 and path.parent.name == "step-3":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return digest(path)

    integrity._digest = stale
    with pytest.raises(RunFailed, match=r"step-3: the checkpoint cannot be read \(.*Stale file handle") as caught:
        store.latest()
    assert caught.value.agreed
    integrity._digest = digest
    path = store.latest()
    return path.name


def test_what_cannot_be_read_for_a_while_is_not_passed_over(folder: Path) -> None:
    assert run_ranks(2, meet_a_stale_file, CASE, folder, islands=CASE.islands) == ["step-3", "step-3"]


def spoil_record_as_a_newer_version(world: Any, case: Case, folder: Path) -> None:
    with pytest.raises(BadInput, match=r"step-3: its checksums fit, but .*later is not a known key") as caught:
        CheckpointManager(folder, 2, world).latest()
    assert "step-N" in str(caught.value)


def test_a_newer_versions_checkpoint_is_refused_by_name(folder: Path) -> None:
    record, marker = (json.loads((folder / "step-3" / name).read_text()) for name in ("record.json", "COMPLETE"))
    (folder / "step-3" / "record.json").write_text(json.dumps(record | {"later": 1}))
    marker["files"] |= checksums(folder / "step-3", ["record.json"])
    (folder / "step-3" / "COMPLETE").write_text(json.dumps(marker))
    run_ranks(2, spoil_record_as_a_newer_version, CASE, folder, islands=CASE.islands)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """The last one is due by its number and at the end."""
    manager, written = CheckpointManager(tmp_path, 1, OneRank()), list[int]()  # type: ignore[arg-type]
    manager.write = lambda step, *_: written.append(step)  # type: ignore[method-assign]
    for step in (5, 5, 6, 6):
        manager.save(SimpleNamespace(step=step, to_dict=dict), None, blocking=True)  # type: ignore[arg-type]
    assert written == [5, 6]


def test_what_a_run_goes_on_from_is_not_saved_again(folder: Path) -> None:
    manager, written = CheckpointManager(folder, 2, OneRank()), list[int]()  # type: ignore[arg-type]
    manager.write = lambda step, *_: written.append(step)  # type: ignore[method-assign]
    record = manager.load(folder / "step-3", CASE.layout(), None)
    manager.save(record, None, blocking=True)
    assert written == []


def load_into(world: Any, case: Case, folder: Path) -> None:
    trainer = build_trainer(world, case)
    trainer.restore(CheckpointManager(folder, 2, world), folder / "step-3")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": MODEL.replace(name="wider", ffn=64)}, r"from model 'tiny'.*'wider': ffn 48 there, 64 here"),
        ({"precision": "bf16"}, "in precision fp32, but the job has bf16"),
    ],
)
def test_another_model_or_precision_is_refused(change: dict[str, Any], complaint: str, folder: Path) -> None:
    case = Case(**{"name": "alone", "stages": [stage((0, 4), replica([0], 8))], "precision": "fp32", **change})
    with pytest.raises(AssertionError, match=f"BadInput.*{complaint}"):
        run_ranks(1, load_into, case, folder)


def fail_to_write(world: Any, case: Case, folder: Path) -> list[str]:
    """Rank 1 has a disk that is full; the next call says so on all ranks, and what was saved before stays."""
    trainer = build_trainer(world, case)
    store = CheckpointManager(folder, 1, world)
    trainer.save(store, 1, blocking=True)
    trainer.run_step(2)
    world.barrier()
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    trainer.save(store, 2, blocking=False)
    said = rf"checkpoint of step 2 could not be written: rank 1: .*before in {folder} is untouched; .*Make room or allow it"
    with pytest.raises(RunFailed, match=said):
        trainer.save(store, 3, blocking=False)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    path = store.latest()
    assert not (folder / "step-2.partial").exists()  # nothing of it takes the room that is needed
    world.barrier()
    if world.rank == 0:  # what could not be removed, as on a network file system
        (folder / "step-2.partial").mkdir()
        (folder / "step-2.partial" / "__0_9").touch()
    trainer.save(store, 2, blocking=True)  # the same step again, now that there is room
    world.barrier()
    return [path.name, *steps(folder), *(path.name for path in folder.glob("step-2/__0_9"))]


def test_a_failing_write_is_raised_by_the_next_call(tmp_path: Path) -> None:
    results = run_ranks(2, fail_to_write, CASE, tmp_path, islands=CASE.islands)
    assert results == [["step-1", "step-2"]] * 2


def look_for_probe(world: Any, folders: list[Path]) -> None:
    with pytest.raises(BadInput, match=r"must see.*but rank 1 \(.*\) does not see what rank 0 wrote") as caught:
        require_shared(folders[world.rank], world, patience_seconds=0.1)
    assert "rank 0 (" not in str(caught.value)
    with pytest.raises(BadInput, match=r"rank 0 cannot write there.*\(--resume COPY\)"):
        require_shared(Path("/proc/nothing"), world)


def test_a_folder_that_some_ranks_do_not_see_is_refused(tmp_path: Path) -> None:
    run_ranks(2, look_for_probe, [tmp_path / "here", tmp_path / "there"])
    assert not list((tmp_path / "here").iterdir())


def test_a_new_file_that_a_folder_shows_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            (tmp_path / ".probe-token").touch()

    monkeypatch.setattr(shared.time, "sleep", sleep)
    assert shared._look(tmp_path, "token", 1, patience_seconds=HANG_SECONDS) is None
    assert len(waited) == 3


def look_beside_what_is_left(world: Any, folder: Path) -> None:
    require_shared(folder, world)


def test_probes_of_killed_ranks_go_at_the_next_start(tmp_path: Path) -> None:
    for left in (".probe-0123456789abcdef", ".probe-0123456789abcdef-1"):
        (tmp_path / left).touch()
    (tmp_path / "step-1").mkdir()
    run_ranks(2, look_beside_what_is_left, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_pytorchs_own_tools_read_a_checkpoint(written: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(written / "step-3", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    record = read_record(written / "step-3")
    assert (record.step, record.updates, record.extra.step) == (3, 3, 3)
    weights = {info.name: values for info, values in iterate_weights(written / "step-3", MODEL)}
    assert state.keys() == {f"{kind}/{name}" for kind in ("weights", "exp_avg", "exp_avg_sq") for name in weights}
    assert sum(values.numel() for values in weights.values()) == MODEL.parameters
    for name, values in weights.items():
        assert torch.equal(state[f"weights/{name}"], values)
        assert np.any(state[f"exp_avg_sq/{name}"].numpy())


def test_a_run_starts_without_the_writers_import() -> None:
    """torch.distributed.checkpoint takes a second of every rank's start, and is needed at the first save only."""
    code = "import sys, hethub.runtime.loop.train; print('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
