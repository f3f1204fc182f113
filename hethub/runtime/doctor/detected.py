"""This machine as a cluster file describes one: what `hethub init` begins with."""

import importlib.util
import os
import socket

from hethub.spec.cluster import ClusterSpec, NodeSpec

ASSUMED_GBPS = 8.0  # between processes of one machine, over loopback
MOST_CORES = 4  # of two emulated islands


def this_machine() -> ClusterSpec:
    """A node of this machine's accelerators; where there are none (or no torch to see them), its cores as two
    emulated islands. Raises BadInput for a device that is not in the catalogue."""
    return _devices() or _cores()


def _devices() -> ClusterSpec | None:
    if importlib.util.find_spec("torch") is None:
        return None
    from hethub.kernels.device import all_devices
    from hethub.runtime.launch.launcher_environment import LaunchInfo
    from hethub.runtime.launch.preflight import detect_cluster, own_facts

    devices = all_devices()
    facts = [
        own_facts(
            LaunchInfo(rank=rank, size=len(devices), local_rank=rank, local_size=len(devices), launcher="alone"), device
        )
        for rank, device in enumerate(devices)
    ]
    return detect_cluster(facts).replace(name=socket.gethostname()) if facts else None


def _cores() -> ClusterSpec:
    each = max(1, min(MOST_CORES, os.cpu_count() or 1) // 2)
    nodes = [
        NodeSpec(name=maker, vendor=maker, accelerator="CPU-core", accelerators=each, gbps_per_nic=ASSUMED_GBPS)
        for maker in ("amd", "nvidia")
    ]
    return ClusterSpec(name="laptop", nodes=tuple(nodes))
