"""Checkpoints of strangers, whose checksums fit: nothing in them is run, and what is malformed is named."""

import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from hethub.runtime.checkpoint import iterate_weights, read_record
from hethub.runtime.checkpoint.integrity import MARKER, checksums
from hethub.runtime.program.checkpoint import load as load_program
from hethub.spec.errors import BadInput
from tests.support.checkpoints import newest_intact
from tests.support.command import one, ranks
from tests.support.job_files import write_job


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, and its run of four steps, saved at 2 and 4."""
    folder = tmp_path_factory.mktemp("hostile")
    job = write_job(folder / "job", cluster_name="detect", plan="auto", train={"precision": "fp64"})
    ended = one(ranks(1, "train", job, "--run-dir", folder / "run", cwd=folder))
    assert ended.exit_code == 0, ended.stderr
    return folder


@pytest.fixture
def newest(whole: Path, tmp_path: Path) -> Path:
    """The checkpoint of step 4, in a copy of the run."""
    return Path(shutil.copytree(whole / "run", tmp_path / "run")) / "checkpoints" / "step-4"


def sign(folder: Path, names: set[str] | None = None) -> None:
    """Writes the marker that fits the files: the checksums have no key."""
    own = names if names is not None else {path.name for path in folder.iterdir()} - {MARKER}
    (folder / MARKER).write_text(json.dumps({"files": checksums(folder, own)}))


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "record.json", "index.json", MARKER])
def test_nothing_in_a_checkpoint_is_run(name: str, newest: Path, whole: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    (newest / name).write_bytes(pickle.dumps(Bomb(mark)))
    if name != MARKER:
        sign(newest)
    passes = name in (".metadata", MARKER)  # DCP's own index is for PyTorch's tools; ours says where everything is
    ended = one(ranks(1, "export", newest.parents[1], "--to", tmp_path / "out", cwd=tmp_path))
    # An export checks the data by reading them, without their checksums: what it cannot use may be damaged.
    assert ended.exit_code == (0 if passes or name == "__0_0.distcp" else 2), ended.stderr
    assert not mark.exists()
    if not passes:
        with pytest.raises(BadInput, match="step-4: its checksums fit"):
            newest_intact(newest.parent)
        return
    path = newest_intact(newest.parent)
    assert path == (newest if name == ".metadata" else newest.with_name("step-2"))
    assert sum(values.numel() for _, values in iterate_weights(path, read_record(path).model)) > 0
    assert not mark.exists()


def in_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = json.loads((folder / "index.json").read_text())
        change(data["entries"])
        (folder / "index.json").write_text(json.dumps(data))
        sign(folder)

    return spoil


def first(entries: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(iter(entries.values()))
    return entry


def other_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-2"), folder)


def in_record(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        record = json.loads((folder / "record.json").read_text())
        (folder / "record.json").write_text(json.dumps(record | changes))
        sign(folder)

    return spoil


def in_loop_state(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        extra = json.loads((folder / "record.json").read_text())["extra"]
        in_record(extra=extra | changes)(folder)

    return spoil


def in_marker(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MARKER).write_text(text) and None


def squeezed(folder: Path) -> None:
    """The elements as a compressed part, which a few bytes can make as large as they like."""
    index = json.loads((folder / "index.json").read_text())
    (offset, numel, file, _, _), *_ = first(index["entries"])["chunks"]
    with zipfile.ZipFile(folder / "part", "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("archive/data/0", bytes(numel * 8))
    content = (folder / "part").read_bytes()
    start = (folder / file).stat().st_size
    with (folder / file).open("ab") as stream:
        stream.write(content)
    (folder / "part").unlink()
    first(index["entries"])["chunks"][0] = [offset, numel, file, start, len(content)]
    (folder / "index.json").write_text(json.dumps(index))
    sign(folder)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a marker with a list of names": (in_marker('{"files": ["a"]}'), "its COMPLETE marker cannot be read"),
    "a marker with a number": (in_marker('{"files": 5}'), "its COMPLETE marker cannot be read"),
    "a marker without files": (in_marker('{"files": {}}'), "its COMPLETE marker cannot be read"),
    "a marker that is a list": (in_marker("[]"), "its COMPLETE marker cannot be read"),
    "a deep marker": (in_marker("[" * 100_000), "its COMPLETE marker cannot be read"),
    "a marker that leads elsewhere": (
        in_marker('{"files": {"../step-2/record.json": [1, "' + "0" * 32 + '"]}}'),
        "its COMPLETE marker cannot be read",
    ),
    "a marker that leaves out the data": (
        lambda folder: sign(folder, {"record.json", "index.json", ".metadata"}),
        "file __0_0.distcp is not listed",
    ),
    "a marker that leaves out the metadata": (
        lambda folder: sign(folder, {"record.json", "index.json", "__0_0.distcp"}),
        "file .metadata is not listed",
    ),
    "another step": (other_step, "its record is of step 2"),
    "a record of another step": (in_record(step=12), "its record is of step 12"),
    "a record of training that was elsewhere": (in_loop_state(step=12), "its record is of step 12"),
    "a record without what the trainer wants": (in_record(extra={}), "record.json: extra.tokens is missing"),
    "a record with a negative step": (in_record(step=-4), "record.json: step is -4"),
    "an index of nothing": (in_index(lambda entries: entries.update(x={})), "index.json: entries.x.dtype is missing"),
    "an index with a hole": (
        in_index(lambda entries: first(entries)["chunks"][0].__setitem__(1, 1)),
        "the chunks do not hold every element once",
    ),
    "an index that leads elsewhere": (
        in_index(lambda entries: first(entries)["chunks"][0].__setitem__(2, "../step-2/__0_0.distcp")),
        "is '../step-2/__0_0.distcp', but",
    ),
    "an index of another place": (
        in_index(lambda entries: first(entries)["chunks"][0].__setitem__(3, 10**12)),
        "at byte 1,000,000,000,000",
    ),
    "an index of another type": (
        in_index(lambda entries: first(entries).__setitem__("dtype", "float32")),
        "its parts with elements have the bytes",
    ),
    "elements that unfold": (squeezed, "its parts with elements have the bytes []"),
}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_a_malformed_checkpoint_is_named(kind: str, newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A marker that is none may be damaged; behind a marker that fits nothing is."""
    spoil, complaint = HOSTILE[kind]
    spoil(newest)
    if MARKER not in complaint:
        with pytest.raises(BadInput, match=f"step-4: its checksums fit.*{re.escape(complaint)}"):
            newest_intact(newest.parent)
        return
    assert newest_intact(newest.parent) == newest.with_name("step-2")
    (warning,) = caplog.records
    assert "step-4" in warning.getMessage()
    assert complaint in warning.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(HOSTILE))
def test_training_goes_on_from_the_one_before_or_says_why_not(kind: str, newest: Path, whole: Path) -> None:
    HOSTILE[kind][0](newest)
    run = newest.parents[1]
    ended = one(ranks(1, "train", whole / "job" / "job.yaml", "--resume", run, cwd=run))
    if MARKER not in HOSTILE[kind][1]:
        assert ended.exit_code == 2, ended.stderr
        assert newest.exists()
        return
    assert ended.exit_code == 0, ended.stderr
    assert newest.with_name("step-4.set-aside").exists()
    assert "resumed behind step 2" in ended.stdout
    assert (run / "metrics.jsonl").read_text().count("\n") == 4


def test_nothing_in_a_programs_checkpoint_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(BadInput, match=r"no index of a checkpoint: it names posix\.mkdir"):
        load_program(tmp_path, [])
    assert not mark.exists()


def test_a_programs_checkpoint_leads_nowhere_else(tmp_path: Path) -> None:
    metadata = Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo("../__0_0.distcp", 0, 1)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match="is no file of a checkpoint"):
        load_program(tmp_path, [])


def test_a_programs_checkpoint_of_another_python_is_read(tmp_path: Path) -> None:
    """Python 3.13 says of paths that they are of pathlib._local."""
    metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta(checkpoint_id=tmp_path))
    written = re.sub(rb"cpathlib(\._local)?\n", b"cpathlib._local\n", pickle.dumps(metadata, 2))
    assert written.count(b"cpathlib._local\n") == 1
    (tmp_path / ".metadata").write_bytes(written)
    load_program(tmp_path, [])
    (tmp_path / ".metadata").write_bytes(written.replace(b"PosixPath", b"os"))
    with pytest.raises(BadInput, match=r"names pathlib\.os, which no checkpoint holds"):
        load_program(tmp_path, [])
