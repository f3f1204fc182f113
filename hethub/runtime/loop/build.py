"""Build: from a plan to connected ranks, each with a trainer that has its initial weights. Nothing is written yet."""

from datetime import timedelta
from typing import Any

from hethub.communicator import Rendezvous, World, connect
from hethub.kernels.bodies import compiles_on
from hethub.kernels.device import Device
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import hethub_software
from hethub.runtime.data import Dataset
from hethub.runtime.emulate.cluster_network import ClusterNetwork
from hethub.runtime.emulate.pace import emulated_pace
from hethub.runtime.emulate.world import EmulatedWorld, connect_emulated
from hethub.runtime.launch.consensus import consensus
from hethub.runtime.loop.replanning import is_watched
from hethub.runtime.loop.trainer import Trainer, TrainingRank
from hethub.runtime.measure.profiler import warm_up
from hethub.runtime.pace import Pace, WatchedPace
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import CommunicatorSpec, Job
from hethub.spec.layout.bind import Layout

BUILDING_SECONDS = 3600.0  # how long ranks wait for each other's weights; a dead one is noticed by the watch


def connect_ranks(
    meeting: Rendezvous,
    spec: CommunicatorSpec,
    device: Device,
    cluster: ClusterSpec,
    profile: ProfileSpec | None,
    relays: dict[str, Any] | None,
) -> World:
    """The world of the run, as the job wants its ranks bridged; over `relays`, where the run has had some before."""
    options: dict[str, Any] = {
        "device": device, "islands": list(cluster.islands.values()), "relay": spec.relay, "wire": spec.wire,
        "timeout_seconds": spec.timeout_seconds,
    }  # fmt: skip
    if cluster.emulated:
        return connect_emulated(meeting, ClusterNetwork(cluster, profile), **options)
    return connect(meeting, stored_relays=relays, num_lanes=spec.lanes, **options)


def build(
    meeting: Rendezvous,
    world: World,
    job: Job,
    dataset: Dataset,
    layout: Layout,
    profile: ProfileSpec | None,
    predicted_seconds: float,
    *,
    fills: bool,
) -> TrainingRank:
    """This rank's trainer at its pace; it `fills` the weights unless a checkpoint will bring them."""

    def filled() -> TrainingRank:
        trainer = make_trainer(layout, world, job, dataset, pace)
        if fills:
            _fill(trainer, job)
        return trainer

    masks = job.spec.data.document_mask
    consensus(meeting, "compiled bodies", lambda: _warm_up(world, layout, masks), patience_seconds=BUILDING_SECONDS)
    pace = consensus(
        meeting,
        "pace",
        lambda: _pace(world, job, dataset, layout, profile, predicted_seconds),
        patience_seconds=BUILDING_SECONDS,
    )
    return consensus(meeting, "weights", filled, patience_seconds=BUILDING_SECONDS)


def make_trainer(layout: Layout, world: World, job: Job, dataset: Dataset, pace: Pace) -> TrainingRank:
    """A trainer whose weights are still to come; on an unused rank, what answers for it."""
    if world.rank in layout.plan.unused:
        return TrainingRank(layout, world, dataset, job.spec.train, pace=pace)
    return Trainer(layout, world, dataset, job.spec.train, document_mask=job.spec.data.document_mask, pace=pace)


def rebuild(layout: Layout, world: World, job: Job, dataset: Dataset, pace: Pace) -> TrainingRank:
    """This rank's trainer under another plan of the run, whose weights are still to come."""
    _warm_up(world, layout, job.spec.data.document_mask)
    # Some ranks compile for longer than the others would wait for a message.
    world.all_gather_objects(None, timedelta(seconds=BUILDING_SECONDS))
    return make_trainer(layout, world, job, dataset, pace)


def _warm_up(world: World, layout: Layout, document_mask: bool) -> None:
    warms = compiles_on(world.device.torch_device) or world.device.is_gpu  # whose kernels are loaded in any case
    if warms and world.rank not in layout.plan.unused:
        warm_up(layout, world.rank, world.device, document_mask=document_mask)
        world.device.release_memory()


def _pace(
    world: World,
    job: Job,
    dataset: Dataset,
    layout: Layout,
    profile: ProfileSpec | None,
    predicted_seconds: float,
) -> Pace:
    """As fast as the ranks can, timed only where slow ranks are watched for; or as fast as emulated accelerators."""
    if not isinstance(world, EmulatedWorld):
        return WatchedPace(world.device) if is_watched(job, world.device, layout.cluster) else Pace()
    return emulated_pace(
        layout, world, job.spec.rehearsal, predicted_seconds,
        lambda pace: make_trainer(layout, world, job, dataset, pace).run_step, profile,
        hethub_software(job.spec.train.compile),
    )  # fmt: skip


def _fill(trainer: TrainingRank, job: Job) -> None:
    """Initial weights: the Hugging Face folder's, or drawn from the job's seed."""
    if job.hugging_face_folder is None:
        trainer.initialise()
    else:
        trainer.load_hugging_face(job.hugging_face_folder)
