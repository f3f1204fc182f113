"""Every file of a run folder, damaged in every way: a paragraph, or going on from what is whole, with the loss said."""

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from hethub.report.html import report_run
from hethub.runtime.run_folder import FILES, RunFolder
from hethub.spec.cluster import ClusterSpec, load_cluster
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.plan import load_plan
from tests.support.checkpoints import newest_intact
from tests.support.command import Ended, one, ranks
from tests.support.job_files import write_job
from tests.support.privileges import laid_down, lay_down

STEPS, NEWEST = 6, 4
CHECKPOINT = ("COMPLETE", "record.json", "index.json", ".metadata", "__0_0.distcp")
OPTIONAL = ("profile.json", "calibration.json", "drift.jsonl", "rehearsal.json")  # this run has had none of these


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def no_utf8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def wrong_type(path: Path) -> None:
    path.write_text("5\n")


def deleted(path: Path) -> None:
    path.unlink()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("")


def link_instead(path: Path) -> None:
    elsewhere = Path(tempfile.mkdtemp()) / path.name
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def forbidden(path: Path) -> None:
    path.chmod(0)


DAMAGE = (truncated, flipped, emptied, no_utf8, wrong_type, deleted, folder_instead, link_instead, forbidden)
PLACES = [name for name in FILES if name not in OPTIONAL] + [f"checkpoints/step-4/{name}" for name in CHECKPOINT]
REPORTED = ("plan.yaml", "model.yaml", "cluster.yaml", "metrics.jsonl", "trace.json")
# No file of these is read again: what they held is written anew, or goes on behind the damage.
UNREAD = ("job.yaml", "prediction.json", "log.txt", "communicator_counters.json", "report.html")
HARMLESS = {(flipped, "metrics.jsonl"), (flipped, "plan.yaml"), (flipped, "communicator.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job and its run of six steps in float64, whose newest checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("damage")
    job = write_job(
        folder / "job", cluster_name="detect", plan="auto", train={"steps": STEPS, "precision": "fp64"},
        checkpoint={"every_steps": 2, "keep": 3},
    )  # fmt: skip
    ended = one(ranks(1, "train", job, "--run-dir", folder / "run", cwd=folder))
    assert ended.exit_code == 0, ended.stderr
    shutil.rmtree(folder / "run" / "checkpoints" / "step-6")
    return folder


def damaged_copy(whole: Path, folder: Path, place: str, damage: Callable[[Path], None]) -> Path:
    run = Path(shutil.copytree(whole / "run", folder / "run"))
    damage(run / place)
    return run


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


def look(run: Path, place: str, cluster: ClusterSpec) -> tuple[int, list[str]]:
    """What a run resumed on that cluster and a report read of the folder: the step gone on from, and what is said."""
    folder = RunFolder(run)
    folder.check_resumable()
    if folder.plan.exists():
        load_plan(folder.plan)
    folder.relays(cluster)
    path = newest_intact(folder.checkpoints)
    assert path is not None
    step = int(path.name.removeprefix("step-"))
    said = folder.cut_behind(step)
    if place in REPORTED:
        report_run(run, run / "page.html")
    return step, said


def outcome(run: Path, place: str, damage: Callable[[Path], None], cluster: ClusterSpec) -> tuple[int, list[str]] | str:
    """As `look`, or why it refused."""
    try:
        with laid_down() if damage is forbidden else nullcontext():
            return look(run, place, cluster)
    except (BadInput, RunFailed) as error:
        return str(error)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_damaged_is_named_or_passed_over(
    place: str, damage: Callable[[Path], None], whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = damaged_copy(whole, tmp_path, place, damage)
    name, seen = Path(place).name, outcome(run, place, damage, load_cluster(whole / "run" / "cluster.yaml"))
    if isinstance(seen, str):
        assert "\n" not in seen
        assert name in seen
        # What cannot be read may be whole, and be read when it is tried again.
        assert damage is forbidden or not place.startswith("checkpoints/")
        return
    step, said = seen
    said += [record.getMessage() for record in caplog.records]
    if place.startswith("checkpoints/") and damage is not link_instead:
        assert step == 2
        # A digit flipped in the marker may be one of another file's checksum, which is then what does not fit.
        assert any("step-4" in text and (name in text or name == "COMPLETE") for text in said)
        return
    assert step == NEWEST
    known = name in UNREAD or name == "trace.json" or damage in (deleted, link_instead) or (damage, name) in HARMLESS
    assert known or any(name in text for text in said)


def resume(whole: Path, run: Path, damage: Callable[[Path], None]) -> Ended:
    hook = lay_down if damage is forbidden else None
    return one(ranks(1, "train", whole / "job" / "job.yaml", "--resume", run, cwd=run, hook=hook))


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_exactly_or_says_why_not(
    place: str, damage: Callable[[Path], None], whole: Path, tmp_path: Path
) -> None:
    run = damaged_copy(whole, tmp_path, place, damage)
    ended = resume(whole, run, damage)
    if ended.exit_code == 2 or (ended.exit_code == 1 and damage is forbidden):
        (paragraph,) = ended.paragraphs
        assert Path(place).name in paragraph
        assert "Traceback" not in ended.stderr
        return
    assert ended.exit_code == 0, ended.stderr
    wanted = losses(whole / "run")
    found = losses(run)
    assert found[-2:] == pytest.approx(wanted[-2:], rel=1e-9)
    if place == "plan.yaml":
        assert damage is not deleted or "plan.yaml is missing" in ended.stdout
    if place == "metrics.jsonl" and damage is not flipped:
        assert "metrics.jsonl" in ended.stdout
    if place.startswith("checkpoints/") and damage is not link_instead:
        assert "resumed behind step 2" in ended.stdout
        assert "step-4" in ended.stderr
