"""Going on with a run: which folder `--resume auto` means, and whether the job is still the one that began there."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hethub.communicator import Rendezvous
from hethub.runtime.checkpoint import newest_marker
from hethub.runtime.launch.consensus import broadcast
from hethub.runtime.run_folder import AUTO, RunFolder, run_folders
from hethub.spec.base import build
from hethub.spec.documents import read_yaml
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, JobSpec

_LOOKING_SECONDS = 600.0  # how long the other ranks wait for rank 0, whose file system may be slow

# What torchrun and Slurm say to a job that they start again.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Where files lie may differ between machines: checkpoints and data say themselves whether they are the same.
_PLACES = {"path", "tokenizer"}
# What else of a job may change: where and how it runs, and how long; not what is trained.
_TRAINED = ("data", "train", "communicator.wire")
_MAY_CHANGE = ("train.steps", "train.compile")


def goes_on_by_itself(resume: Path | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this start takes up what the one before it left: asked for, or because a launcher starts it again."""
    restarted = any(environment.get(name, "0").strip() not in ("", "0") for name in _RESTARTS)
    return resume == AUTO or (resume is None and restarted)


def folder_to_resume(meeting: Rendezvous, job: Job, run_dir: Path | None, resume: Path | None) -> Path | None:
    """The run folder to go on in, the same on all ranks; None for a new run.

    `auto`: of this job's run folders (`run_dir`, where that is named) the one whose newest checkpoint is the last
    written.
    """

    def newest() -> str | None:
        folders = run_folders(job.path) if run_dir is None else [run_dir]
        written = {folder: newest_marker(RunFolder(folder).checkpoints) for folder in folders}
        whole = [folder for folder, time in written.items() if time is not None]
        return str(max(whole, key=lambda folder: written[folder] or 0.0)) if whole else None

    if not goes_on_by_itself(resume):
        return resume
    found = broadcast(meeting, "resume", newest, patience_seconds=_LOOKING_SECONDS)
    return None if found is None else Path(found)


def check_unchanged(folder: RunFolder, job: Job, *, accepted: bool) -> list[str]:
    """What has changed in the job since the run began, a line each, where that is accepted.

    Raises BadInput with every key where it is not. Where the run's job.yaml is gone there is nothing to compare.
    """
    file = folder.path / "job.yaml"
    if not file.exists():
        return []
    data, source = read_yaml(file, "job file")
    try:
        before = build(JobSpec, data, source, "job file").to_dict()
    except BadInput as error:
        if accepted:
            return [f"{file} cannot be read, so nobody knows what has changed in the job"]
        raise BadInput(
            f"{error} Restore the file; or go on under the job as it is now with --accept-changes."
        ) from None
    changes = list(_changes(before, job.spec.to_dict()))
    if changes and not accepted:
        raise BadInput(
            f"{job.path}: the job has changed since the run in {folder.path} began: {'; '.join(changes)}. Set these back (also what "
            "was given with --set), or add --accept-changes to go on so."
        )
    return [f"the job has changed: {change}" for change in changes]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """`train.lr was 0.0003, is 0.001`, for every key that says what is trained."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    for key in {**old, **new}:
        counts = any(f"{key}.".startswith(f"{each}.") for each in _TRAINED)
        if counts and key not in _MAY_CHANGE and key.rpartition(".")[2] not in _PLACES and old.get(key) != new.get(key):
            yield f"{key} was {old.get(key)}, is {new.get(key)}"


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{key}.")
        elif isinstance(inner, list) and inner and all(isinstance(each, Mapping) for each in inner):
            for index, each in enumerate(inner):
                yield from _leaves(each, f"{prefix}{key}.{index}.")
        else:
            yield f"{prefix}{key}", inner
