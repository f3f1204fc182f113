"""Profile, predict and run plans on this machine's CPUs: predicted beside measured step time and memory.

    python benchmarks/predict_cpu.py [--steps 7] [--rounds 2]

One set of processes profiles, others run the plans. Every round profiles anew right before its plan, because a shared
machine's speed drifts; the figure of a plan is the median over rounds. The control is the ratio of the plan's own
steps in the first and second half of a round: no predictor can be better than that.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `tests` is meant

from hethub.predictor import predict
from hethub.predictor.profile import ProfileSpec
from hethub.runtime.data import Dataset
from hethub.runtime.profiler import profile_world
from hethub.runtime.trainer import Trainer
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import TrainSpec
from hethub.spec.layout import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.ranks import run_ranks

MODEL = ModelSpec(name="bench", layers=8, hidden=384, heads=8, kv_heads=4, ffn=1056, vocab=2048, max_seq_len=256)
SEQ_LEN, GLOBAL_BATCH = 256, 8
TRAIN = TrainSpec(steps=10_000, warmup_steps=1, lr=1e-4, min_lr=1e-5)


def replica(ranks: list[int], samples: int, micro_batch: int) -> dict[str, Any]:
    return {"ranks": ranks, "samples": samples, "micro_batch": micro_batch}


def stage(start: int, stop: int, *replicas: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"layers": [[start, stop]], "replicas": list(replicas), **options}


PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"stages": [stage(0, 8, replica([0], 4, 2), replica([1], 4, 2))]},
    "dp2, samples 3:1": {"stages": [stage(0, 8, replica([0], 6, 2), replica([1], 2, 2))]},
    "dp2, ZeRO-1": {"stages": [stage(0, 8, replica([0], 4, 2), replica([1], 4, 2), zero=1)]},
    "dp2 over two islands": {"stages": [stage(0, 8, replica([0], 4, 2), replica([1], 4, 2), zero=1)], "islands": 2},
    "pp2": {"stages": [stage(0, 4, replica([0], 8, 1)), stage(4, 8, replica([1], 8, 1))]},
    "pp2, layers 5:3": {"stages": [stage(0, 5, replica([0], 8, 1)), stage(5, 8, replica([1], 8, 1))]},
    "pp2, gpipe": {"stages": [stage(0, 4, replica([0], 8, 2)), stage(4, 8, replica([1], 8, 2))], "schedule": "gpipe"},
    "pp2 over two islands": {
        "stages": [stage(0, 4, replica([0], 8, 2)), stage(4, 8, replica([1], 8, 2))],
        "islands": 2,
    },
    "pp2, full recompute": {
        "stages": [stage(0, 4, replica([0], 8, 2), recompute="full"), stage(4, 8, replica([1], 8, 2), recompute="full")]
    },
    "tp2": {"stages": [stage(0, 8, replica([0, 1], 8, 2))]},
}


def layout_of(name: str) -> Layout:
    plan = dict(PLANS[name])
    if plan.pop("islands", 1) == 1:
        nodes = [{"name": "cpu", "accelerator": "CPU-core", "accelerators": 2}]
    else:
        nodes = [
            {"name": vendor, "vendor": vendor, "accelerator": "CPU-core", "accelerators": 1}
            for vendor in ("amd", "nvidia")
        ]
    cluster = ClusterSpec.model_validate({"name": "bench", "emulated": True, "nodes": nodes})
    plan |= {
        "model": "bench",
        "cluster": "bench",
        "global_batch": GLOBAL_BATCH,
        "seq_len": SEQ_LEN,
        "precision": "fp32",
    }
    return bind(PlanSpec.model_validate(plan), MODEL, cluster)


def profile_rank(world: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    accelerator = find_accelerator("CPU-core")
    return profile_world(
        world,
        MODEL,
        accelerator,
        "fp32",
        [0] * world.size,
        seq_lens=[SEQ_LEN],
        micro_batches=[1, 2],
        tps=[1, 2],
        seconds_per_point=0.4,
    ).to_dict()


def run_rank(world: Any, name: str, steps: int) -> tuple[list[float], int]:
    """Seconds of every step after a warm-up, and this rank's memory."""
    torch.set_num_threads(1)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab, 100_000)
    dataset = Dataset(
        name="random", tokens=tokens, seq_len=SEQ_LEN, seed=1, vocab=MODEL.vocab, max_token=MODEL.vocab - 1,
        end_of_document=None, tokenizer="none",
    )  # fmt: skip
    trainer = Trainer(layout_of(name), world, dataset, TRAIN)
    trainer.initialise()
    times = []
    for step in range(1, steps + 3):
        world.barrier()
        start = time.perf_counter()
        trainer.run_step(step)
        times.append(time.perf_counter() - start)
    return times[2:], trainer.memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print(
        f"model: {MODEL.parameters / 1e6:.1f} M parameters; two ranks, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print("| plan | predicted s | measured s | error % | control % | memory error % |")
    print("|---|---|---|---|---|---|")
    errors, memory_errors = [], []
    for name in PLANS:
        rows = [one_round(name, options.steps) for _ in range(options.rounds)]
        predicted, measured, error, control, memory = (statistics.median(column) for column in zip(*rows, strict=True))
        errors.append(abs(error))
        memory_errors.append(abs(memory))
        print(
            f"| {name} | {predicted:.3f} | {measured:.3f} | {error:+.1f} | {control:+.1f} | {memory:+.1f} |", flush=True
        )
    print(
        f"mean |error| {statistics.fmean(errors):.1f} %, largest {max(errors):.1f} %; memory {statistics.fmean(memory_errors):.1f} %"
    )


def one_round(name: str, steps: int) -> tuple[float, float, float, float, float]:
    layout = layout_of(name)
    islands = [[0], [1]] if len(layout.cluster.islands) > 1 else None
    profile = ProfileSpec.model_validate(run_ranks(2, profile_rank, islands=islands)[0])
    prediction = predict(layout, profile=profile)
    outcomes = run_ranks(2, run_rank, name, steps, islands=islands)
    times = outcomes[0][0]
    measured, half = statistics.median(times), len(times) // 2
    control = 100 * (statistics.median(times[:half]) / statistics.median(times[half:]) - 1)
    memory = 100 * (max(entry.bytes for entry in prediction.memory) / max(bytes_ for _, bytes_ in outcomes) - 1)
    return prediction.step_seconds, measured, 100 * (prediction.step_seconds / measured - 1), control, memory


if __name__ == "__main__":
    main()
