"""A whole run on one rank: read, meet, agree, connect, build, restore, train, report."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from hethub.communicator import Rendezvous, World, connect
from hethub.runtime.checkpoint import CheckpointManager
from hethub.runtime.emulate.cluster_network import ClusterNetwork
from hethub.runtime.emulate.pace import emulated_pace
from hethub.runtime.emulate.world import EmulatedWorld, connect_emulated
from hethub.runtime.launch.consensus import together
from hethub.runtime.launch.rendezvous import LaunchInfo, launch_info, rendezvous
from hethub.runtime.launch.session import watched
from hethub.runtime.loop.prepare import Agreed, Prepared, TrainRequest, agree, prepare, read_job
from hethub.runtime.loop.run import Run, RunSummary
from hethub.runtime.loop.straggler_watch import Rebuild, Stragglers
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.model.initial import load_hugging_face
from hethub.runtime.pace import Pace, WatchedPace
from hethub.spec.errors import BadInput
from hethub.spec.job import Job
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec

_BUILDING_SECONDS = 3600.0  # how long ranks wait for each other's weights; a dead one is noticed by the watch

__all__ = ["RunSummary", "TrainRequest", "train"]


def train(request: TrainRequest) -> RunSummary | None:
    """Runs the job on this rank; the summary on rank 0, None elsewhere and where no step was left to train.

    Raises BadInput (on all ranks, quiet on all but one) before anything is written, RunFailed afterwards.
    """
    info = launch_info()
    with _one_voice_per_node(info):
        job = read_job(request, info)
        network = job.cluster.network_of(info.rank) if isinstance(job, Job) and job.cluster is not None else None
        timeout = job.spec.communicator.timeout_seconds if isinstance(job, Job) else 60.0
        meeting = rendezvous(info, network=network, timeout_seconds=timeout)
    prepared = together(meeting, "job", lambda: prepare(job, info))
    agreed = agree(request, prepared, meeting)
    with watched(_connect(meeting, prepared, agreed), "train") as world:
        return _begin(request, meeting, prepared, agreed, world).train()


def _begin(request: TrainRequest, meeting: Rendezvous, prepared: Prepared, agreed: Agreed, world: World) -> Run:
    """The run, ready to train. Nobody but it keeps its trainer, which another may replace."""
    patience = _BUILDING_SECONDS
    pace = together(meeting, "pace", lambda: _pace(prepared, agreed, world), patience_seconds=patience)
    trainer = together(
        meeting, "weights", lambda: _build(request, prepared, agreed, world, pace), patience_seconds=patience
    )
    rebuild = partial(_rebuild, prepared, world)
    return together(
        meeting, "checkpoint", lambda: _start(request, prepared, agreed, trainer, rebuild), patience_seconds=patience
    )


@contextmanager
def _one_voice_per_node(info: LaunchInfo) -> Iterator[None]:
    """Before the ranks can speak with each other: what is wrong on a node, all its ranks find and one says."""
    try:
        yield
    except BadInput as error:
        error.quiet = info.local_rank != 0
        raise


def _connect(meeting: Rendezvous, prepared: Prepared, agreed: Agreed) -> World:
    """The world of the run, as the job wants its ranks bridged."""
    spec, cluster = prepared.job.spec.communicator, agreed.layout.cluster
    options: dict[str, Any] = {
        "device": prepared.device, "islands": list(cluster.islands.values()), "relay": spec.relay, "wire": spec.wire,
        "timeout_seconds": spec.timeout_seconds,
    }  # fmt: skip
    if cluster.emulated:
        return connect_emulated(meeting, ClusterNetwork(cluster, agreed.profile), **options)
    return connect(meeting, stored_relays=agreed.relays, **options)


def _pace(prepared: Prepared, agreed: Agreed, world: World) -> Pace:
    """As fast as the ranks can, or in an emulation as fast as the emulated accelerators."""
    if not isinstance(world, EmulatedWorld):
        return WatchedPace(world.device)
    job = prepared.job
    return emulated_pace(
        agreed.layout, world, job.spec.rehearsal, agreed.prediction["step_seconds"],
        lambda pace: _trainer(prepared, agreed, world, pace).run_step, agreed.profile,
    )  # fmt: skip


def _trainer(prepared: Prepared, agreed: Agreed, world: World, pace: Pace) -> Trainer:
    spec = prepared.job.spec
    masked = spec.data.document_mask
    return Trainer(agreed.layout, world, prepared.dataset, spec.train, document_mask=masked, pace=pace)


def _build(request: TrainRequest, prepared: Prepared, agreed: Agreed, world: World, pace: Pace) -> Trainer:
    """The trainer, with initial weights unless a checkpoint brings them. Nothing is written yet."""
    trainer = _trainer(prepared, agreed, world, pace)
    if request.resume is None:
        _fill(trainer, prepared.job)
    return trainer


def _start(request: TrainRequest, prepared: Prepared, agreed: Agreed, trainer: Trainer, rebuild: Rebuild) -> Run:
    """The run with its checkpoints opened, and the newest restored where it is resumed."""
    job, world, done = prepared.job, trainer.world, 0
    store = CheckpointManager(agreed.folder.checkpoints, keep=job.spec.checkpoint.keep, world=world)
    if request.resume is not None:
        path = store.latest()
        if path is None:
            raise BadInput(
                f"{store.folder}: there is no complete checkpoint to resume from; start the job anew without --resume."
            )
        done = trainer.restore(store, path)
    return Run(job, agreed, world, trainer, store, done, _stragglers(job, agreed, world), rebuild)


def _stragglers(job: Job, agreed: Agreed, world: World) -> Stragglers | None:
    """Who watches for ranks slower than planned; nobody where the job says so, and on CPUs unless it asks."""
    shares_cores = not world.device.is_gpu and not agreed.layout.cluster.emulated
    if job.spec.replan == "never" or (job.spec.replan is None and shares_cores):
        return None
    return Stragglers(job, agreed)


def _rebuild(
    prepared: Prepared, world: World, agreed: Agreed, pace: Pace, found: dict[str, Any]
) -> tuple[Agreed, Trainer]:
    """The same run under another plan, its weights to be restored; `pace` is that of the trainer before, which is
    gone."""
    cluster = agreed.layout.cluster
    layout = bind(PlanSpec.model_validate(found["plan"]), prepared.job.model, cluster)
    agreed = replace(agreed, layout=layout, prediction={"strategy": "replanned", **found["prediction"]})
    return agreed, _trainer(prepared, agreed, world, pace.on(layout))


def _fill(trainer: Trainer, job: Job) -> None:
    """Initial weights: the Hugging Face folder's, or drawn from the job's seed."""
    if job.hugging_face_folder is None:
        trainer.initialise()
    else:
        load_hugging_face(trainer.storage, job.model, job.hugging_face_folder)
        trainer.optimizer.reload_masters()
