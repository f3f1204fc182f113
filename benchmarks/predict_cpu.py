"""Profile, predict and run plans on this machine's CPUs: predicted beside measured step time and memory.

    python benchmarks/predict_cpu.py [--steps 2] [--rounds 10] [--minutes 9] [--seconds-per-point 0.05] [--plans NAME …]

A shared machine's speed drifts within seconds, so profiles and runs take turns of seconds: two processes profile, two
others run the plans' steps, all of them stay for the whole benchmark (a pair of each for every set of islands), and
who waits sleeps on the store. Each turn of a plan stands between two short profiles, taken by both ranks at the same
time so that each feels the other as it will in the run; the turn's prediction is the geometric mean of what the two
foretell. A round is one turn of every plan; a plan's error is the median over rounds of predicted over measured, its
quartiles stand beside it. The controls: by how much the profiles around a turn differ, and the quartiles of the
measured steps; no predictor can be better than those. About eight minutes on two idle cores.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `tests` is meant

from hethub.communicator import Rendezvous, World, connect
from hethub.predictor import predict
from hethub.predictor.cost.profile import ProfileSpec
from hethub.runtime.data import Dataset
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.measure.profiler import profile_world
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import RunFailed
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.ranks import start_ranks, values

MODEL = ModelSpec(name="bench", layers=8, hidden=384, heads=8, kv_heads=4, ffn=1056, vocab=2048, max_seq_len=256)
SEQ_LEN, GLOBAL_BATCH = 256, 8
MOST_ERROR, MOST_MEAN_ERROR, MOST_MEMORY_ERROR = 10.0, 5.0, 10.0  # percent, as asked for
EMULATED = " (emulated)"  # ranks of one machine told to be of two makers; the seconds are real
TURN_SECONDS = 120.0  # a turn that takes longer has failed
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


# -- the ranks that take turns
# ------------------------------------------------------------------------------------------


class Profiling:
    """Turns that measure: the profile of the two ranks."""

    def __init__(self, world: World) -> None:
        self._world = world

    def turn(self, seconds_per_point: float) -> dict[str, Any]:
        profile = profile_world(
            self._world, MODEL, find_accelerator("CPU-core"), "fp32", [0] * self._world.size,
            seq_lens=[SEQ_LEN], micro_batches=[1, 2], tps=[1, 2], seconds_per_point=seconds_per_point,
        )  # fmt: skip
        return profile.to_dict()


class Running:
    """Turns that train: some steps of a plan, whose trainer stays from its first turn on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._trainers: dict[str, Trainer] = {}
        self._taken: Counter[str] = Counter()  # steps, by plan
        tokens = np.random.default_rng(0).integers(0, MODEL.vocab, 100_000)
        self._dataset = Dataset.one(
            name="random", tokens=tokens, seq_len=SEQ_LEN, seed=1, vocab=MODEL.vocab, max_token=MODEL.vocab - 1,
            end_of_document=None, tokenizer="none",
        )  # fmt: skip

    def turn(self, name: str, steps: int) -> tuple[float, int]:
        """Seconds per step, from a common start to this rank's end, and this rank's peak of this plan's tensors."""
        if name not in self._trainers:
            self._trainers[name] = Trainer(layout_of(name), self._world, self._dataset, TRAIN)
            self._trainers[name].initialise()
        trainer = self._trainers[name]
        self._world.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self._taken[name] += 1
            trainer.run_step(self._taken[name])
        return (time.perf_counter() - start) / steps, trainer.memory_bytes


def rank_main(rank: int, store: dist.Store, options: argparse.Namespace) -> Any:
    """Rank 0 conducts; of the others each two are a pair: the profiler and the runner of one kind, then of the next."""
    torch.set_num_threads(1)
    if rank == 0:
        try:
            return conduct(store, options)
        except dist.DistError as error:
            raise RunFailed(f"a pair did not answer: {error}") from error
    pair, own = divmod(rank - 1, 2)
    rendezvous = Rendezvous.on_one_host(dist.PrefixStore(f"world {pair}", store), own, 2)
    world = connect(rendezvous, islands=[[0], [1]] if kinds_of(options.plans)[pair // 2] else None)
    work = Running(world) if pair % 2 else Profiling(world)
    waiting = 0.0
    for turn in count():
        start = time.process_time()
        store.wait([f"{pair}/{turn}"], timedelta(minutes=options.minutes + 10))
        waiting += time.process_time() - start
        order = json.loads(store.get(f"{pair}/{turn}"))
        if order is None:
            world.close()
        answer = waiting if order is None else work.turn(*order)
        store.set(f"{pair}/{turn}/{own}", json.dumps(answer))
        if order is None:
            return None


class Pair:
    """The conductor's end of two ranks."""

    def __init__(self, store: dist.Store, index: int) -> None:
        self._store, self._index, self._turns = store, index, count()

    def ask(self, *order: Any) -> list[Any]:
        """Both ranks' answers to one turn."""
        return self._exchange(list(order))

    def end(self) -> float:
        """Lets both ranks end; the most CPU seconds that one of them used in waiting."""
        return max(self._exchange(None))

    def _exchange(self, order: list[Any] | None) -> list[Any]:
        place = f"{self._index}/{next(self._turns)}"
        self._store.set(place, json.dumps(order))
        answers = [f"{place}/{rank}" for rank in range(2)]
        self._store.wait(answers, timedelta(seconds=TURN_SECONDS))
        return [json.loads(self._store.get(key)) for key in answers]


class Turn(NamedTuple):
    """Steps of a plan between two profiles."""

    plan: str
    before: dict[str, Any]
    after: dict[str, Any]
    step_seconds: float


class Record(NamedTuple):
    """What the conductor brings home."""

    turns: list[Turn]
    memory: dict[str, int]  # by plan, the peak bytes of the rank with the most
    profile_seconds: float  # that a profile takes, on average
    waiting_seconds: float  # CPU time of the process that used most in waiting


def kinds_of(plans: list[str]) -> list[bool]:
    """The kinds of layout there are, each with a pair of pairs: one island (False), two emulated islands (True)."""
    return sorted({is_emulated(name) for name in plans})


def conduct(store: dist.Store, options: argparse.Namespace) -> dict[str, Any]:
    """Lets the pairs take turns, one at a time, until rounds or minutes are up; the first turn of each only warms it
    up.

    The fields of a Record, in plain types: who started the ranks cannot unpickle classes of theirs.
    """
    began = time.monotonic()
    pairs = {kind: (Pair(store, 2 * i), Pair(store, 2 * i + 1)) for i, kind in enumerate(kinds_of(options.plans))}
    memory, turns, profiling, longest = {}, [], [], 0.0
    for profiler, _ in pairs.values():
        profiler.ask(options.seconds_per_point)
    for name in options.plans:
        memory[name] = max(num_bytes for _, num_bytes in pairs[is_emulated(name)][1].ask(name, 2))

    def profile(profiler: Pair) -> dict[str, Any]:
        start = time.monotonic()
        taken: dict[str, Any] = profiler.ask(options.seconds_per_point)[0]
        profiling.append(time.monotonic() - start)
        return taken

    for number in range(options.rounds):
        start = time.monotonic()
        if number and start - began + longest > 60 * options.minutes:
            break
        for kind, (profiler, runner) in pairs.items():
            before = profile(profiler)
            for name in (name for name in options.plans if is_emulated(name) == kind):
                seconds = max(seconds for seconds, _ in runner.ask(name, options.steps))
                after = profile(profiler)
                turns.append((name, before, after, seconds))
                before = after
        longest = max(longest, time.monotonic() - start)
        print(f"round {number + 1}: {time.monotonic() - start:.0f} s", flush=True)
    waiting = max(pair.end() for both in pairs.values() for pair in both)
    return {
        "turns": turns,
        "memory": memory,
        "profile_seconds": sum(profiling) / len(profiling),
        "waiting_seconds": waiting,
    }


# -- predictions beside them
# --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="of a plan in each of its turns (default 2)")
    parser.add_argument("--rounds", type=int, default=10, help="at most so many turns of each plan (default 10)")
    parser.add_argument("--minutes", type=float, default=9.0, help="no round begins that would end later (default 9)")
    parser.add_argument("--seconds-per-point", type=float, default=0.05, help="of each profile (default 0.05)")
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=list(PLANS), metavar="NAME")
    options = parser.parse_args()
    print(
        f"model: {MODEL.parameters / 1e6:.1f} M parameters; two ranks, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(f"load average at the start: {os.getloadavg()[0]:.1f}", flush=True)
    start = time.monotonic()
    size = 1 + 4 * len(kinds_of(options.plans))
    found = values(start_ranks(size, rank_main, options, timeout_seconds=60 * options.minutes + 300))[0]
    record = Record(**found | {"turns": [Turn(*turn) for turn in found["turns"]]})
    report(record, options.plans)
    print(
        f"a profile takes {record.profile_seconds:.1f} s; a waiting process used at most {record.waiting_seconds:.1f} CPU "
        f"seconds; {time.monotonic() - start:.0f} s in all; load average at the end: {os.getloadavg()[0]:.1f}"
    )


def report(record: Record, plans: list[str]) -> None:
    """One line per plan, medians over its rounds with quartiles, and the figures over all."""
    print(
        "| plan | rounds | predicted s | measured s (quartiles) | error % (quartiles) | profiles around a turn differ % "
        "(quartiles) | memory error % | verdict |"
    )
    print("|---|---|---|---|---|---|---|---|")
    errors, memory_errors = [], []
    for name in plans:
        layout, own = layout_of(name), [turn for turn in record.turns if turn.plan == name]
        foretold = [[predict(layout, profile=ProfileSpec.model_validate(p)) for p in turn[1:3]] for turn in own]
        early, late = np.array([[each.step_seconds for each in both] for both in foretold]).T
        measured = np.array([turn.step_seconds for turn in own])
        predicted = np.sqrt(early * late)
        error, differ = 100 * (predicted / measured - 1), 100 * np.abs(late / early - 1)
        memory_error = 100 * (max(entry.bytes for entry in foretold[0][0].memory) / record.memory[name] - 1)
        errors.append(abs(float(np.median(error))))
        memory_errors.append(abs(memory_error))
        within = errors[-1] <= MOST_ERROR and memory_errors[-1] <= MOST_MEMORY_ERROR
        print(
            f"| {name}{EMULATED * is_emulated(name)} | {len(own)} | {np.median(predicted):.3f} | {spread(measured, '.3f')} | "
            f"{spread(error, '+.1f')} | {spread(differ, '.1f')} | {memory_error:+.1f} | {verdict(within)} |"
        )
    real = sum(not is_emulated(name) for name in plans)
    mean, largest, memory = math.fsum(errors) / len(errors), max(errors), max(memory_errors)
    print(f"plans not emulated: {real} of {len(plans)} (asked: half): {verdict(2 * real >= len(plans))}")
    print(f"largest |error| {largest:.1f} % (asked: <= {MOST_ERROR:g} %): {verdict(largest <= MOST_ERROR)}")
    print(f"mean |error| {mean:.1f} % (asked: <= {MOST_MEAN_ERROR:g} %): {verdict(mean <= MOST_MEAN_ERROR)}")
    print(
        f"largest memory error {memory:.1f} % (asked: <= {MOST_MEMORY_ERROR:g} %): {verdict(memory <= MOST_MEMORY_ERROR)}"
    )


def spread(figures: np.ndarray, form: str) -> str:
    """The median, and the quartiles behind it."""
    low, middle, high = (format(figure, form) for figure in np.percentile(figures, (25, 50, 75)))
    return f"{middle} ({low} to {high})"


def verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


if __name__ == "__main__":
    main()
