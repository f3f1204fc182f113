"""The device of this rank, as its job's cluster wants it."""

from hethub.kernels.device import Device, choose_device
from hethub.runtime.launch.launcher_environment import LaunchInfo
from hethub.runtime.memory.allocator import map_large_blocks
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput


def open_device(cluster: ClusterSpec | None, info: LaunchInfo) -> Device:
    """This rank's device, made current: a CPU where the cluster or the node's vendor is emulated. Sets malloc for what
    comes and goes in host memory. Raises BadInput."""
    if cluster is not None:
        _check_size(cluster, info)
    named = cluster is not None and (cluster.emulated or cluster.places[info.rank].node.vendor is not None)
    device = choose_device(info.local_rank, info.local_size, kind="cpu" if named else "auto")
    device.activate()
    map_large_blocks()
    return device


def _check_size(cluster: ClusterSpec, info: LaunchInfo) -> None:
    """What can be refused before the ranks have told each other anything."""
    if cluster.size != info.size:
        started = f"{info.launcher} started {info.size} rank{'s' if info.size != 1 else ''}"
        raise BadInput(
            f"cluster '{cluster.name}' has {cluster.size} accelerators, but "
            f"{'one process runs alone' if info.launcher == 'alone' else started}; start one rank per accelerator "
            f"(mpirun -n {cluster.size} hethub train …), or use `cluster: detect`."
        )
