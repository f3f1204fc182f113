"""Before anything is written: what each rank reads and finds, and what all ranks then agree to run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hethub.communicator import Rendezvous
from hethub.communicator.joining.islands import parse_islands
from hethub.kernels.device import Device, choose_device
from hethub.predictor import check_memory, predict
from hethub.predictor.cost.profile import ProfileSpec, profile_for
from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.json_hash import json_hash
from hethub.runtime.launch.consensus import decided, exchange, together
from hethub.runtime.launch.preflight import (
    Facts,
    check_cluster,
    check_versions,
    detect_cluster,
    facts_from,
    own_facts,
    to_row,
)  # fmt: skip
from hethub.runtime.launch.rendezvous import LaunchInfo
from hethub.runtime.measure.autotune import measure_ranks
from hethub.runtime.run_folder import RunFolder, default_run_folder
from hethub.runtime.state.storage import DTYPES
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, load_job, load_plan_of
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import check_executable
from hethub.spec.plan import PlanSpec, load_plan

_PLANNING_SECONDS = 3600.0  # how long the other ranks wait for rank 0's plan


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What `hethub train` was asked for."""

    job_path: Path
    plan_path: Path | None = None
    run_dir: Path | None = None
    resume: Path | None = None
    profile_path: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What one rank has read and found before it knows of the others."""

    job: Job
    device: Device
    dataset: Dataset
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks run: decided by rank 0, equal everywhere."""

    layout: Layout
    prediction: dict[str, Any]
    folder: RunFolder
    warnings: list[str]
    profile: ProfileSpec | None  # what counted instead of estimates
    measured: list[str]  # what ranks found of themselves, a line each
    relays: dict[str, Any] | None  # what the run communicated over before, where it is resumed


def read_job(request: TrainRequest, info: LaunchInfo) -> Job | BadInput:
    """The job, or what is wrong with it, kept until the ranks can speak with one voice.

    Over several nodes the job names the network they meet on, so there its faults are raised at once.
    """
    try:
        return load_job(request.job_path, request.overrides)
    except BadInput as fault:
        if info.is_multi_node:
            raise
        return fault


def prepare(job: Job | BadInput, info: LaunchInfo) -> Prepared:
    """This rank's device and data, checked against the job. Raises BadInput."""
    if isinstance(job, BadInput):
        raise job
    if job.model.family != "llama":
        raise BadInput(
            f"{job.path}: model '{job.model.name}' is of family {job.model.family}; hethub plans and predicts it, but trains "
            "only llama. Choose a model of that family."
        )
    device = device_in(job.cluster, info)
    train = job.spec.train
    if not device.supports(DTYPES[train.precision]):
        raise BadInput(
            f"{job.path}: train.precision is {train.precision}, which {device.name} (rank {info.rank}) does not compute in; "
            "choose fp16 or fp32."
        )
    dataset = open_dataset(job.spec.data, job.base, seq_len=train.seq_len, seed=train.seed, vocab=job.model.vocab)
    read = [job.spec.to_dict(), job.model.to_dict(), None if job.cluster is None else job.cluster.to_dict()]
    facts = own_facts(
        rank=info.rank, local_rank=info.local_rank, vendor=device.vendor, device=device.name,
        memory_bytes=device.memory_bytes(), job=json_hash(read), tokens=dataset.fingerprint(),
    )  # fmt: skip
    return Prepared(job=job, device=device, dataset=dataset, facts=facts)


def device_in(cluster: ClusterSpec | None, info: LaunchInfo) -> Device:
    """This rank's device, made current: a CPU where the cluster or the node's vendor is emulated. Raises BadInput."""
    if cluster is not None:
        _check_cluster_alone(cluster, info)
    named = cluster is not None and (cluster.emulated or cluster.places[info.rank].node.vendor is not None)
    device = choose_device(info.local_rank, info.local_size, kind="cpu" if named else "auto")
    device.activate()
    return device


def _check_cluster_alone(cluster: ClusterSpec, info: LaunchInfo) -> None:
    """What can be refused before the ranks have met."""
    if cluster.size != info.size:
        started = f"{info.launcher} started {info.size} rank{'s' if info.size != 1 else ''}"
        raise BadInput(
            f"cluster '{cluster.name}' has {cluster.size} accelerators, but "
            f"{'one process runs alone' if info.launcher == 'alone' else started}; start one rank per accelerator "
            f"(mpirun -n {cluster.size} hethub train …), or use `cluster: detect`."
        )


def agree(request: TrainRequest, prepared: Prepared, meeting: Rendezvous) -> Agreed:
    """Versions, vendors, data and plan, the same on every rank, or BadInput on every rank."""
    job = prepared.job
    facts = facts_from(exchange(meeting, "versions and data", to_row(prepared.facts)))
    warnings = together(meeting, "versions", lambda: check_versions(facts))
    cluster = together(meeting, "cluster", lambda: agreed_cluster(job, facts))
    profile, lines = together(meeting, "profile", lambda: profile_for(job, request.profile_path)), list[str]()
    if profile is None and _ranks_measure(request, job, cluster, facts):
        measured = measure_ranks(job, prepared.device, meeting, cluster)
        cluster, profile, lines = measured.cluster, measured.profile, measured.lines
    shared = decided(
        meeting, "plan", lambda: _decide(request, job, cluster, profile), patience_seconds=_PLANNING_SECONDS
    )
    return Agreed(
        layout=bind(PlanSpec.model_validate(shared["plan"]), job.model, cluster),
        prediction=shared["prediction"],
        folder=RunFolder(Path(shared["folder"])),
        warnings=warnings,
        profile=profile,
        measured=lines,
        relays=shared["relays"],
    )


def _ranks_measure(request: TrainRequest, job: Job, cluster: ClusterSpec, facts: list[Facts]) -> bool:
    """Whether the ranks find out about themselves before a plan is made.

    By default where no micro-batch is given, on devices: CPU ranks of one machine share its cores, so what one measures
    depends on what else runs there.
    """
    wished = job.spec.measure
    if wished == "never" or cluster.emulated or request.plan_path or job.plan_path or request.resume:
        return False
    on_devices = any(own.vendor != "cpu" for own in facts)
    return wished == "always" or (on_devices and job.spec.constraints.micro_batch is None)


def agreed_cluster(job: Job | None, facts: list[Facts]) -> ClusterSpec:
    """The job's cluster, which the ranks must match, or what the ranks found. Raises BadInput."""
    if job is None or job.cluster is None:
        named = os.environ.get("HETHUB_ISLANDS")
        return detect_cluster(facts, parse_islands(named, len(facts)) if named else None)
    check_cluster(job.cluster, facts)
    return job.cluster


def _decide(request: TrainRequest, job: Job, cluster: ClusterSpec, profile: ProfileSpec | None) -> dict[str, Any]:
    """Plan, prediction and run folder, on rank 0. Nothing is written yet."""
    folder = RunFolder(request.resume or request.run_dir or default_run_folder(request.job_path))
    if request.resume is not None:
        folder.check_resumable()
    else:
        folder.check_new()
    plan_file, constraints = _plan_file(request, job, folder, cluster), job.spec.constraints
    if plan_file is not None:
        layout = bind(load_plan_of(job, plan_file), job.model, cluster)
        check_executable(layout)
        check_memory(layout, constraints.reserve)
        strategy, prediction = "plan file", predict(layout, reserve=constraints.reserve, profile=profile)
    else:
        from hethub.planner import plan as make_plan  # only rank 0 plans, so only it loads the search

        strategy = job.spec.plan
        result = make_plan(
            job.model, cluster, job.spec.train.batch, constraints, strategy=strategy, with_bounds=False, profile=profile
        )
        layout, prediction = bind(result.plan, job.model, cluster), result.prediction
    return {
        "plan": layout.plan.model_dump(mode="json"),
        "prediction": {"strategy": strategy, **prediction.to_dict()},
        "folder": str(folder.path.resolve()),
        "relays": folder.relays() if request.resume is not None else None,
    }


def _plan_file(request: TrainRequest, job: Job, folder: RunFolder, cluster: ClusterSpec) -> Path | None:
    """The plan file to run, None where the job's strategy is to find the plan.

    A resumed run keeps its plan, unless the job has moved to another cluster since.
    """
    named = request.plan_path or job.plan_path
    if named is not None or request.resume is None:
        return named
    saved = load_plan(folder.plan)
    return folder.plan if (saved.cluster, len(saved.ranks)) == (cluster.name, cluster.size) else None
