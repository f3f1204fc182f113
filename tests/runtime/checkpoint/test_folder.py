"""The folder of a run's checkpoints: which stay, what is unfinished, what takes whose place. One process."""

import os
from pathlib import Path
from typing import Any

from hethub.runtime.checkpoint import CheckpointManager, integrity
from hethub.runtime.checkpoint.integrity import candidates, finish_cut_off


def steps(folder: Path) -> list[str]:
    return [path.name for path in candidates(folder)]


class OneRank:
    """What a folder of checkpoints needs of a world, of one rank."""

    rank, size = 0, 1

    def all_gather_objects(self, value: Any, patience: Any = None) -> list[Any]:
        return [value]

    def gloo_group(self, timeout: Any) -> None:
        return None


def test_a_run_keeps_its_own_and_sets_newer_ones_aside(tmp_path: Path) -> None:
    for step in (3, 4, 5, 6, 7, 8):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "COMPLETE").touch()
    (tmp_path / "step-9.partial").mkdir()
    (tmp_path / "step-8").rename(tmp_path / "step-8.partial")  # killed before it was renamed
    finish_cut_off(tmp_path)
    assert steps(tmp_path)[0] == "step-8"
    CheckpointManager(tmp_path, 2, OneRank(), keep_every=3).begin_behind(7)  # type: ignore[arg-type]
    # The newest two, of which step 6 would stay anyway: step 5 was kept beside them.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-6", "step-7", "step-8.set-aside"]


def test_a_checkpoint_that_is_half_removed_is_not_kept_for_good(tmp_path: Path) -> None:
    for step in (3, 6, 7):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / ("COMPLETE" if step > 3 else "COMPLETE.removed")).touch()
    CheckpointManager(tmp_path, 1, OneRank(), keep_every=3).begin_behind(7)  # type: ignore[arg-type]
    assert steps(tmp_path) == ["step-7", "step-6"]


def test_the_newest_is_that_of_the_largest_number(tmp_path: Path) -> None:
    for step in (9, 100, 10):
        (tmp_path / f"step-{step}").mkdir()
    assert steps(tmp_path) == ["step-100", "step-10", "step-9"]


def test_a_save_cut_off_beside_the_same_step_s_checkpoint_takes_no_name(tmp_path: Path) -> None:
    """Killed before it removed the one that it replaces: a start that gave it the name ended there."""
    for name in ("step-3", "step-3.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "COMPLETE").touch()
    finish_cut_off(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-3.partial"]


def test_a_save_takes_the_place_of_one_of_the_same_step(tmp_path: Path) -> None:
    for name in ("step-3", "step-3.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert integrity.complete(tmp_path / "step-3.partial", {}) == tmp_path / "step-3"
    assert {path.name for path in (tmp_path / "step-3").iterdir()} == {"COMPLETE", "step-3.partial"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_a_save_takes_the_place_of_a_link_and_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "COMPLETE").touch()
    (tmp_path / "step-3").symlink_to("elsewhere")
    (tmp_path / "step-3.partial").mkdir()
    assert not integrity.complete(tmp_path / "step-3.partial", {}).is_symlink()
    assert (tmp_path / "elsewhere" / "COMPLETE").exists()


def test_a_run_s_last_save_is_its_newest_marker_s(tmp_path: Path) -> None:
    """By it `--resume auto` takes the newest run; a save that lacks but its name counts."""
    (tmp_path / "step-12").touch()  # of somebody else's
    assert integrity.newest_marker(tmp_path) is None
    for name, written in (("step-1", 100), ("step-2", 300), ("step-10", 200), ("step-11.partial", 400)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "COMPLETE").touch()
        os.utime(tmp_path / name / "COMPLETE", (written, written))
        assert integrity.newest_marker(tmp_path) == max(written, 300 if name == "step-10" else 0)
