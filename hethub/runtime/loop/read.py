"""Read: what one rank reads and finds before it knows of the others."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hethub.kernels.device import Device
from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.launch.device import open_device
from hethub.runtime.launch.launcher_environment import LaunchInfo
from hethub.runtime.launch.preflight import Facts, own_facts
from hethub.runtime.state.storage import DTYPES
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, load_job

_TIMEOUT_SECONDS = 60.0  # of a meeting that is only to say what is wrong with the job


class JobRead(NamedTuple):
    """The job or what is wrong with it, and what the ranks need to know of it to meet."""

    job: Job | BadInput
    cluster: ClusterSpec | None
    timeout_seconds: float


class Inputs(NamedTuple):
    """What a rank trains, on what and from what, checked against each other."""

    job: Job
    device: Device
    dataset: Dataset
    facts: Facts


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


def open_inputs(job: Job | BadInput, info: LaunchInfo) -> Inputs:
    """This rank's device and data for the job. Raises BadInput, the one kept by `read_job` first."""
    if isinstance(job, BadInput):
        raise job
    if job.model.family != "llama":
        raise BadInput(
            f"{job.path}: model '{job.model.name}' is of family {job.model.family}; hethub plans and predicts it, but trains "
            "only llama. Choose a model of that family."
        )
    device = open_device(job.cluster, info)
    train = job.spec.train
    if not device.supports(DTYPES[train.precision]):
        raise BadInput(
            f"{job.path}: train.precision is {train.precision}, which {device.name} (rank {info.rank}) does not compute in; "
            "choose fp16 or fp32."
        )
    dataset = open_dataset(job.spec.data, job.base, seq_len=train.seq_len, seed=train.seed, vocab=job.model.vocab)
    read = [job.spec.to_dict(), job.model.to_dict(), None if job.cluster is None else job.cluster.to_dict()]
    facts = own_facts(info, device, read=read, tokens=dataset.fingerprint())
    return Inputs(job=job, device=device, dataset=dataset, facts=facts)
