"""What the oracle is asked: a cluster of few accelerators, a model and a batch, without anything of the planner."""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.tensors import tp_degrees
from hethub.spec.model import ModelSpec


class Unit(NamedTuple):
    """Ranks of one machine that form a replica."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """Which plan of the grid is the fastest that fits?"""

    model: ModelSpec
    cluster: ClusterSpec
    global_batch: int
    seq_len: int
    precision: Precision
    reserve: float = 0.06

    @cached_property
    def machines(self) -> list[tuple[int, ...]]:
        """The ranks of every machine."""
        found: dict[int, list[int]] = {}
        for place in self.cluster.places:
            found.setdefault(place.machine, []).append(place.rank)
        return [tuple(ranks) for ranks in found.values()]

    @property
    def pairs_fit(self) -> bool:
        """Whether the heads divide over two ranks."""
        return 2 in tp_degrees(self.model)

    def islands(self, units: tuple[Unit, ...]) -> set[str]:
        """The islands that some units lie in."""
        return {self.cluster.places[unit.ranks[0]].island for unit in units}


MODEL = ModelSpec(name="grid", layers=6, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=8192, max_seq_len=1024)
VENDORS = ("nvidia", "amd")


def random_cluster(seed: int, size: int) -> ClusterSpec:
    """`size` accelerators of unlike speed, memory and vendor; some share a machine."""
    draw = random.Random(seed)
    nodes: list[dict[str, object]] = []
    left = size
    while left:
        count = min(left, draw.choice((1, 1, 2)))
        left -= count
        tflops = draw.choice((8, 15, 30, 60, 120)) * draw.uniform(0.8, 1.2)
        nodes.append(
            {
                "name": f"n{len(nodes)}",
                "accelerators": count,
                "nics": 1,
                "gbps_per_nic": draw.choice((25, 100, 400)),
                "accelerator": {
                    "name": f"a{len(nodes)}",
                    "vendor": draw.choice(VENDORS),
                    "memory_gb": draw.choice((8, 16, 40)),
                    "memory_gbytes_per_second": 12 * tflops,
                    "fp32_tflops": tflops / 2,
                    "fp16_tflops": tflops,
                    "bf16_tflops": tflops,
                    "link_gbytes_per_second": draw.choice((16, 64, 200)),
                },
            }
        )
    return ClusterSpec.model_validate({"name": f"random {seed}", "nodes": nodes})


def random_question(seed: int, size: int, global_batch: int = 6) -> Question:
    """The grid's model on a random cluster."""
    return Question(MODEL, random_cluster(seed, size), global_batch, 512, "bf16")
