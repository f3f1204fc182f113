"""A whole run on one rank: read, meet, agree, plan, connect, build, restore, train, checkpoint, report."""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any


from hethub.communicator import Rendezvous, World, connect
from hethub.communicator.islands import parse_islands
from hethub.kernels.device import Device, choose_device
from hethub.predictor import check_memory, predict
from hethub.predictor.timeline import Span
from hethub.runtime.agreement import (
    Facts, check_cluster, check_versions, detect_cluster, exchange, facts_from, fingerprint, own_facts, together, to_row,
)  # fmt: skip
from hethub.runtime.checkpoint import CheckpointStore
from hethub.runtime.clock import clock_offset
from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.initial import load_hugging_face
from hethub.runtime.launch import LaunchInfo, launch_info, rendezvous
from hethub.runtime.progress import Silent, TerminalReporter
from hethub.runtime.run_folder import RunFolder, default_run_folder
from hethub.runtime.trainer import StopSignal, Trainer
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, load_job
from hethub.spec.layout import Layout, bind
from hethub.spec.plan import PlanSpec, load_plan

TRACED_STEPS = 3  # the last steps of a run, kept for its trace


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What `hethub train` was asked for."""

    job_path: Path
    plan_path: Path | None = None
    run_dir: Path | None = None
    resume: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How a run ended, on rank 0; `spans` are every rank's actions of the last steps, on rank 0's clock."""

    folder: Path
    last_step: int
    stopped_early: bool
    first_loss: float
    last_loss: float
    predicted_step_seconds: float
    measured_step_seconds: float
    tokens_per_second: float
    layout: Layout
    spans: list[Span] = field(repr=False)


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


def train(request: TrainRequest) -> RunSummary | None:
    """Runs the job on this rank; the summary on rank 0, None elsewhere.

    Raises BadInput (equal on all ranks, quiet on all but one) before anything is written, RunFailed afterwards.
    """
    info = launch_info()
    job = _load(request, info)
    network = job.cluster.network if isinstance(job, Job) and job.cluster is not None else None
    timeout = job.spec.communicator.timeout_seconds if isinstance(job, Job) else 60.0
    meeting = rendezvous(info, network=network, timeout_seconds=timeout)
    prepared = together(meeting.store, info.rank, info.size, "job", lambda: _prepare(job, info))
    agreed = _agree(request, prepared, meeting)
    with _connected(meeting, prepared, agreed) as world:
        return _run(request, prepared, agreed, world)


def _load(request: TrainRequest, info: LaunchInfo) -> Job | BadInput:
    """The job, or what is wrong with it, kept until the ranks can speak with one voice.

    Over several nodes the job names the network they meet on, so there its faults are raised at once.
    """
    try:
        return load_job(request.job_path, request.overrides)
    except BadInput as fault:
        if info.is_multi_node:
            raise
        return fault


def _prepare(job: Job | BadInput, info: LaunchInfo) -> Prepared:
    if isinstance(job, BadInput):
        raise job
    if job.cluster is not None:
        _check_cluster_alone(job.cluster, info)
    emulated = job.cluster is not None and job.cluster.places[info.rank].node.vendor is not None
    device = choose_device(info.local_rank, info.local_size, kind="cpu" if emulated else "auto")
    train_spec = job.spec.train
    dataset = open_dataset(
        job.spec.data, job.base, seq_len=train_spec.seq_len, seed=train_spec.seed, vocab=job.model.vocab
    )
    if job.spec.data.document_mask and dataset.end_of_document is None:
        raise BadInput(
            f"{job.path}: data.document_mask needs an end-of-document token, which this tokenizer does not have."
        )
    read = [job.spec.to_dict(), job.model.to_dict(), None if job.cluster is None else job.cluster.to_dict()]
    facts = own_facts(
        rank=info.rank, local_rank=info.local_rank, vendor=device.vendor, device=device.name,
        memory_bytes=device.memory_bytes(), job=fingerprint(read), tokens=dataset.fingerprint(),
    )  # fmt: skip
    return Prepared(job=job, device=device, dataset=dataset, facts=facts)


def _check_cluster_alone(cluster: ClusterSpec, info: LaunchInfo) -> None:
    """What can be refused before the ranks have met."""
    if cluster.size != info.size:
        raise BadInput(
            f"cluster '{cluster.name}' has {cluster.size} accelerators, but {info.launcher} started {info.size} "
            f"rank{'s' if info.size != 1 else ''}; start one rank per accelerator (mpirun -n {cluster.size} …), or use `cluster: detect`."
        )
    if cluster.emulated:
        raise BadInput(
            f"cluster '{cluster.name}' is marked emulated: rehearsing a cluster with planned times is not part of this version. "
            "`hethub plan` and `hethub predict` work with it; to train on CPUs, describe CPU nodes and give each a vendor."
        )


def _agree(request: TrainRequest, prepared: Prepared, meeting: Rendezvous) -> Agreed:
    """Versions, vendors, data and plan, the same on every rank, or BadInput on every rank."""
    store, rank, size = meeting.store, meeting.rank, meeting.size
    facts = facts_from(exchange(store, rank, size, "facts", to_row(prepared.facts)))
    warnings = together(store, rank, size, "versions", lambda: check_versions(facts))
    cluster = together(store, rank, size, "cluster", lambda: _cluster(prepared.job, facts))
    decide = (lambda: _decide(request, prepared.job, cluster)) if rank == 0 else (lambda: None)
    decided = together(store, rank, size, "plan", decide)
    shared = exchange(store, rank, size, "decision", decided)[0]
    layout = bind(PlanSpec.model_validate(shared["plan"]), prepared.job.model, cluster)
    return Agreed(
        layout=layout, prediction=shared["prediction"], folder=RunFolder(Path(shared["folder"])), warnings=warnings
    )


def _cluster(job: Job, facts: list[Facts]) -> ClusterSpec:
    if job.cluster is None:
        named = os.environ.get("HETHUB_ISLANDS")
        return detect_cluster(facts, parse_islands(named, len(facts)) if named else None)
    check_cluster(job.cluster, facts)
    return job.cluster


def _decide(request: TrainRequest, job: Job, cluster: ClusterSpec) -> dict[str, Any]:
    """Plan, prediction and run folder, on rank 0. Nothing is written yet."""
    folder = RunFolder(request.resume or request.run_dir or default_run_folder(request.job_path))
    if request.resume is not None:
        folder.check_resumable()
    else:
        folder.check_new()
    plan_file = request.plan_path or job.plan_path or (folder.plan if request.resume is not None else None)
    train_spec, constraints = job.spec.train, job.spec.constraints
    if plan_file is not None:
        layout = bind(load_plan(plan_file), job.model, cluster)
        _check_plan_is_of_job(layout.plan, job, plan_file)
        check_memory(layout, constraints.reserve)
        strategy, prediction = "plan file", predict(layout, reserve=constraints.reserve)
    else:
        from hethub.planner import plan as make_plan  # only rank 0 plans, so only it loads the search

        result = make_plan(job.model, cluster, train_spec.batch, constraints, strategy=job.spec.plan)
        layout = bind(result.plan, job.model, cluster)
        strategy, prediction = job.spec.plan, result.prediction
    return {
        "plan": layout.plan.model_dump(mode="json"),
        "prediction": {"strategy": strategy, **prediction.to_dict()},
        "folder": str(folder.path.resolve()),
    }


def _check_plan_is_of_job(plan: PlanSpec, job: Job, path: Path) -> None:
    for key in ("global_batch", "seq_len", "precision"):
        planned, wanted = getattr(plan, key), getattr(job.spec.train, key)
        if planned != wanted:
            raise BadInput(
                f"{path}: the plan was made for {key} {planned}, but the job's train.{key} is {wanted}; plan again, or set "
                "one to the other's value."
            )


@contextmanager
def _connected(meeting: Rendezvous, prepared: Prepared, agreed: Agreed) -> Iterator[World]:
    """The world of the run; when this rank fails in it, all others are told why and end too."""
    spec = prepared.job.spec.communicator
    world = connect(
        meeting,
        device=prepared.device,
        islands=list(agreed.layout.cluster.islands.values()),
        relay=spec.relay,
        wire=spec.wire,
        timeout_seconds=spec.timeout_seconds,
    )
    world.watch()
    try:
        with world.guard("train"):
            yield world
    except BaseException as error:
        world.abort(f"{type(error).__name__}: {error}")
        raise
    world.close()


def _run(request: TrainRequest, prepared: Prepared, agreed: Agreed, world: World) -> RunSummary | None:
    job, folder = prepared.job, agreed.folder
    trainer = Trainer(agreed.layout, world, prepared.dataset, job.spec.train, document_mask=job.spec.data.document_mask)
    store = CheckpointStore(folder.checkpoints, keep=job.spec.checkpoint.keep, world=world)
    done = _restore(request, prepared, trainer, store)
    if world.rank == 0:
        folder.start(job, agreed.layout.plan, agreed.prediction, {"islands": world.islands, **world.counters()})
        folder.cut_metrics(done)
    run = _Run(prepared, agreed, world, trainer, store)
    return run.steps(done + 1)


def _restore(request: TrainRequest, prepared: Prepared, trainer: Trainer, store: CheckpointStore) -> int:
    """Fills the weights; the number of steps they have behind them."""
    if request.resume is not None:
        path = store.latest()
        if path is None:
            raise BadInput(
                f"{store.folder}: there is no complete checkpoint to resume from; start the job anew without --resume."
            )
        return trainer.restore(store, path)
    folder = prepared.job.hugging_face_folder
    if folder is None:
        trainer.initialise()
    else:
        load_hugging_face(trainer.storage, prepared.job.model, folder)
        trainer.optimizer.reload_masters()
    return 0


class _Run:
    """The steps of a run and what is kept of each."""

    def __init__(
        self, prepared: Prepared, agreed: Agreed, world: World, trainer: Trainer, store: CheckpointStore
    ) -> None:
        self.job, self.agreed, self.world, self.trainer, self.store = prepared.job, agreed, world, trainer, store
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.spans: list[list[Span]] = []

    def steps(self, first: int) -> RunSummary | None:
        """Trains from step `first` to the job's last, or until a signal asks to save and exit."""
        last, signals, stopped, step = self.job.spec.train.steps, StopSignal(), False, first - 1
        before = clock_offset(self.world)
        reporter = TerminalReporter(first, last) if self.world.rank == 0 else Silent()
        with reporter if isinstance(reporter, TerminalReporter) else nullcontext():
            for line in self._opening(first, last) if self.world.rank == 0 else []:
                reporter.say(line)
            for step in range(first, last + 1):
                stopped = self._step(step, last, signals, reporter)
                if stopped:
                    break
            self.store.wait()
        signals.restore()
        return self._finish(step, stopped and step < last, (before + clock_offset(self.world)) / 2)

    def _opening(self, first: int, last: int) -> list[str]:
        plan, prediction = self.agreed.layout.plan, self.agreed.prediction
        stages = "; ".join(
            f"layers {stage.layers[0][0]}-{stage.layers[-1][1] - 1} on ranks {', '.join(str(list(r.ranks)) for r in stage.replicas)}"
            for stage in plan.stages
        )
        lines = [f"warning: {warning}" for warning in self.agreed.warnings]
        lines.append(f"run folder {self.agreed.folder.path}")
        lines.append(f"plan {prediction['strategy']}: {len(plan.stages)} stages ({stages}), schedule {plan.schedule}")
        lines.append(f"predicted {prediction['step_seconds']:.3f} s a step; training steps {first} to {last}")
        return lines

    def _step(self, step: int, last: int, signals: StopSignal, reporter: Any) -> bool:
        start = monotonic()
        outcome = self.trainer.run_step(step, stop_requested=signals.requested)
        seconds = monotonic() - start
        self.losses.append(outcome.loss)
        self.seconds.append(seconds)
        self.spans = [*self.spans[-TRACED_STEPS + 1 :], self.trainer.spans]
        if self.world.rank == 0:
            metrics = self.trainer.metrics(step, outcome, seconds, self.agreed.prediction["step_seconds"])
            self.agreed.folder.append(metrics)
            reporter.step(metrics)
        every = self.job.spec.checkpoint.every_steps
        if outcome.stop_requested or step == last or (every is not None and step % every == 0):
            self.trainer.save(self.store, step, blocking=outcome.stop_requested or step == last)
            if self.world.rank == 0:
                self.agreed.folder.log(f"checkpoint step {step}")
        return outcome.stop_requested

    def _finish(self, last_step: int, stopped: bool, offset: float) -> RunSummary | None:
        spans = [(*span[:3], span.start_seconds + offset, span.stop_seconds + offset) for s in self.spans for span in s]
        rows = self.world.all_gather_objects(spans)
        counters = self.world.all_gather_objects(self.world.counters())
        if self.world.rank != 0:
            return None
        self.agreed.folder.write_counters(counters)
        measured = statistics.median(self.seconds[2:] or self.seconds or [float("nan")])
        plan = self.agreed.layout.plan
        return RunSummary(
            folder=self.agreed.folder.path,
            last_step=last_step,
            stopped_early=stopped,
            first_loss=self.losses[0] if self.losses else float("nan"),
            last_loss=self.losses[-1] if self.losses else float("nan"),
            predicted_step_seconds=self.agreed.prediction["step_seconds"],
            measured_step_seconds=measured,
            tokens_per_second=plan.global_batch * plan.seq_len / measured,
            layout=self.agreed.layout,
            spans=[Span(*span) for row in rows for span in row],
        )
