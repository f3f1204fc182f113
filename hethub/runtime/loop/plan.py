"""Plan: what all ranks will run, decided by rank 0 before anything is written."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hethub.communicator import Rendezvous
from hethub.kernels.device import Device
from hethub.predictor import check_memory, predict
from hethub.predictor.cost.profile import ProfileSpec, load_profile, profile_for
from hethub.predictor.cost.software import hethub_software
from hethub.runtime.checkpoint import candidates, check_present, finish_cut_off, none_whole
from hethub.runtime.going_on import asked_otherwise, check_unchanged
from hethub.runtime.launch.consensus import broadcast, consensus
from hethub.runtime.launch.preflight import Facts
from hethub.runtime.measure.autotune import measure_ranks
from hethub.runtime.measure.speed_classes import keep_forbidden, tell_apart_as
from hethub.runtime.run_claim import RunClaim
from hethub.runtime.run_folder import FILES, RunFolder, default_run_folder, run_and_step, same_ranks
from hethub.spec.cluster import ClusterSpec, load_cluster
from hethub.spec.errors import BadInput, asked_by
from hethub.spec.job import CheckpointSpec, Job, JobSpec, load_plan_of
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import check_executable
from hethub.spec.layout.state import bind_file
from hethub.spec.plan import PlanSpec, load_plan
from hethub.spec.program import ProgramPlanSpec, is_program_plan

_PLANNING_SECONDS = 3600.0  # how long the other ranks wait for rank 0's plan


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What all ranks run, equal everywhere."""

    layout: Layout
    prediction: dict[str, Any]
    folder: RunFolder
    profile: ProfileSpec | None  # what counted instead of estimates
    notes: list[str]  # what ranks found of themselves and in the run folder, a line each
    resumes: bool  # whether a checkpoint is to be restored
    behind: int | None  # that of which step, where it was named
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
    claim: RunClaim,
    accept_changes: bool,
) -> Planned:
    """The plan named or found, its prediction and its run folder, the same on every rank, or BadInput on every rank.

    Rank 0 claims the folder for this job before it plans. Where a plan is to be found and the job wishes it, the ranks
    measure themselves first, and the layout's cluster tells unlike ones apart, as it does where a run goes on.
    """
    profile, lines = consensus(meeting, "profile", lambda: profile_for(job, profile_path)), list[str]()
    opened, plan_file = None, None  # on rank 0

    def lacks_plan() -> bool:
        nonlocal opened, plan_file
        opened = open_folder(job, run_dir, resume, claim, accept_changes=accept_changes)
        plan_file = _plan_file(job, plan_path, opened, cluster)
        return plan_file is None

    is_planned = broadcast(meeting, "run folder", lacks_plan, patience_seconds=_PLANNING_SECONDS)
    if is_planned and profile is None and _ranks_measure(job, cluster, facts):
        measured = measure_ranks(job, device, meeting, cluster)
        cluster, profile, lines = measured.cluster, measured.profile, measured.lines

    def decide() -> dict[str, Any]:
        assert opened is not None
        return _decide(job, cluster, profile, plan_file, opened)

    found = broadcast(meeting, "plan", decide, patience_seconds=_PLANNING_SECONDS)
    return Planned(
        layout=bind(PlanSpec.model_validate(found["plan"]), job.model, ClusterSpec.model_validate(found["cluster"])),
        prediction=found["prediction"],
        folder=RunFolder(Path(found["folder"])),
        profile=None if found["profile"] is None else ProfileSpec.model_validate(found["profile"]),
        notes=[*lines, *found["notes"], *left_at_defaults(job, facts)],
        resumes=found["resumes"],
        behind=found["behind"],
        relays=found["relays"],
    )


def left_at_defaults(job: Job, facts: Sequence[Facts]) -> list[str]:
    """Warnings where ranks are devices and the job is a laptop's."""
    on_devices = any(own.vendor != "cpu" for own in facts)
    return [f"warning: {text}" for text in _defaults_of_laptops(job.spec)] if on_devices else []


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


class OpenedFolder(NamedTuple):
    """The run folder on rank 0, claimed and looked through; nothing is written to it yet."""

    folder: RunFolder
    goes_on: bool  # a run began here before
    resumes: bool  # and has a checkpoint
    behind: int | None  # the step of the checkpoint that was named
    notes: list[str]


def open_folder(
    job: Job, run_dir: Path | None, resume: Path | None, claim: RunClaim, *, accept_changes: bool
) -> OpenedFolder:
    """The folder named, or that of the checkpoint named, or a new one. What a run left that was cut off before its first
    checkpoint is begun again."""
    step, note = None, None
    if resume is not None:
        resume, step = run_and_step(resume)
        if not resume.is_dir():
            RunFolder(resume).check_resumable()
    named = resume or run_dir
    if named is None:
        folder = RunFolder(claim.take_new(default_run_folder(job.path)))
    else:
        folder, note = RunFolder(named), claim.take(named)
        with suppress(OSError):
            finish_cut_off(folder.checkpoints)
        check_present(folder.checkpoints, step)
    was_cut_off = claim.took_over and not candidates(folder.checkpoints)
    if resume is None:
        folder.check_new(was_cut_off=was_cut_off)
        if not was_cut_off:
            _check_apart(folder, job)
    else:
        folder.check_resumable(was_cut_off=was_cut_off)
        if not (was_cut_off or candidates(folder.checkpoints)):
            raise none_whole(folder.checkpoints)
    notes = [*([] if note is None else [note]), *_kept_for_good(job.spec.checkpoint)]
    if was_cut_off:
        notes.append(f"{folder.path}: the run here was cut off before its first checkpoint; it begins again at step 1")
    elif resume is not None:
        notes += check_unchanged(folder, job, accepted=accept_changes)
    return OpenedFolder(folder, resume is not None, resume is not None and not was_cut_off, step, notes)


def _kept_for_good(spec: CheckpointSpec) -> list[str]:
    """What to say where not every step that `keep_every` names is one that is saved."""
    if spec.keep_every is None or (spec.every_steps is not None and spec.keep_every % spec.every_steps == 0):
        return []
    asked = (
        f"warning: checkpoint.keep_every {spec.keep_every} is no multiple of every_steps {spec.every_steps or 'null'}"
    )
    if spec.every_steps is None:
        return [f"{asked}: checkpoints are written at the end alone, and none before stays"]
    common = math.lcm(spec.keep_every, spec.every_steps)
    return [f"{asked}: only those of steps {common}, {2 * common}, … stay for good"]


def _check_apart(folder: RunFolder, job: Job) -> None:
    """Raises BadInput where a new run's files would take the place of those that its job is read from."""
    read = {path.resolve() for path in (*job.files, job.plan_path) if path is not None}
    if lost := [str(path) for name in FILES if (path := folder.path / name).resolve() in read]:
        raise BadInput(
            f"{' and '.join(lost)}: the job is read from here, and a run writes files of the same name; give another --run-dir."
        )


def _decide(
    job: Job, cluster: ClusterSpec, profile: ProfileSpec | None, plan_file: Path | None, opened: OpenedFolder
) -> dict[str, Any]:
    """Plan, prediction and run folder, on rank 0. Nothing is written yet."""
    folder, goes_on, resumes, behind, notes = opened
    software, constraints = hethub_software(job.spec.train.compile), job.spec.constraints
    if goes_on and not folder.plan.exists():
        notes.append(f"{folder.plan} is missing: the plan is the job's")
    if profile is None and goes_on and plan_file is not None:
        cluster, profile = _measured_before(folder, job, cluster)
    if plan_file is not None:
        plan = load_plan_of(job, plan_file)
        if resumes and plan_file == folder.plan:  # of this very model, which may have another name now: a folder's, say
            plan = plan.replace(model=job.model.name, job=None)
        layout = bind_file(plan_file, plan, job.model, cluster)
        check_executable(layout)
        check_memory(layout, constraints.reserve)
        strategy = "plan file"
        prediction = predict(layout, reserve=constraints.reserve, profile=profile, software=software)
    else:
        from hethub.planner import plan as make_plan  # only rank 0 plans, so only it loads the search

        strategy = job.spec.plan
        with asked_by(job.path, job.source.place):
            result = make_plan(
                job.model,
                cluster,
                job.spec.train.batch,
                keep_forbidden(constraints, cluster),
                strategy=strategy,
                with_bounds=False,
                profile=profile,
                software=software,
            )
        layout, prediction = bind(result.plan, job.model, cluster), result.prediction
    return {
        "plan": layout.plan.model_dump(mode="json"),
        "cluster": cluster.to_dict(),
        "prediction": {"strategy": strategy, **prediction.to_dict()},
        "profile": None if profile is None else profile.to_dict(),
        "folder": str(folder.path.resolve()),
        "relays": folder.relays(cluster) if goes_on else None,
        "resumes": resumes,
        "behind": behind,
        "notes": notes,
    }


def _plan_file(job: Job, plan_path: Path | None, opened: OpenedFolder, cluster: ClusterSpec) -> Path | None:
    """The plan file to run, None where the job's strategy is to find the plan.

    A run that goes on keeps its plan, unless the job has moved to another cluster or batch since or asks for another plan; one
    that begins again has trained nothing, so its model may be another by now, and its plan, or the file, of no use.
    """
    named, folder = plan_path or job.plan_path, opened.folder
    if not opened.goes_on or not folder.plan.exists():
        return named
    try:
        saved = load_plan(folder.plan)
    except BadInput as error:
        if not opened.resumes:
            return named
        if is_program_plan(folder.plan):
            raise BadInput(
                f"{folder.path}: the run here is of strategy hap, and no other plan takes its checkpoints. Go on with --set plan=hap, "
                "or begin a new run."
            ) from None
        if named is not None:
            return named
        raise BadInput(
            f"{error} Restore the plan, name one with --plan, or delete it: one is then found anew."
        ) from None
    fits = opened.resumes or saved.job is None or saved.job.model == job.model
    if named is None and fits and is_kept(saved, saved.num_ranks, job, cluster) and not asks_anew(job, opened):
        return folder.plan
    return named


def asks_anew(job: Job, opened: OpenedFolder) -> bool:
    """Whether the job asks for another plan than when the run began; that it does is noted."""
    changes = asked_otherwise(opened.folder, job)
    if changes:
        opened.notes.append(f"planned anew, since the job asks for another plan: {'; '.join(changes)}")
    return bool(changes)


def is_kept(saved: PlanSpec | ProgramPlanSpec, ranks: int, job: Job, cluster: ClusterSpec) -> bool:
    """Whether a resumed run keeps its plan: while its batch and precision are the job's and the cluster has its name, as
    many ranks and, where the plan says for which it was made, such accelerators."""
    train, before = job.spec.train, cluster if saved.job is None else saved.job.cluster
    made_for = (saved.global_batch, saved.seq_len, saved.precision, saved.cluster, ranks)
    now = (train.global_batch, train.seq_len, train.precision, cluster.name, cluster.size)
    return made_for == now and same_ranks(before, tell_apart_as(cluster, before))


def _measured_before(folder: RunFolder, job: Job, cluster: ClusterSpec) -> tuple[ClusterSpec, ProfileSpec | None]:
    """What a run that goes on under a plan had measured of these ranks, so that it goes on counting, and the cluster as that
    tells them apart; None where it had measured nothing, or with other software, another `train.compile` or other ranks
    than these."""
    try:
        made_for = load_plan(folder.plan).job
        profile = load_profile(folder.profile)
        profile.check_version()
        profile.check_devices(cluster.nodes, job.spec.train.precision)
        told = tell_apart_as(cluster, load_cluster(folder.cluster))
    except BadInput:
        return cluster, None
    is_alike = folder.has_ranks_of(told) and (made_for is None or made_for.compile == job.spec.train.compile)
    return (told, profile) if is_alike else (cluster, None)


def _defaults_of_laptops(spec: JobSpec) -> list[str]:
    """What a job leaves at defaults that are meant for a laptop, a warning each: on devices nobody wants them."""
    train, checkpoint = spec.train, spec.checkpoint
    left = []
    if "precision" not in train.model_fields_set:
        left.append(f"train.precision is left at {train.precision}; devices compute in bf16 many times as fast")
    if "steps" not in train.model_fields_set:
        left.append(f"train.steps is left at {train.steps}; say how long to train")
    if "every_steps" not in checkpoint.model_fields_set:
        left.append(
            f"checkpoint.every_steps is left at {checkpoint.every_steps}; a large model's take long, and hundreds of steps lie between"
        )
    return left
