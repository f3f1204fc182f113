"""What makes a checkpoint whole, step by step: what lasts before it has its name, what goes first, and what damage says."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hethub.runtime.checkpoint import CheckpointManager, integrity
from hethub.runtime.checkpoint.manager import CheckpointFolder
from tests.runtime.checkpoint.test_folder import OneRank


def test_all_lasts_before_the_name_and_the_name_before_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    """A power failure may take what was not synced, in any order."""
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"{path.name} becomes {target.name}")
        return rename(path, target)

    partial = tmp_path / "step-3.partial"
    partial.mkdir()
    (partial / "data").write_text("elements")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    integrity.complete(partial, integrity.checksums(partial, ["data"]))
    assert done[-3:] == ["step-3.partial", "step-3.partial becomes step-3", tmp_path.name]


def test_what_is_half_removed_is_not_whole(tmp_path: Path, monkeypatch: Any) -> None:
    partial = tmp_path / "step-3.partial"
    partial.mkdir()
    (partial / "data").write_text("elements")
    folder = integrity.complete(partial, integrity.checksums(partial, ["data"]))
    assert not integrity.faults(folder, contents=False)

    def cut_off(path: Path) -> None:
        raise OSError

    monkeypatch.setattr(shutil, "rmtree", cut_off)
    with pytest.raises(OSError):  # noqa: PT011
        integrity.remove(folder)
    assert integrity.faults(folder, contents=False) == ["it has no COMPLETE marker"]


def test_damage_found_by_one_rank_counts_before_what_another_cannot_read(tmp_path: Path) -> None:
    """The contents of damaged files say nothing of who wrote them: an older checkpoint is looked for."""
    folder: Any = CheckpointFolder.__new__(CheckpointFolder)
    answers = [(["file a is missing"], None), ([], ("its record is of step 7", False))]
    folder._world = SimpleNamespace(rank=0, size=2, all_gather_objects=lambda own, patience: answers)
    folder._is_indexed = True
    assert folder._faults(tmp_path) == ["file a is missing"]


def test_a_link_is_neither_removed_nor_counted(tmp_path: Path) -> None:
    """Somebody names a checkpoint by a link, here or elsewhere: it is theirs."""
    for step in (3, 4, 5):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "COMPLETE").touch()
    (tmp_path / "step-2").symlink_to("step-3")
    (tmp_path / "step-9").symlink_to("step-5")
    CheckpointManager(tmp_path, 2, OneRank()).begin_behind(5)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4", "step-5", "step-9"]
    assert (tmp_path / "step-9").readlink() == Path("step-5")
