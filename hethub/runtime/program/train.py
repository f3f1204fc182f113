"""A run under a program on one rank, in a line: read, meet, agree, trace, plan, build, restore, loop."""

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch

from hethub.communicator import Rendezvous, World
from hethub.kernels.device import Device
from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.launch.consensus import all_gather, broadcast, consensus, one_voice_per_node
from hethub.runtime.launch.device import open_device
from hethub.runtime.launch.launcher_environment import LaunchInfo, launch_info
from hethub.runtime.launch.preflight import Agreed, Facts, agree, own_facts
from hethub.runtime.launch.rendezvous import meet
from hethub.runtime.launch.session import watched, watched_meeting
from hethub.runtime.loop.build import BUILDING_SECONDS, connect_ranks
from hethub.runtime.loop.display import TrainingDisplay
from hethub.runtime.loop.plan import OpenedFolder, open_folder
from hethub.runtime.loop.read import read_job
from hethub.runtime.loop.stop_signal import StopSignal
from hethub.runtime.program.checkpoint import ProgramCheckpoints
from hethub.runtime.program.planned import check_plannable, plan_program, prediction_of, trace_job
from hethub.runtime.program.subject import Subject, open_subject
from hethub.runtime.program.trainer import ProgramTrainer
from hethub.runtime.run_claim import RunClaim
from hethub.runtime.run_folder import RunFolder
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import Job
from hethub.spec.program import ProgramPlanSpec, is_program_plan, load_program_plan, program_plan_text
from hethub.synthesis.graph import Graph
from hethub.synthesis.lower import Step, fingerprint
from hethub.synthesis.program import Program

SETTLING_STEPS = 2  # the first steps, which warm up and count memory, left out of the measured time
ANY_TOKEN = 2**31  # a module of the user's says itself which tokens it knows


@dataclass(frozen=True, kw_only=True)
class ProgramSummary:
    """How a run ended, on rank 0."""

    folder: Path
    last_step: int
    stopped_early: bool
    first_loss: float
    last_loss: float
    predicted_step_seconds: float
    measured_step_seconds: float  # median
    items: str
    items_per_step: int


class _Opened(NamedTuple):
    """What a rank trains, on what and from what, traced."""

    job: Job
    device: Device
    subject: Subject
    dataset: Dataset | None
    graph: Graph
    facts: Facts


class _Planned(NamedTuple):
    plan: ProgramPlanSpec
    prediction: dict[str, Any]
    folder: RunFolder
    relays: dict[str, Any] | None
    resumes: bool
    notes: list[str]


def train_program(
    job_path: Path,
    *,
    overrides: Sequence[str] = (),
    plan_path: Path | None = None,
    run_dir: Path | None = None,
    resume: Path | None = None,
) -> ProgramSummary | None:
    """Runs the job under a program on this rank; the summary on rank 0, None elsewhere and where nothing was left to
    train. Raises BadInput (on all ranks, quiet on all but one) before anything is written, RunFailed afterwards."""
    info = launch_info()
    with one_voice_per_node(info):
        read = read_job(job_path, overrides, info)
        meeting = meet(info, read.cluster, read.timeout_seconds)
    with watched_meeting(meeting), RunClaim() as claim:
        opened = consensus(meeting, "job", lambda: _open(read.job, info), patience_seconds=BUILDING_SECONDS)
        agreed = agree(meeting, opened.facts, opened.job.cluster)
        _same_start(meeting, opened)
        planned = _plan(
            meeting, opened, agreed.cluster, plan_path, lambda: open_folder(opened.job, run_dir, resume, claim)
        )
        real = agreed.cluster.replace(emulated=False)  # its links and accelerators are not emulated under a program
        world = connect_ranks(meeting, opened.job.spec.communicator, opened.device, real, None, planned.relays)
        with watched(world, "train"):
            trainer = consensus(
                meeting, "program", lambda: _build(world, opened, planned), patience_seconds=BUILDING_SECONDS
            )
            return _Loop(world, opened, agreed, planned, trainer, meeting).run()


def _open(job: Job | BadInput, info: LaunchInfo) -> _Opened:
    if isinstance(job, BadInput):
        raise job
    check_plannable(job)
    device = open_device(job.cluster, info)
    subject = open_subject(job, with_values=True)
    train, dataset = job.spec.train, None
    if subject.batches is None:
        vocab = ANY_TOKEN if job.described is None else job.described.vocab
        dataset = open_dataset(job.spec.data, job.base, seq_len=train.seq_len, seed=train.seed, vocab=vocab)
    subject.module.to(device.torch_device)
    subject = replace(subject, example=tuple(value.to(device.torch_device) for value in subject.example))
    graph = trace_job(job, subject)
    if dataset is not None:
        _check_tokens(job, graph, dataset)
    described = None if job.described is None else job.described.to_dict()
    read = [job.spec.to_dict(), described, None if job.cluster is None else job.cluster.to_dict()]
    facts = own_facts(info, device, read=read, tokens="" if dataset is None else dataset.fingerprint())
    return _Opened(job, device, subject, dataset, graph, facts)


def _check_tokens(job: Job, graph: Graph, dataset: Dataset) -> None:
    """Raises BadInput where the module looks tokens of the data up in a table that is too short for them."""
    for operator in graph.operators:
        if operator.key == "aten.embedding.default" and operator.inputs[1] in graph.inputs:
            rows = graph.tensors[operator.inputs[0]].shape[0]
            if dataset.max_token >= rows:
                raise BadInput(
                    f"{job.path}: '{operator.module}' has an embedding of {rows} tokens, but the data has token id "
                    f"{dataset.max_token}; give it at least {dataset.vocab_needed} rows, or other data."
                )


def _same_start(meeting: Rendezvous, opened: _Opened) -> None:
    """Raises BadInput on all ranks where a factory made unlike weights or batches on them."""
    first = () if opened.subject.batches is None else opened.subject.batches.first
    module = opened.subject.module
    values = [*module.named_parameters(), *module.named_buffers(), *enumerate(first)]
    told = hashlib.blake2b(digest_size=16)
    for name, value in values:
        told.update(str(name).encode())
        told.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = all_gather(meeting, "start", [told.hexdigest(), fingerprint(opened.graph)])

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
) -> _Planned:
    """The plan named or found and its run folder, which rank 0 claims, the same on every rank."""

    def decide() -> dict[str, Any]:
        folder, goes_on, resumes, notes = claim()
        plan = _chosen(opened, cluster, plan_path, folder, resumes=goes_on)
        return {
            "plan": plan.model_dump(mode="json", by_alias=True),
            "prediction": prediction_of(plan, cluster, opened.job.spec.constraints.reserve, opened.subject.items),
            "folder": str(folder.path.resolve()),
            "relays": folder.relays() if goes_on else None,
            "resumes": resumes,
            "notes": notes,
        }

    found = broadcast(meeting, "plan", decide, patience_seconds=BUILDING_SECONDS)
    plan, folder = ProgramPlanSpec.model_validate(found["plan"]), RunFolder(Path(found["folder"]))
    return _Planned(plan, found["prediction"], folder, found["relays"], found["resumes"], found["notes"])


def _chosen(
    opened: _Opened, cluster: ClusterSpec, plan_path: Path | None, folder: RunFolder, *, resumes: bool
) -> ProgramPlanSpec:
    """The plan file that the command or the job names; that of a resumed run, unless its cluster has changed; else a
    new one."""
    job = opened.job
    file = plan_path or job.plan_path
    if file is None and resumes and is_program_plan(folder.plan):
        saved = load_program_plan(folder.plan)
        if (saved.cluster, saved.program.ranks) == (cluster.name, cluster.size):
            return saved
    if file is None:
        return plan_program(job, opened.subject, opened.graph, cluster).plan
    plan = load_program_plan(file)
    if plan.program.ranks != cluster.size or plan.program.fingerprint != fingerprint(opened.graph):
        raise BadInput(
            f"{file}: this program is for {plan.program.ranks} ranks and model '{plan.model}' as it was then; the job has "
            f"{cluster.size} ranks, or its model, batch or code has changed. Plan again."
        )
    return plan


def _build(world: World, opened: _Opened, planned: _Planned) -> ProgramTrainer:
    program = Program.from_spec(planned.plan.program)
    step = Step(opened.subject.module, opened.graph, program, world.default_group)
    opened.subject.module.to("meta")  # the rank has its shards; the whole weights' memory is free again
    return ProgramTrainer(world, opened.subject, opened.dataset, step, opened.job.spec.train)


class _Loop:
    """The steps of a run on one rank; rank 0 writes the run folder and speaks."""

    def __init__(
        self, world: World, opened: _Opened, agreed: Agreed, planned: _Planned, trainer: ProgramTrainer,
        meeting: Rendezvous,
    ) -> None:  # fmt: skip
        self._world, self._job, self._agreed, self._planned = world, opened.job, agreed, planned
        self._trainer, self._items = trainer, opened.subject.items
        self._store, self._done = consensus(
            meeting, "checkpoint", lambda: self._restored(planned.resumes), patience_seconds=BUILDING_SECONDS
        )
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def _restored(self, resumes: bool) -> tuple[ProgramCheckpoints, int]:
        store = ProgramCheckpoints(self._planned.folder.checkpoints, self._job.spec.checkpoint.keep, self._world)
        return store, self._trainer.restore(store.latest()) if resumes else 0

    @property
    def _speaks(self) -> bool:
        return self._world.rank == 0

    def run(self) -> ProgramSummary | None:
        """Trains up to the job's last step, or until a signal asks to save and exit."""
        last, step, stopped = self._job.spec.train.steps, self._done, False
        display = TrainingDisplay(self._done + 1, last, shows=self._speaks, items=self._items)
        notes = [*self._planned.notes, *(self._open_folder() if self._speaks else [])]
        with StopSignal() as signals, display:
            for line in [*notes, *self._opening(last)]:
                self._say(line, display)
            for step in range(self._done + 1, last + 1):
                stopped = self._step(step, last, signals, display)
                if stopped:
                    break
        return self._summary(step, stopped and step < last) if self._losses and self._speaks else None

    def _open_folder(self) -> list[str]:
        folder = self._planned.folder
        chosen = {"islands": self._world.islands, "relays": self._world.relays, **self._world.counters()}
        text = program_plan_text(self._planned.plan)
        folder.open(self._job, self._agreed.cluster, text, self._planned.prediction, chosen)
        return folder.cut_metrics(self._done)

    def _opening(self, last: int) -> list[str]:
        plan, lines = self._planned.plan, [f"warning: {warning}" for warning in self._agreed.warnings]
        lines.append(f"run folder {self._planned.folder.path}")
        lines.append(f"program (hap) for {plan.program.ranks} ranks: {len(plan.program.operators)} operators")
        lines.append(f"predicted {plan.program.predicted_seconds:.4g} s a step")
        if self._agreed.cluster.emulated:
            lines.append("the cluster is emulated; programs run at this machine's own speed, so times will differ")
        if self._done:
            lines.append(f"resumed behind step {self._done}")
        if self._done >= last:
            lines.append(f"all {last} steps are trained already; raise train.steps to go on")
        return lines

    def _say(self, text: str, display: TrainingDisplay) -> None:
        display.say(text)
        if self._speaks:
            self._planned.folder.log(text)

    def _step(self, step: int, last: int, signals: StopSignal, display: TrainingDisplay) -> bool:
        start = monotonic()
        outcome = self._trainer.run_step(step, lambda: signals.requested)
        seconds = monotonic() - start
        self._losses.append(outcome.loss)
        self._seconds.append(seconds)
        if self._speaks:
            metrics = self._trainer.metrics(step, outcome, seconds, self._planned.plan.program.predicted_seconds)
            self._planned.folder.append(metrics)
            display.step(metrics)
        every = self._job.spec.checkpoint.every_steps
        if outcome.stop_requested or step == last or (every is not None and step % every == 0):
            self._trainer.save(self._store, step)
            if self._speaks:
                self._planned.folder.log(f"checkpoint of step {step}")
        return outcome.stop_requested

    def _summary(self, step: int, stopped: bool) -> ProgramSummary:
        return ProgramSummary(
            folder=self._planned.folder.path,
            last_step=step,
            stopped_early=stopped,
            first_loss=self._losses[0],
            last_loss=self._losses[-1],
            predicted_step_seconds=self._planned.plan.program.predicted_seconds,
            measured_step_seconds=statistics.median(self._seconds[SETTLING_STEPS:] or self._seconds),
            items=self._items,
            items_per_step=self._trainer.num_items,
        )
