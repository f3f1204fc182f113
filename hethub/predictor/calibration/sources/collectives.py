"""Measured collectives: what links carry when nothing else is done."""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hethub.predictor.cost.constants import Constants
from hethub.predictor.cost.links import Network
from hethub.spec.accelerator import catalogue
from hethub.spec.cluster import ClusterSpec

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
PASSES = {"all-reduce": 2, "all-gather": 1}  # rings of an operation
RANKS_OF_A_NODE = 8  # and as many cards of 400 Gbit/s, on all machines of the table
GBPS_PER_CARD = 400


class CollectiveRow(NamedTuple):
    """One measured collective and its seconds."""

    source: str
    cluster: ClusterSpec
    operation: str  # of PASSES
    way: str  # "ring", "NVLS" (summed in the switch), or "" where the table does not say
    num_bytes: float
    ranks: int
    seconds: float

    @property
    def accelerator(self) -> str:
        return self.cluster.places[0].accelerator.name

    def predict(self, constants: Constants) -> float:
        """Seconds by a cluster's links."""
        network = Network(self.cluster, constants)
        collective = network.all_reduce if self.operation == "all-reduce" else network.all_gather
        return collective(network.group(range(self.ranks)), self.num_bytes)


def read_collectives(path: Path) -> list[CollectiveRow]:
    """The all-reduces and all-gathers of a table of microbenchmarks, of accelerators that the catalogue has."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["accelerator"] in catalogue()]
    return [found for found in map(_read, rows) if found is not None]


def _read(row: dict[str, str]) -> CollectiveRow | None:
    """None for rows of anything else."""
    what, counted = row["what"], re.search(r"(\d+) GPUs", row["what"])
    operation = next((name for name in PASSES if name in what), None)
    size = re.fullmatch(r"([\d.]+)([A-Za-z]+)", row["shape_or_bytes"])
    if counted is None or operation is None or size is None:
        return None
    num_bytes, ranks = float(size[1]) * UNITS[size[2]], int(counted[1])
    seconds = PASSES[operation] * num_bytes * (ranks - 1) / ranks / (float(row["value"]) * 1e9)  # of bus bandwidth
    way = next((name for name in ("ring", "NVLS") if name in what), "")
    cluster = _cluster(row["accelerator"], ranks)
    return CollectiveRow(row["source"], cluster, operation, way, num_bytes, ranks, seconds)


def _cluster(accelerator: str, ranks: int) -> ClusterSpec:
    """Nodes as the tables have them, as many as the ranks take."""
    node = {
        "name": "node",
        "count": max(1, ranks // RANKS_OF_A_NODE),
        "accelerator": accelerator,
        "accelerators": min(ranks, RANKS_OF_A_NODE),
        "nics": RANKS_OF_A_NODE,
        "gbps_per_nic": GBPS_PER_CARD,
    }
    return ClusterSpec.model_validate({"name": "measured", "nodes": [node]})


def log_errors(rows: list[CollectiveRow], constants: Constants) -> np.ndarray:
    """Logarithms of predicted over measured seconds."""
    return np.log([row.predict(constants) / row.seconds for row in rows])
