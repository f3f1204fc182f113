"""A run under a program on one rank, in a line: read, meet, agree, trace, plan, build, restore, loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hethub.communicator import Rendezvous, World
from hethub.kernels.device import Device
from hethub.predictor.cost.profile import assumed_speeds
from hethub.runtime.checkpoint.manager import CheckpointFolder
from hethub.runtime.data import Dataset
from hethub.runtime.going_on import folder_to_resume
from hethub.runtime.launch.consensus import all_gather, broadcast, consensus
from hethub.runtime.launch.device import open_device
from hethub.runtime.launch.launcher_environment import LaunchInfo, launch_info, one_voice_per_node
from hethub.runtime.launch.preflight import Agreed, Facts, agree, folder_asked_for, own_facts
from hethub.runtime.launch.rendezvous import meet
from hethub.runtime.launch.session import watched, watched_meeting
from hethub.runtime.loop.build import BUILDING_SECONDS, connect_ranks
from hethub.runtime.loop.plan import OpenedFolder, asks_anew, is_kept, left_at_defaults, open_folder
from hethub.runtime.loop.read import Data, file_contents, read_data, read_job
from hethub.runtime.loop.steps import Ended, StepLoop, assumed_note
from hethub.runtime.program.planned import plan_program, priced, trace_job
from hethub.runtime.program.subject import Subject, open_subject
from hethub.runtime.program.trainer import ProgramTrainer, on_device
from hethub.runtime.run_claim import RunClaim
from hethub.runtime.run_folder import RunFolder
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec, Job
from hethub.spec.program import (
    ProgramFor,
    ProgramPlanSpec,
    check_plannable,
    is_for_cluster,
    is_program_plan,
    load_program_plan,
    prediction_of,
    program_plan_text,
)
from hethub.synthesis.capture.proof import is_alike_in_eval
from hethub.synthesis.graph import Graph, fingerprint
from hethub.synthesis.lower import Step, digest, digest_of_start
from hethub.synthesis.program import Program

ANY_TOKEN = 2**31  # a module of the user's says itself which tokens it knows


@dataclass(frozen=True, kw_only=True)
class ProgramSummary(Ended):
    """How a run under a program ended, on rank 0."""

    items: str
    items_per_step: int


class _Made(NamedTuple):
    """A module made, and where it will run."""

    job: Job
    device: Device
    subject: Subject


class _Opened(NamedTuple):
    """What a rank trains, on what and from what, traced."""

    job: Job
    device: Device
    subject: Subject
    data: Data | None
    graph: Graph
    start: int  # digest of all that the module starts from
    facts: Facts


class _Planned(NamedTuple):
    plan: ProgramPlanSpec
    prediction: dict[str, Any]
    folder: RunFolder
    relays: dict[str, Any] | None
    resumes: bool
    behind: int | None
    notes: list[str]


def train_program(
    job_path: Path,
    *,
    overrides: Sequence[str],
    plan_path: Path | None,
    run_dir: Path | None,
    resume: Path | None,
    accept_changes: bool,
) -> ProgramSummary | None:
    """Runs the job under a program on this rank; the summary on rank 0, None elsewhere and where nothing was left to
    train. Raises BadInput (on all ranks, quiet on all but one) before anything is written, RunFailed afterwards."""
    info = launch_info()
    with one_voice_per_node(info):
        read = read_job(job_path, overrides, info)
        meeting = meet(info, read.cluster, read.timeout_seconds)
    with watched_meeting(meeting), RunClaim() as claim:
        made = consensus(meeting, "job", lambda: _make(read.job, info), patience_seconds=BUILDING_SECONDS)
        data = None
        if made.subject.batches is None:
            vocab = ANY_TOKEN if made.job.described is None else made.job.described.vocab
            data = read_data(meeting, made.job, info, vocab)
        asked = folder_asked_for(run_dir, resume)
        opened = consensus(meeting, "graph", lambda: _open(made, data, info, asked), patience_seconds=BUILDING_SECONDS)
        agreed = agree(meeting, opened.facts, opened.job.cluster)
        _same_start(meeting, opened)
        resume = folder_to_resume(
            meeting, opened.job, run_dir, resume, restarted=agreed.restarted, accept_changes=accept_changes
        )
        planned = _plan(
            meeting, opened, agreed.cluster, plan_path,
            lambda: open_folder(opened.job, run_dir, resume, claim, accept_changes=accept_changes),
            accept_changes=accept_changes,
        )  # fmt: skip
        real = agreed.cluster.replace(emulated=False)  # its links and accelerators are not emulated under a program
        world = connect_ranks(meeting, opened.job.spec.communicator, opened.device, real, None, planned.relays)
        with watched(world, "train"):
            trainer = consensus(
                meeting, "program", lambda: _build(world, opened, planned), patience_seconds=BUILDING_SECONDS
            )
            return _Loop(world, opened, agreed, planned, trainer, meeting).run()


def _make(job: Job | BadInput, info: LaunchInfo) -> _Made:
    if isinstance(job, BadInput):
        raise job
    check_plannable(job)
    device = open_device(job.cluster, info)
    subject = open_subject(job, with_values=True)
    if job.spec.eval is not None and subject.batches is not None:
        raise BadInput(
            f"{job.path}: eval reads tokens, but model {job.spec.model} brings batches of its own. Remove eval, or return the module "
            "alone."
        )
    return _Made(job, device, subject)


def _unread(job: Job) -> list[str]:
    """What to say of data that the job names beside a module that brings batches of its own."""
    if job.spec.data == DataSpec():
        return []
    return [
        f"data is not read: model {job.spec.model} brings batches of its own; return the module alone to train on data"
    ]


def _open(made: _Made, data: Data | None, info: LaunchInfo, run_folder: str) -> _Opened:
    job, device, subject = made
    subject.module.to(device.torch_device)
    subject = replace(subject, example=tuple(value.to(device.torch_device) for value in subject.example))
    graph = trace_job(job, subject)
    device.release_memory()  # of the trace's proof: the peak is training's from here on
    for dataset in () if data is None else (data.training, *([] if data.held_out is None else [data.held_out])):
        _check_tokens(job, graph, dataset)
    if data is not None and data.held_out is not None:
        _check_evaluation(job, subject, graph, data.held_out, device)
        device.release_memory()
    tokens = "" if data is None else data.fingerprint
    facts = own_facts(info, device, read=file_contents(job), tokens=tokens, run_folder=run_folder)
    return _Opened(job, device, subject, data, graph, digest_of_start(subject.module, graph), facts)


def _check_tokens(job: Job, graph: Graph, dataset: Dataset) -> None:
    """Raises BadInput where the module looks tokens of the data up in a table that is too short for them, or would
    learn what is only to be read."""
    if not dataset.predicts_all:
        raise BadInput(
            f"{job.path}: data source chat learns some of its tokens only; a program of strategy 'hap' averages the loss over all. Take "
            "another source, or a plan of layers."
        )
    for operator in graph.operators:
        if operator.key == "aten.embedding.default" and operator.inputs[1] in graph.inputs:
            rows = graph.tensors[operator.inputs[0]].shape[0]
            if dataset.max_token >= rows:
                raise BadInput(
                    f"{job.path}: '{operator.module}' has an embedding of {rows} tokens, but the data has token id "
                    f"{dataset.max_token}; give it at least {dataset.vocab_needed} rows, or other data."
                )


def _check_evaluation(job: Job, subject: Subject, graph: Graph, held_out: Dataset, device: Device) -> None:
    """Raises BadInput where the held-out loss would not be what the module has in `.eval()`."""
    count = job.spec.train.global_batch
    if not is_alike_in_eval(subject.module, graph, on_device(held_out.batch(0, count, 0, count), device)):
        raise BadInput(
            f"{job.path}: model {job.spec.model} has another loss in .eval() than in training, as norms with running statistics have, "
            "and eval would measure that of training: a program knows no other. Remove eval, or let the factory call .eval() on"
            " what computes otherwise there."
        )


def _same_start(meeting: Rendezvous, opened: _Opened) -> None:
    """Raises BadInput on all ranks where a factory made unlike weights or batches on them."""
    first = () if opened.subject.batches is None else opened.subject.batches.first
    digests = all_gather(meeting, "start", [opened.start, digest(enumerate(first)), fingerprint(opened.graph)])

    def check() -> None:
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise BadInput(
                f"{opened.job.path}: model {opened.job.spec.model} starts with other weights, batches or shapes on rank {other} "
                "than on rank 0; let the factory draw from torch's seed alone, or load them from a file."
            )

    consensus(meeting, "same start", check)


def _plan(
    meeting: Rendezvous,
    opened: _Opened,
    cluster: ClusterSpec,
    plan_path: Path | None,
    claim: Callable[[], OpenedFolder],
    *,
    accept_changes: bool,
) -> _Planned:
    """The plan named or found and its run folder, which rank 0 claims, the same on every rank."""

    def decide() -> dict[str, Any]:
        claimed = claim()
        folder, goes_on, resumes, behind, notes = claimed
        reserve = opened.job.spec.constraints.reserve
        made_for = ProgramFor(cluster=cluster, reserve=reserve, items=opened.subject.items)
        # One that begins again has trained nothing; a described model stands in the checkpoint, which refuses another.
        may_change = accept_changes or not resumes or opened.job.described is not None
        plan = _chosen(opened, cluster, plan_path, claimed, may_change=may_change)
        plan = plan.replace(cluster=cluster.name, job=made_for)
        return {
            "plan": plan.model_dump(mode="json", by_alias=True),
            "prediction": prediction_of(plan, made_for),
            "folder": str(folder.path.resolve()),
            "relays": folder.relays(cluster) if goes_on else None,
            "resumes": resumes,
            "behind": behind,
            "notes": notes,
        }

    found = broadcast(meeting, "plan", decide, patience_seconds=BUILDING_SECONDS)
    plan, folder = ProgramPlanSpec.model_validate(found.pop("plan")), RunFolder(Path(found.pop("folder")))
    return _Planned(plan=plan, folder=folder, **found)


def _chosen(
    opened: _Opened, cluster: ClusterSpec, plan_path: Path | None, claimed: OpenedFolder, *, may_change: bool
) -> ProgramPlanSpec:
    """The plan file that the command or the job names; that of a run that goes on, unless its cluster or batch has changed,
    what it asks for or, where it may, its code; else a new one."""
    job, folder = opened.job, claimed.folder
    file = plan_path or job.plan_path
    if file is None and claimed.goes_on and is_program_plan(folder.plan):
        saved = load_program_plan(folder.plan)
        if is_kept(saved, saved.program.ranks, job, cluster):
            is_same_code = saved.program.fingerprint == fingerprint(opened.graph)
            if not is_same_code and not may_change:
                raise BadInput(
                    f"{job.path}: model {job.spec.model} is computed otherwise than when the run in {folder.path} began: its code has"
                    " changed, or torch has. Set it back, or add --accept-changes to go on under a new program."
                )
            if is_same_code and not asks_anew(job, claimed):
                return saved
    if file is None:
        return plan_program(job, opened.subject, opened.graph, cluster).plan
    plan = load_program_plan(file)
    made_for = plan.program.ranks, plan.precision, plan.program.fingerprint
    if made_for != (cluster.size, job.spec.train.precision, fingerprint(opened.graph)):
        raise BadInput(
            f"{file}: this program is for {plan.program.ranks} ranks and model '{plan.model}' as it was then; the job has "
            f"{cluster.size} ranks, or its model, batch, precision or code has changed. Plan again."
        )
    return plan if is_for_cluster(plan, cluster) else priced(plan, opened.graph, cluster)


def _build(world: World, opened: _Opened, planned: _Planned) -> ProgramTrainer:
    program = Program.from_spec(planned.plan.program)
    try:
        step = Step(opened.subject.module, opened.graph, program, world.default_group, opened.start)
    except BadInput as error:
        raise BadInput(f"{opened.job.path}: {error}") from error
    opened.subject.module.to("meta")  # the rank has its shards; the whole weights' memory is free again
    return ProgramTrainer(
        world, opened.subject, None if opened.data is None else opened.data.training, step, opened.job.spec.train
    )


class _Loop(StepLoop):
    """The steps of a run under a program."""

    def __init__(
        self, world: World, opened: _Opened, agreed: Agreed, planned: _Planned, trainer: ProgramTrainer,
        meeting: Rendezvous,
    ) -> None:  # fmt: skip
        self._agreed, self._planned, self.trainer, self.items = agreed, planned, trainer, opened.subject.items
        kept = opened.job.spec.checkpoint
        self._store = CheckpointFolder(
            planned.folder.checkpoints, kept.keep, world, keep_every=kept.keep_every, is_indexed=False
        )
        done = consensus(
            meeting,
            "checkpoint",
            lambda: trainer.restore(self._store.latest(planned.behind)) if planned.resumes else 0,
            patience_seconds=BUILDING_SECONDS,
        )
        if done < opened.job.spec.train.steps:  # else nothing is trained
            self._store.begin_behind(done)
        super().__init__(world, opened.job, opened.data, planned.folder, done)

    def run(self) -> ProgramSummary | None:
        """Trains up to the job's last step, or until a signal asks to save and exit."""
        read = _unread(self.job) if self.data is None else self.data.warnings
        told = [*self._planned.notes, *left_at_defaults(self.job, self._agreed.facts)]
        step, stopped = self._train([*read, *self._agreed.warnings], told)
        if not (self._losses and self._speaks):
            return None
        return ProgramSummary(**self._ended(step, stopped), items=self.items, items_per_step=self.trainer.num_items)

    @property
    def _prediction(self) -> dict[str, Any]:
        return self._planned.prediction

    def _start_folder(self, chosen: dict[str, Any]) -> None:
        text = program_plan_text(self._planned.plan)
        self.folder.open(self.job, self._agreed.cluster, text, self._planned.prediction, chosen)

    def _told(self) -> list[str]:
        program = self._planned.plan.program
        lines = [f"program (hap) for {program.ranks} ranks: {len(program.operators)} operators"]
        lines.append(f"predicted {program.predicted_seconds:.4g} s a step")
        lines += assumed_note(assumed_speeds(self._agreed.cluster, self._planned.plan.precision, None))
        if self._agreed.cluster.emulated:
            lines.append("the cluster is emulated; programs run at this machine's own speed, so times will differ")
        return lines

    def _save(self, step: int, *, ends: bool) -> str:
        self.trainer.save(self._store, step)
        return f"checkpoint of step {step}"
