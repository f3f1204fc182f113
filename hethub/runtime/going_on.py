"""Going on with a run: which folder `--resume auto` means, and whether the job is still the one that began there."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from hethub.communicator import Rendezvous
from hethub.runtime.checkpoint import newest_marker
from hethub.runtime.checkpoint.record import check_model
from hethub.runtime.launch.consensus import broadcast
from hethub.runtime.launch.launcher_environment import is_restarted
from hethub.runtime.run_folder import AUTO, RunFolder, run_folders, with_whole_paths
from hethub.spec.base import build
from hethub.spec.documents import read_yaml
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, JobSpec
from hethub.spec.lookup import load_model

_log = logging.getLogger(__name__)

_LOOKING_SECONDS = 600.0  # how long the other ranks wait for rank 0, whose file system may be slow

# Where files lie may differ between machines: checkpoints and data say themselves whether they are the same.
_PLACES = {"path", "tokenizer"}
# What else of a job may change: where and how it runs, and how long; not what is trained.
_TRAINED = ("data", "train", "communicator.wire")
_MAY_CHANGE = ("train.steps", "train.compile")
# No checkpoint goes on under others: what any sample holds hangs on the first two, masters and moments on the third.
_MUST_STAY = ("train.seed", "train.seq_len", "train.precision")


def goes_on_by_itself(resume: Path | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this start takes up what the one before it left: asked for, or because a launcher starts it again."""
    return _goes_on(resume, restarted=is_restarted(environment))


def _goes_on(resume: Path | None, *, restarted: bool) -> bool:
    return resume == AUTO or (resume is None and restarted)


def folder_to_resume(
    meeting: Rendezvous,
    job: Job,
    run_dir: Path | None,
    resume: Path | None,
    *,
    restarted: bool,
    accept_changes: bool,
) -> Path | None:
    """The run folder to go on in, the same on all ranks; None for a new run. `restarted`: a launcher has started any of
    the ranks again.

    `auto`: `run_dir`, where that is named and has a checkpoint, else as `newest_run` says.
    """

    def newest() -> str | None:
        folder = newest_run(job, accept_changes=accept_changes) if run_dir is None else _newest([run_dir])
        return None if folder is None else str(folder)

    if not _goes_on(resume, restarted=restarted):
        return resume
    found = broadcast(meeting, "resume", newest, patience_seconds=_LOOKING_SECONDS)
    return None if found is None else Path(found)


def newest_run(job: Job, *, accept_changes: bool = False) -> Path | None:
    """Return the job's run folder with the most recently written checkpoint, or None where no folder has one.

    Job files of one name, and what --set changes, make several jobs: only runs that began under this one count, all with
    `accept_changes`. Where only others have checkpoints, a warning names the newest and what it differs in.
    """
    differing = {folder: [] if accept_changes else _differences(folder, job) for folder in run_folders(job.path)}
    found = _newest([folder for folder, differences in differing.items() if not differences])
    if found is None and (other := _newest(list(differing))) is not None:
        _log.warning(
            "no run of this job has a checkpoint, so one begins. The newest of another is %s: %s; --resume %s goes on with that.",
            other, "; ".join(differing[other]), other,
        )  # fmt: skip
    return found


def _newest(folders: Sequence[Path]) -> Path | None:
    """The folder whose newest checkpoint is the last written; None where none has any."""
    written = [(time, folder) for folder in folders if (time := newest_marker(RunFolder(folder).checkpoints))]
    return max(written, key=itemgetter(0), default=(0.0, None))[1]


def _differences(folder: Path, job: Job) -> list[str]:
    """What makes the job that began in a run folder another one: what is trained, from what and on what."""
    try:
        before = _begun(folder / "job.yaml")
    except BadInput as error:
        return [str(error)]
    now = with_whole_paths(job)
    old, new = _places(before), _places(now)
    moved = [key for key in old.keys() & new.keys() if not _may_be_same(old[key], new[key])]
    return [*_changes(before, now), *(f"{key} was {old[key]}, is {new[key]}" for key in moved)]


def _places(job: Mapping[str, Any]) -> dict[str, str]:
    """The files that a job trains on and from, by key."""
    leaves = _leaves({"model": job["model"], "data": job["data"]})
    return {key: str(value) for key, value in leaves if key == "model" or key.rpartition(".")[2] in _PLACES}


def _may_be_same(before: str, now: str) -> bool:
    """Whether two whole paths may be of one file: one that is not here any more has moved with its machine, and only its
    name can tell."""
    old, new = Path(before.removeprefix("hf:")), Path(now.removeprefix("hf:"))
    return old.resolve() == new.resolve() or (not old.exists() and old.name == new.name)


def check_unchanged(folder: RunFolder, job: Job, *, accepted: bool) -> list[str]:
    """What has changed in the job since the run began, a line each, where that is accepted.

    Raises BadInput with every key where it is not, and where the model has other shapes. Where the run's job.yaml is gone
    there is nothing to compare.
    """
    _check_model(folder, job)
    file = folder.path / "job.yaml"
    if not file.exists():
        return []
    try:
        before = _begun(file)
    except BadInput as error:
        if accepted:
            return [f"{file} cannot be read, so nobody knows what has changed in the job"]
        raise BadInput(
            f"{error} Restore the file; or go on under the job as it is now with --accept-changes."
        ) from None
    changes = list(_changes(before, job.spec.to_dict()))
    if changes and not accepted:
        fixed = [key for key in _MUST_STAY if any(change.startswith(f"{key} ") for change in changes)]
        same_tokens = (
            " (only while its tokens are the same)" if any(each.startswith("data.") for each in changes) else ""
        )
        remedy = (
            f"; under another {fixed[0]} only a new run can begin."
            if fixed
            else f", or add --accept-changes to go on so{same_tokens}."
        )
        raise BadInput(
            f"{job.path}: the job has changed since the run in {folder.path} began: {'; '.join(changes)}. Set these back (also what "
            f"was given with --set){remedy}"
        )
    return [f"the job has changed: {change}" for change in changes]


def asked_otherwise(folder: RunFolder, job: Job) -> list[str]:
    """What the job, whose `plan` is a strategy, asks of a plan otherwise than when the run in the folder began, as `check_unchanged`
    says it; nothing where nobody knows."""
    try:
        before = _begun(folder.path / "job.yaml")
    except BadInput:
        return []
    asks = [{key: spec[key] for key in ("plan", "constraints")} for spec in (before, job.spec.to_dict())]
    return list(_unlike(*asks).values())


def _check_model(folder: RunFolder, job: Job) -> None:
    """Raise BadInput where the job's model is not the run's. Checked before the run's plan is bound to it: that would blame the plan."""
    if job.described is None:
        return
    try:
        saved = load_model("model.yaml", folder.path)
    except BadInput:  # gone or damaged: the checkpoint has it too
        return
    check_model(saved, job.described, folder.path / "model.yaml")


def _begun(file: Path) -> dict[str, Any]:
    """The job that a run folder keeps. Raises BadInput."""
    data, source = read_yaml(file, "job file")
    return build(JobSpec, data, source, "job file").to_dict()


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What has changed of every key that says what is trained."""
    for key, change in _unlike(before, now).items():
        counts = any(f"{key}.".startswith(f"{each}.") for each in _TRAINED)
        if counts and key not in _MAY_CHANGE and key.rpartition(".")[2] not in _PLACES:
            yield change


def _unlike(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """`train.lr was 0.0003, is 0.001`, by every key that has changed."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    unlike = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: f"{key} was {old.get(key)}, is {new.get(key)}" for key in unlike}


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{key}.")
        elif isinstance(inner, list) and inner and all(isinstance(each, Mapping) for each in inner):
            for index, each in enumerate(inner):
                yield from _leaves(each, f"{prefix}{key}.{index}.")
        else:
            yield f"{prefix}{key}", inner
