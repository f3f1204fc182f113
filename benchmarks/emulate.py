"""Rehearses a plan in processes of its own: what the rehearsing benchmarks share."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hethub.communicator import Rendezvous
from hethub.kernels.device import choose_device
from hethub.predictor import predict
from hethub.runtime.data import Dataset
from hethub.runtime.emulate.cluster_network import ClusterNetwork
from hethub.runtime.emulate.pace import emulated_pace
from hethub.runtime.emulate.world import connect_emulated
from hethub.runtime.loop.trainer import Trainer
from hethub.spec.accelerator import AcceleratorSpec, find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import EmulationSpec, TrainSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.ranks import start_ranks, values

SETTLING_STEPS = 2  # the first steps count memory, which slows real computing
SMALLER, LINKS_SMALLER = 100_000.0, 400.0
MOST_OVERRUN_PERCENT = 2.0
SLOWER_CLOCKS = (1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A plan's step, predicted and emulated, and how the emulation went."""

    predicted_seconds: float
    step_seconds: float
    overrun_percent: float  # of the emulated time, on the worst rank
    time_scale: float
    predicted_bytes: int
    memory_bytes: int  # of the fullest rank, by the run's count
    real_seconds: float  # that the whole emulation took

    @property
    def error_percent(self) -> float:
        return 100.0 * (self.predicted_seconds / self.step_seconds - 1.0)


def pocket(name: str, *, memory_gb: float | None = None, speed: float = 1.0) -> AcceleratorSpec:
    """A catalogue's accelerator made so slow that a layer of a tiny model keeps it busy.

    Its one rate is the original's half-precision peak over `SMALLER`; so is its memory's bandwidth. Links are made
    `LINKS_SMALLER` times slower only: a tiny batch has few tokens to a parameter.
    """
    full = find_accelerator(name)
    peak = (full.bf16_tflops or full.fp16_tflops or full.fp32_tflops) * speed / SMALLER
    return full.replace(
        name=f"{name}-pocket", memory_gb=memory_gb or full.memory_gb, fp32_tflops=peak, fp16_tflops=peak, bf16_tflops=None,
        tf32_tflops=None, fp32_matrix_tflops=None, fp64_tflops=None, fp8_tflops=None,
        memory_gbytes_per_second=full.memory_gbytes_per_second * speed / SMALLER,
        link_gbytes_per_second=full.link_gbytes_per_second / LINKS_SMALLER,
    )  # fmt: skip


def emulate_in_pace(layout: Layout, *, steps: int = 3) -> Emulated:
    """The layout emulated, again on a slower clock while these cores cannot keep the pace (overrun above 2 %)."""
    for slower in SLOWER_CLOCKS:
        done = emulate(layout, steps=steps, slower=slower)
        if done.overrun_percent <= MOST_OVERRUN_PERCENT:
            break
    return done


def emulate(layout: Layout, *, steps: int = 3, slower: float = 1.0) -> Emulated:
    """The layout's cluster, emulated for `steps` steps after settling; seconds are emulated, medians.

    The clock runs at the scale chosen at start, times `slower`.
    """
    start = time.perf_counter()
    prediction = predict(layout)
    specs = (layout.plan, layout.model, layout.cluster)
    outcomes = start_ranks(
        layout.cluster.size, _rank, *specs, prediction.step_seconds, steps, slower, timeout_seconds=600
    )
    rows = values(outcomes)
    return Emulated(
        predicted_seconds=prediction.step_seconds,
        step_seconds=statistics.median(rows[0]["seconds"]),
        overrun_percent=max(row["overrun_percent"] for row in rows),
        time_scale=rows[0]["time_scale"],
        predicted_bytes=max(entry.bytes for entry in prediction.memory),
        memory_bytes=max(row["memory_bytes"] for row in rows),
        real_seconds=time.perf_counter() - start,
    )


def _rank(
    rank: int, store: Any, plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec, predicted_seconds: float,
    steps: int, slower: float,
) -> dict[str, Any]:  # fmt: skip
    torch.set_num_threads(1)
    layout = bind(plan, model, cluster)
    size = cluster.size
    meeting = Rendezvous(
        store=store, rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", interface=None,
        token="rehearsal", launcher="benchmark",
    )  # fmt: skip
    world = connect_emulated(
        meeting, ClusterNetwork(cluster), device=choose_device(rank, size, kind="cpu"), islands=list(cluster.islands.values())
    )  # fmt: skip
    world.watch()
    tokens = np.random.default_rng(0).integers(0, model.vocab, 20_000)
    dataset = Dataset.one(
        name="random", tokens=tokens, seq_len=plan.seq_len, seed=1, vocab=model.vocab, max_token=model.vocab - 1,
        end_of_document=None, tokenizer="none",
    )  # fmt: skip
    train = TrainSpec(steps=1000, warmup_steps=1, global_batch=plan.global_batch, seq_len=plan.seq_len)
    pace = emulated_pace(
        layout, world, EmulationSpec(), predicted_seconds,
        lambda own: Trainer(layout, world, dataset, train, pace=own).run_step,
    )  # fmt: skip
    assert pace.time_scale is not None
    pace.set_scale(slower * pace.time_scale, needed=pace.time_scale)
    trainer = Trainer(layout, world, dataset, train, pace=pace)
    trainer.initialise()
    seconds, paces = [], []
    for step in range(1, SETTLING_STEPS + steps + 1):
        start = time.monotonic()
        trainer.run_step(step)
        seconds.append(pace.seconds(time.monotonic() - start))
        paces.append(trainer.step_pace)
    kept = [each for each in paces[SETTLING_STEPS:] if each is not None]
    overrun = sum(each.overrun_seconds for each in kept) / sum(each.emulated_seconds for each in kept)
    row = {
        "seconds": seconds[SETTLING_STEPS:], "overrun_percent": 100.0 * overrun, "time_scale": pace.time_scale,
        "memory_bytes": trainer.memory_bytes,
    }  # fmt: skip
    world.close()
    return row
