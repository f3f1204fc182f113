"""A world of the started ranks for commands that measure: meet, agree who is who, connect; and end as one."""

from collections.abc import Iterator
from contextlib import contextmanager

from hethub.communicator import Rendezvous, World, connect
from hethub.kernels.device import Device
from hethub.runtime.launch.consensus import consensus
from hethub.runtime.launch.device import open_device
from hethub.runtime.launch.end_signal import EndSignal
from hethub.runtime.launch.launcher_environment import LaunchInfo, launch_info, one_voice_per_node
from hethub.runtime.launch.preflight import agree, own_facts
from hethub.runtime.launch.rendezvous import meet
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import CommunicatorSpec, Job


@contextmanager
def session(
    job: Job | None, communicator: CommunicatorSpec | None = None, num_lanes: int | None = None
) -> Iterator[tuple[World, ClusterSpec]]:
    """The connected world and its cluster: the job's, or what the ranks find (HETHUB_ISLANDS emulates islands).

    The network is the job's, too, and how long ranks wait for each other to come; relay, wire, lanes and the timeout from
    then on are `communicator`'s, but for `num_lanes`.
    Raises BadInput where the ranks do not fit together or the cluster, RunFailed where one fails later.
    """
    info = launch_info()
    cluster, usual = (None if job is None else job.cluster), CommunicatorSpec()
    with one_voice_per_node(info):
        met = meet(info, cluster, (usual if job is None else job.spec.communicator).timeout_seconds)
    with watched_meeting(met) as meeting:
        device = consensus(meeting, "device", lambda: _real_device(cluster, info))
        found = agree(meeting, own_facts(info, device), cluster).cluster
        bridged = communicator or usual
        world = connect(
            meeting, device=device, islands=list(found.islands.values()), relay=bridged.relay, wire=bridged.wire,
            timeout_seconds=bridged.timeout_seconds, num_lanes=num_lanes or bridged.lanes,
        )  # fmt: skip
        with watched(world, "measure"):
            yield world, found


def _real_device(cluster: ClusterSpec | None, info: LaunchInfo) -> Device:
    if cluster is not None and cluster.emulated:
        raise BadInput(
            f"cluster '{cluster.name}' is marked emulated: on these CPUs there is nothing of it to measure. `hethub train` emulates it "
            "with predicted times; measure on the real accelerators."
        )
    return open_device(cluster, info)


@contextmanager
def watched_meeting(meeting: Rendezvous) -> Iterator[Rendezvous]:
    """Do what `watched` does, but from the ranks' meeting on: a rank may fail, or be told to end, before there is a world."""
    watch = meeting.watch
    if watch is None:  # a process alone
        yield meeting
        return
    try:
        with EndSignal(watch):
            yield meeting
    except BaseException as error:
        if isinstance(error, BadInput | RunFailed) and error.agreed:
            meeting.close()
        else:
            watch.tell(f"{type(error).__name__}: {error}")
        raise
    meeting.close()


@contextmanager
def watched(world: World, what: str) -> Iterator[World]:
    """The world for the block; when this rank fails in it, all others are told why and end too.

    What all ranks found alike ends them cleanly, without one of them passing for dead.
    """
    try:
        with world.guard(what):
            yield world
    except BaseException as error:
        if isinstance(error, BadInput | RunFailed) and error.agreed:
            world.close()
        else:
            world.abort(f"{type(error).__name__}: {error}")
        raise
    world.close()
