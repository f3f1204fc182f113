"""Measured layer times as works: published microbenchmarks read into the same operators that the predictor prices."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from hethub.predictor.calibration.sources.cells import THE_ROW, Numbers
from hethub.predictor.cost.constants import Constants, Efficiency, largest_peak, peak_flops
from hethub.predictor.cost.layer import pass_seconds, with_launches
from hethub.predictor.cost.operators import Shape, Work, layer_work
from hethub.predictor.cost.software import MathPrecision, Software
from hethub.spec.accelerator import AcceleratorSpec, find_accelerator
from hethub.spec.base import build
from hethub.spec.model import ModelSpec

# Query heads and KV heads of the tables' models (their model cards); the rest of the shape is in the table.
_HEADS = {
    "bert_base": (12, 12), "bert_large": (16, 16), "bert_xlarge": (24, 24),
    "gpt_1.3b": (32, 32), "gpt_2.7b": (32, 32), "gpt_175b": (96, 96),
    "llama_tiny": (32, 32), "llama_3b": (32, 32), "llama_7b": (32, 32), "llama_13b": (40, 40), "llamav2_tiny": (32, 32),
    "llamav2_7b": (32, 32), "llamav2_13b": (40, 40), "mistral_7b": (32, 8), "vit_e": (16, 16), "vit_g": (16, 16),
}  # fmt: skip
_DEFAULT_FFN = {"mistral_7b": 14336}


@dataclass(frozen=True)
class LayerRow:
    """One measured layer: its works, where it ran, and the seconds of forward and backward."""

    model: str
    accelerator: AcceleratorSpec
    seq_len: int
    precision: MathPrecision
    micro_batch: int
    forward: Work
    backward: Work
    seconds: tuple[float, float]

    @property
    def group(self) -> str:
        """Model × accelerator: what cross-validation keeps together."""
        return f"{self.model} x {self.accelerator.name}"

    @property
    def is_transformer(self) -> bool:
        """Whether it is a language model's layer; the vision models' token counts are not those of their column
        `seq`."""
        return not self.model.startswith("vit")


def read_layer_times(path: Path) -> list[LayerRow]:
    """The rows of a table of layer times."""
    with path.open(newline="", encoding="utf-8") as file:
        return [read_layer_row(row) for row in csv.DictReader(file)]


def read_layer_row(row: Mapping[str, str]) -> LayerRow:
    """One row. Raises ValueError saying what is missing or wrong; a model that is not known names its heads itself."""
    number = Numbers(row)
    heads, kv_heads = _heads(row, number)
    hidden, gated = number("hidden"), row["model"].startswith(("llama", "mistral"))
    attention = hidden * (hidden // heads) * (2 * heads + 2 * kv_heads)
    given = int(number.positive("params_per_layer") or 0)
    ffn = (given - attention) // ((3 if gated else 2) * hidden) if given else _DEFAULT_FFN.get(row["model"], 4 * hidden)
    if ffn < 1:
        raise ValueError(f"params_per_layer {given:,} is not more than attention's {attention:,} alone")
    family = "llama" if gated else "gpt" if row["model"].startswith("gpt") else "bert"
    shape = {"name": row["model"], "family": family, "layers": 1, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
             "ffn": ffn, "vocab": 1, "max_seq_len": 4096}  # fmt: skip
    model = build(ModelSpec, shape, THE_ROW, "model")
    eager = family == "gpt"  # Hugging Face's GPT: attention and tanh-GELU kernel by kernel
    software = Software(
        fused_attention=not eager,
        fused_softmax=False,
        fused_activation=not eager,
        fused_elementwise=False,
        gradient_pass_bytes=None,
    )
    precision: MathPrecision = row["precision"]  # type: ignore[assignment]
    if precision not in get_args(MathPrecision):
        raise ValueError(f"precision {precision} is unknown")
    batch, seq = number("micro_batch"), number("seq")
    forward, backward = layer_work(model, Shape(batch, seq, 1.0), precision, software)
    seconds = (number.any("forward_ms") / 1e3, number.any("backward_ms") / 1e3)
    if not all(0 < each < 1e7 for each in seconds):
        raise ValueError(f"forward_ms {row['forward_ms']} and backward_ms {row['backward_ms']} are no positive times")
    device = find_accelerator(row["accelerator"])
    least = (forward.flops + backward.flops) / largest_peak(device, precision)
    if sum(seconds) < least:
        raise ValueError(
            f"forward_ms {row['forward_ms']} and backward_ms {row['backward_ms']} are beyond physics: the products alone take "
            f"{1e3 * least:.3g} ms at the peak of {device.name}; look at their unit (milliseconds) and at precision"
        )
    return LayerRow(row["model"], device, seq, precision, batch, forward, backward, seconds)


def _heads(row: Mapping[str, str], number: Numbers) -> tuple[int, int]:
    if row.get("heads"):
        heads = number("heads")
        return heads, number("kv_heads", 0) or heads
    if row["model"] not in _HEADS:
        raise ValueError(f"the heads of model '{row['model']}' are not known; add columns heads and kv_heads")
    return _HEADS[row["model"]]


class LayerTable(NamedTuple):
    """Rows as columns, for pricing all of them in one expression."""

    rows: list[LayerRow]
    forward: Work
    backward: Work
    peak: np.ndarray
    bandwidth: np.ndarray
    measured: np.ndarray  # (2, rows) seconds
    devices: list[tuple[AcceleratorSpec, MathPrecision]]  # the distinct ones, each in one precision
    device: np.ndarray  # which of them each row is of

    @staticmethod
    def of(rows: list[LayerRow]) -> "LayerTable":
        devices = {f"{row.accelerator.name} {row.precision}": (row.accelerator, row.precision) for row in rows}
        index = {key: position for position, key in enumerate(devices)}
        return LayerTable(
            rows,
            Work(*(np.array(column, dtype=float) for column in zip(*(row.forward for row in rows), strict=True))),  # type: ignore[arg-type]
            Work(*(np.array(column, dtype=float) for column in zip(*(row.backward for row in rows), strict=True))),  # type: ignore[arg-type]
            np.array([peak_flops(row.accelerator, row.precision) for row in rows]),
            np.array([row.accelerator.memory_gbytes_per_second * 1e9 for row in rows]),
            np.array([row.seconds for row in rows]).T,
            list(devices.values()),
            np.array([index[f"{row.accelerator.name} {row.precision}"] for row in rows]),
        )

    def predict(self, constants: Constants) -> np.ndarray:
        """Seconds (2, rows) of forward and backward as a short benchmark sees them: a burst before the throttle."""
        each = [constants.efficiency(*device) for device in self.devices]
        fit = Efficiency(
            **{
                name: np.array([getattr(e, name) for e in each])[self.device]
                for name in Efficiency.__dataclass_fields__
            }
        )
        passes = [
            pass_seconds(self.forward, fit, self.peak, self.peak, self.bandwidth, False),
            pass_seconds(self.backward, fit, self.peak, self.peak, self.bandwidth, True),
        ]
        burst = constants.common["burst_seconds"]
        sustained = [seconds * (1.0 + fit.throttle * seconds / (seconds + burst)) for seconds in passes]
        return np.array(
            [
                with_launches(seconds, work, fit)
                for seconds, work in zip(sustained, (self.forward, self.backward), strict=True)
            ]
        )
