"""Profile, predict and run plans on this machine's CPUs: predicted beside measured step time and memory.

    python benchmarks/predict_cpu.py [--steps 5] [--rounds 2] [--minutes 9] [--plans NAME …]

One set of processes profiles, others run the plans. A shared machine's speed drifts, so profiles and runs alternate:
each run stands between two profiles, and its prediction is the geometric mean of what the two foretell. Rounds go over
all plans, so that a plan's rounds lie minutes apart; its figure is the median over rounds. Both ranks profile at the
same time, so that each feels the other as it will in the run. The controls: by how much the two predictions around a
run differ, and its steps in the first and second half; no predictor can be better than those. About eight minutes on
two idle cores.
"""

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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
MOST_ERROR, MOST_MEAN_ERROR, MOST_MEMORY_ERROR = 10.0, 5.0, 10.0  # percent, as asked for
EMULATED = " (emulated)"  # ranks of one machine told to be of two makers; the seconds are real
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


def is_emulated(name: str) -> bool:
    return PLANS[name].get("islands", 1) > 1


def layout_of(name: str) -> Layout:
    plan = dict(PLANS[name])
    if plan.pop("islands", 1) == 1:
        nodes = [{"name": "cpu", "accelerator": "CPU-core", "accelerators": 2}]
    else:
        nodes = [
            {"name": vendor, "vendor": vendor, "accelerator": "CPU-core", "accelerators": 1}
            for vendor in ("amd", "nvidia")
        ]
    cluster = ClusterSpec.model_validate({"name": "bench", "emulated": is_emulated(name), "nodes": nodes})
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
        seconds_per_point=0.3,
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


class Round(NamedTuple):
    """One run of a plan between two profiles; percents."""

    predicted: float
    measured: float
    error: float
    drift: float  # the later profile's prediction over the earlier one's
    steps_drift: float  # steps of the first half over those of the second
    memory: float


def take_profile(islands: list[list[int]] | None) -> ProfileSpec:
    """What two processes of their own measure, both at once."""
    return ProfileSpec.model_validate(run_ranks(2, profile_rank, islands=islands)[0])


def islands_of(layout: Layout) -> list[list[int]] | None:
    return [[0], [1]] if len(layout.cluster.islands) > 1 else None


def one_round(name: str, steps: int, before: ProfileSpec) -> tuple[Round, ProfileSpec]:
    """Runs a plan after `before` and profiles again; the round and the new profile."""
    layout = layout_of(name)
    islands = islands_of(layout)
    outcomes = run_ranks(2, run_rank, name, steps, islands=islands)
    after = take_profile(islands)
    early, late = predict(layout, profile=before), predict(layout, profile=after)
    times = outcomes[0][0]
    measured, half = statistics.median(times), len(times) // 2
    predicted = math.sqrt(early.step_seconds * late.step_seconds)
    largest = max(num_bytes for _, num_bytes in outcomes)
    found = Round(
        predicted,
        measured,
        100 * (predicted / measured - 1),
        100 * (late.step_seconds / early.step_seconds - 1),
        100 * (statistics.median(times[:half]) / statistics.median(times[half:]) - 1),
        100 * (max(entry.bytes for entry in early.memory) / largest - 1),
    )
    return found, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=9.0, help="no further run begins then (default 9)")
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=list(PLANS), metavar="NAME")
    options = parser.parse_args()
    print(
        f"model: {MODEL.parameters / 1e6:.1f} M parameters; two ranks, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(f"load average at the start: {os.getloadavg()[0]:.1f}")
    started = time.monotonic()
    rounds: dict[str, list[Round]] = {name: [] for name in options.plans}
    ordered = sorted(options.plans, key=lambda name: islands_of(layout_of(name)) is not None)
    for _ in range(options.rounds):
        kind, profile = None, None
        for name in ordered:
            if rounds[name] and time.monotonic() - started > 60 * options.minutes - 30:
                continue  # its first round stands
            islands = islands_of(layout_of(name))
            if profile is None or islands != kind:
                kind, profile = islands, take_profile(islands)
            found, profile = one_round(name, options.steps, profile)
            rounds[name].append(found)
    report(rounds)
    print(f"{time.monotonic() - started:.0f} s in all; load average at the end: {os.getloadavg()[0]:.1f}")


def report(rounds: dict[str, list[Round]]) -> None:
    """One line per plan, medians over its rounds, and the figures over all."""
    print(
        "| plan | predicted s | measured s | error % | profiles differ % | steps differ % | memory error % | verdict |"
    )
    print("|---|---|---|---|---|---|---|---|")
    errors, memory_errors = [], []
    for name, own in rounds.items():
        middle = Round(*(statistics.median(column) for column in zip(*own, strict=True)))
        errors.append(abs(middle.error))
        memory_errors.append(abs(middle.memory))
        within = errors[-1] <= MOST_ERROR and memory_errors[-1] <= MOST_MEMORY_ERROR
        print(
            f"| {name}{EMULATED * is_emulated(name)} | {middle.predicted:.3f} | {middle.measured:.3f} | {middle.error:+.1f} | "
            f"{middle.drift:+.1f} | {middle.steps_drift:+.1f} | {middle.memory:+.1f} | {verdict(within)} |"
        )
    real = sum(not is_emulated(name) for name in rounds)
    mean, largest, memory = statistics.fmean(errors), max(errors), max(memory_errors)
    print(f"plans not emulated: {real} of {len(rounds)} (asked: half): {verdict(2 * real >= len(rounds))}")
    print(f"largest |error| {largest:.1f} % (asked: <= {MOST_ERROR:g} %): {verdict(largest <= MOST_ERROR)}")
    print(f"mean |error| {mean:.1f} % (asked: <= {MOST_MEAN_ERROR:g} %): {verdict(mean <= MOST_MEAN_ERROR)}")
    print(
        f"largest memory error {memory:.1f} % (asked: <= {MOST_MEMORY_ERROR:g} %): {verdict(memory <= MOST_MEMORY_ERROR)}"
    )


def verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


if __name__ == "__main__":
    main()
