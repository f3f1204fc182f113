"""The device of this rank, as its job's cluster wants it."""

import logging
import os

from hethub.kernels.device import HARDWARE_QUEUES, Device, choose_device
from hethub.runtime.launch.launcher_environment import LaunchInfo
from hethub.runtime.memory.allocator import map_large_blocks
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput

_log = logging.getLogger(__name__)

CORES_OF_A_DEVICE = 4  # its host threads: Python, autograd, communication, a checkpoint's writer


def open_device(cluster: ClusterSpec | None, info: LaunchInfo) -> Device:
    """This rank's device, made current: a CPU where the cluster or the node's vendor is emulated. Sets malloc for what
    comes and goes in host memory. Raises BadInput."""
    if cluster is not None:
        _check_size(cluster, info)
    named = cluster is not None and (cluster.emulated or cluster.places[info.rank].node.vendor is not None)
    local = info.local_rank if cluster is None or named else _local_rank(cluster, info)
    device = choose_device(local, info.local_size, kind="cpu" if named else "auto")
    device.activate()
    if device.is_gpu and (cores := len(os.sched_getaffinity(0))) < CORES_OF_A_DEVICE:
        _log.warning(
            "rank %d may use %d core(s) only, which its backward, communication and checkpoints share; start ranks "
            "unbound (mpirun --bind-to none, srun --cpu-bind=none, more --cpus-per-task).", info.rank, cores,
        )  # fmt: skip
    _check_queues(device, info.rank)
    map_large_blocks()
    return device


def _check_queues(device: Device, rank: int) -> None:
    """Warns where the environment asks for fewer hardware queues than hethub would: Megatron's scripts set 1."""
    if device.vendor not in HARDWARE_QUEUES:
        return
    variable, number = HARDWARE_QUEUES[device.vendor]
    given = os.environ.get(variable, "")
    if given.isdigit() and int(given) < number:
        _log.warning(
            "rank %d: %s=%s is set, and %d would be: streams that share a hardware queue wait for each other, and a step whose ranks "
            "wait for each other's messages may never end; unset it.", rank, variable, given, number,
        )  # fmt: skip


def _local_rank(cluster: ClusterSpec, info: LaunchInfo) -> int:
    """The rank's place among those that see the same devices: the launcher counts all of a host, or of an entry of the
    cluster, and torch only one maker's."""
    hosts = [host for node in dict.fromkeys(cluster.machines) for host in node.host_names or (node.name,) * node.count]
    place = cluster.places[info.rank]
    beside = [each for each in cluster.places if hosts[each.machine] == hosts[place.machine]]
    if len({each.island for each in beside}) == 1 and place.node.part_of is None:
        return info.local_rank
    return [each.rank for each in beside if each.island == place.island].index(info.rank)


def _check_size(cluster: ClusterSpec, info: LaunchInfo) -> None:
    """What can be refused before the ranks have told each other anything."""
    if cluster.size != info.size:
        started = f"{info.launcher} started {info.size} rank{'s' if info.size != 1 else ''}"
        raise BadInput(
            f"cluster '{cluster.name}' has {cluster.size} accelerators, but "
            f"{'one process runs alone' if info.launcher == 'alone' else started}; start one rank per accelerator "
            f"(mpirun -n {cluster.size} before the same command), or take the ranks there are (--set cluster=detect)."
        )
