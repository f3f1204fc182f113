"""Plan: what all ranks will run, decided by rank 0 before anything is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hethub.communicator import Rendezvous
from hethub.kernels.device import Device
from hethub.predictor import check_memory, predict
from hethub.predictor.cost.profile import ProfileSpec, profile_for
from hethub.runtime.launch.consensus import broadcast, consensus
from hethub.runtime.launch.preflight import Facts
from hethub.runtime.measure.autotune import measure_ranks
from hethub.runtime.run_folder import RunFolder, default_run_folder
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import Job, load_plan_of
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import check_executable
from hethub.spec.plan import PlanSpec, load_plan

_PLANNING_SECONDS = 3600.0  # how long the other ranks wait for rank 0's plan


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What all ranks run, equal everywhere."""

    layout: Layout
    prediction: dict[str, Any]
    folder: RunFolder
    profile: ProfileSpec | None  # what counted instead of estimates
    measured: list[str]  # what ranks found of themselves, a line each
    relays: dict[str, Any] | None  # what the run communicated over before, where it is resumed


def choose_plan(
    meeting: Rendezvous,
    job: Job,
    device: Device,
    cluster: ClusterSpec,
    facts: Sequence[Facts],
    *,
    plan_path: Path | None,
    profile_path: Path | None,
    run_dir: Path | None,
    resume: Path | None,
) -> Planned:
    """The plan named or found, its prediction and its run folder, the same on every rank, or BadInput on every rank.

    Where the job wishes it, the ranks measure themselves first, and `cluster` tells unlike ones apart.
    """
    profile, lines = consensus(meeting, "profile", lambda: profile_for(job, profile_path)), list[str]()
    makes_plan = not (plan_path or job.plan_path or resume)
    if profile is None and makes_plan and _ranks_measure(job, cluster, facts):
        measured = measure_ranks(job, device, meeting, cluster)
        cluster, profile, lines = measured.cluster, measured.profile, measured.lines
    folder = RunFolder(resume or run_dir or default_run_folder(job.path))
    resumes = resume is not None
    found = broadcast(
        meeting,
        "plan",
        lambda: _decide(job, cluster, profile, plan_path, folder, resumes=resumes),
        patience_seconds=_PLANNING_SECONDS,
    )
    return Planned(
        layout=bind(PlanSpec.model_validate(found["plan"]), job.model, cluster),
        prediction=found["prediction"],
        folder=RunFolder(Path(found["folder"])),
        profile=profile,
        measured=lines,
        relays=found["relays"],
    )


def _ranks_measure(job: Job, cluster: ClusterSpec, facts: Sequence[Facts]) -> bool:
    """Whether the ranks find out about themselves before a plan is made.

    By default where no micro-batch is given, on devices: CPU ranks of one machine share its cores, so what one measures
    depends on what else runs there.
    """
    wished = job.spec.measure
    if wished == "never" or cluster.emulated:
        return False
    on_devices = any(own.vendor != "cpu" for own in facts)
    return wished == "always" or (on_devices and job.spec.constraints.micro_batch is None)


def _decide(
    job: Job,
    cluster: ClusterSpec,
    profile: ProfileSpec | None,
    plan_path: Path | None,
    folder: RunFolder,
    *,
    resumes: bool,
) -> dict[str, Any]:
    """Plan, prediction and run folder, on rank 0. Nothing is written yet."""
    if resumes:
        folder.check_resumable()
    else:
        folder.check_new()
    plan_file, constraints = _plan_file(job, plan_path, folder, cluster, resumes=resumes), job.spec.constraints
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
        "relays": folder.relays() if resumes else None,
    }


def _plan_file(
    job: Job, plan_path: Path | None, folder: RunFolder, cluster: ClusterSpec, *, resumes: bool
) -> Path | None:
    """The plan file to run, None where the job's strategy is to find the plan.

    A resumed run keeps its plan, unless the job has moved to another cluster since.
    """
    named = plan_path or job.plan_path
    if named is not None or not resumes:
        return named
    saved = load_plan(folder.plan)
    return folder.plan if (saved.cluster, len(saved.ranks)) == (cluster.name, cluster.size) else None
