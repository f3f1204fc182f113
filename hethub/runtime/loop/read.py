"""Read: what one rank reads and finds before it knows of the others."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hethub.communicator import Rendezvous
from hethub.kernels.device import Device
from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data.opening import check_sources, check_tokenizer, data_sections, overlap
from hethub.runtime.data.tokenise import tokenise_data
from hethub.runtime.launch.consensus import consensus
from hethub.runtime.launch.device import open_device
from hethub.runtime.launch.launcher_environment import LaunchInfo
from hethub.runtime.measure.measurement_cache import cache_folder
from hethub.runtime.state.storage import DTYPES
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, TrainSpec, load_job

READING_SECONDS = 30 * 86400.0  # how long ranks wait for each other's tokens; a dead one is noticed by the watch
MOST_EPOCHS = 4  # that are worth about as much as new text (Muennighoff et al. 2023)
HELD_OUT_SEED = 0  # of the order of held-out samples: the same for every run, whatever its seed
_TIMEOUT_SECONDS = 60.0  # of a meeting that is only to say what is wrong with the job


class JobRead(NamedTuple):
    """The job or what is wrong with it, and what the ranks need to know of it to meet."""

    job: Job | BadInput
    cluster: ClusterSpec | None
    timeout_seconds: float


class Data(NamedTuple):
    """What a run learns from and is evaluated on, and what is to be said of them."""

    training: Dataset
    held_out: Dataset | None
    warnings: list[str]

    @property
    def fingerprint(self) -> str:
        return "-".join(each.fingerprint for each in (self.training, self.held_out) if each is not None)

    def epochs(self, train: TrainSpec, done: int) -> tuple[list[str], list[str]]:
        """How often the job reads each source, of which `done` steps have read already, perhaps in other batches; and what to
        say of those that it reads too often."""
        training, asked = self.training, (max(done, train.steps), train.global_batch)
        found = [(f"{_times(epochs)} of {stream.name}", epochs, stream.num_windows)
                 for stream, epochs in zip(training.streams, training.epochs(*asked), strict=True)]  # fmt: skip
        return [f"data: {sum(training.position(*asked)):,} samples, {', '.join(said for said, _, _ in found)}"], [
            f"the job takes {said}, which has {windows:,} samples of seq_len {training.seq_len}: beyond {MOST_EPOCHS} epochs text that "
            "repeats teaches less and less. Is this all that you have?"
            for said, epochs, windows in found
            if epochs > MOST_EPOCHS
        ]


def read_job(path: Path, overrides: Sequence[str], info: LaunchInfo) -> JobRead:
    """The job; its faults are kept until the ranks can speak with one voice.

    Over several nodes the job names the network they meet on, so there its faults are raised at once.
    """
    try:
        job = load_job(path, overrides)
    except BadInput as fault:
        if info.is_multi_node:
            raise
        return JobRead(job=fault, cluster=None, timeout_seconds=_TIMEOUT_SECONDS)
    return JobRead(job=job, cluster=job.cluster, timeout_seconds=job.spec.communicator.timeout_seconds)


def check_job(job: Job | BadInput, info: LaunchInfo) -> tuple[Job, Device]:
    """The job and this rank's device for it. Raises BadInput, the one kept by `read_job` first."""
    if isinstance(job, BadInput):
        raise job
    job.model.check_trained(job.source)
    device = open_device(job.cluster, info)
    train = job.spec.train
    if not device.supports(DTYPES[train.precision]):
        raise BadInput(
            f"{job.path}: train.precision is {train.precision}, which {device.name} (rank {info.rank}) does not compute in; "
            "choose fp16 or fp32."
        )
    return job, device


def file_contents(job: Job) -> list[dict[str, Any] | None]:
    """Return what all ranks must have read alike of job, model and cluster."""
    return [part if part is None else part.to_dict() for part in (job.spec, job.described, job.cluster)]


def read_data(meeting: Rendezvous, job: Job, info: LaunchInfo, vocab: int) -> Data:
    """The job's data for a model of `vocab` tokens, once every rank has it: one rank a host makes tokens of its texts,
    and all map them. Raises BadInput on all ranks."""
    consensus(meeting, "tokens", lambda: _make_tokens(job, info), patience_seconds=READING_SECONDS)
    return consensus(meeting, "data", lambda: open_data(job, vocab), patience_seconds=READING_SECONDS)


def _make_tokens(job: Job, info: LaunchInfo) -> None:
    check_sources(job)
    cache, _ = _token_cache()
    if info.local_rank == 0 and cache is not None:
        for spec in data_sections(job).values():
            tokenise_data(spec, job.base, cache, progress=info.rank == 0)


def _token_cache() -> tuple[Path | None, list[str]]:
    """Where tokens made of text are kept; where they cannot be, what to say, for the run goes on."""
    folder = cache_folder() / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder, []
        reason = "permission denied"
    except OSError as error:
        reason = str(error.strerror)
    return None, [
        f"tokens cannot be kept in {folder} ({reason}), so every rank makes them by itself; name a folder in HETHUB_CACHE"
    ]


def open_data(job: Job, vocab: int) -> Data:
    """The job's data for a model of `vocab` tokens. Raises BadInput."""
    train, evaluation, folder = job.spec.train, job.spec.eval, job.hugging_face_folder
    cache, warnings = _token_cache()
    settings: dict[str, Any] = {"seq_len": train.seq_len, "vocab": vocab, "cache_dir": cache}
    training = open_dataset(job.spec.data, job.base, seed=train.seed, **settings)
    if folder is not None and (warning := check_tokenizer(training, folder)):
        warnings.append(warning)
    if evaluation is None:
        return Data(training, None, warnings)
    held_out = open_dataset(evaluation.data, job.base, seed=HELD_OUT_SEED, **settings)
    if held_out.tokenizer != training.tokenizer:
        raise BadInput(
            f"{job.path}: eval.data has tokens of another tokenizer than data, so its loss would say nothing. Tokenise both alike."
        )
    held_out.check_epoch(evaluation.batches * train.global_batch)
    if shared := overlap(job.spec.data, evaluation.data, job.base):
        warnings.append(f"eval reads {shared}, which is trained on too: its loss says nothing of unseen text")
    return Data(training, held_out, warnings)


def _times(epochs: float) -> str:
    return f"{epochs:.3g} epochs" if epochs >= 1 else f"{100 * epochs:.3g} %"
