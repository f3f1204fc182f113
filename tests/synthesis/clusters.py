"""Small clusters of slow accelerators with fast links, on which cutting pays even for narrow models."""

import random
from typing import Any

from hethub.spec.cluster import ClusterSpec


def cluster(
    speeds: list[float], *, gbytes: float = 1000.0, memory_gb: float | list[float] = 1.0, vendors: str = ""
) -> ClusterSpec:
    """One node per rank; a speed of 1 is a megaflop per second, so that milliseconds of latency do not count."""
    memory = memory_gb if isinstance(memory_gb, list) else [memory_gb] * len(speeds)
    nodes: list[dict[str, Any]] = []
    for rank, speed in enumerate(speeds):
        flops = max(speed * 1e-6, 1e-9)
        device = {
            "name": f"device {rank}", "vendor": vendors[rank] if vendors else "cpu", "memory_gb": memory[rank],
            "memory_gbytes_per_second": max(speed * 1e-4, 1e-8), "fp64_tflops": flops, "fp32_tflops": flops,
            "link_gbytes_per_second": gbytes,
        }  # fmt: skip
        nodes.append({"name": f"node{rank}", "accelerator": device, "accelerators": 1, "gbps_per_nic": 8 * gbytes})
    return ClusterSpec.model_validate({"name": "slow", "nodes": nodes})


def random_cluster(seed: int, size: int) -> ClusterSpec:
    """Unlike speeds and memories; links from so slow that moving little pays to so fast that cutting all does."""
    draw = random.Random(seed)
    speeds = [draw.choice([0.02, 0.3, 1.0, 2.0, 5.0]) for _ in range(size)]
    return cluster(speeds, gbytes=draw.choice([0.001, 0.01, 1.0, 100.0]))
