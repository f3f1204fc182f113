"""Measured matrix products as works: what accelerators reach of their peak when they do nothing else."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hethub.predictor.cost.constants import Constants, peak_flops
from hethub.predictor.cost.layer import pass_seconds, with_launches
from hethub.predictor.cost.operators import Product, Work
from hethub.predictor.cost.software import MathPrecision
from hethub.spec.accelerator import AcceleratorSpec, catalogue, find_accelerator


class ProductRow(NamedTuple):
    """One measured product and its seconds."""

    accelerator: AcceleratorSpec
    precision: MathPrecision
    work: Work
    seconds: float

    def predict(self, constants: Constants) -> float:
        """Seconds of the product alone, without what a software stack adds."""
        fit = replace(constants.efficiency(self.accelerator, self.precision), cast=0.0)
        peak = peak_flops(self.accelerator, self.precision)
        device = pass_seconds(self.work, fit, peak, peak, self.accelerator.memory_gbytes_per_second * 1e9, False)
        return float(with_launches(device, self.work, fit))


def read_products(path: Path) -> list[ProductRow]:
    """The matrix products of a table of microbenchmarks, of accelerators that the catalogue has."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if "GEMM" in row["what"] and row["accelerator"] in catalogue()]
    return [_read(row) for row in rows]


def _read(row: dict[str, str]) -> ProductRow:
    precision: MathPrecision = next(name for name in ("fp16", "bf16", "fp8") if name in row["what"])
    shape = Product(*map(float, row["shape_or_bytes"].split("x")))
    bytes_each = 1 if precision == "fp8" else 2
    work = Work.of((shape,), bytes_each, 0.0, 0.0, 1)
    return ProductRow(find_accelerator(row["accelerator"]), precision, work, shape.flops / (float(row["value"]) * 1e12))


def log_errors(rows: list[ProductRow], constants: Constants) -> np.ndarray:
    """Logarithms of predicted over measured seconds."""
    return np.log([row.predict(constants) / row.seconds for row in rows])
