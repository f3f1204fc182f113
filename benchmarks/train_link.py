"""Data-parallel training over a link of 1 Gbit/s that needs 60 % of the step: over what the link and computing need at least.

    python benchmarks/train_link.py [--steps 12] [--layers 8]

Two islands of two ranks, each island in a network namespace of its own (needs root, `ip` and `tc`). Computing is a plain
PyTorch loop of the same model in all four processes at once, without communication. What the link needs is the least
that data parallelism over two islands can send, by the link's share for payload; beside it what iperf3 carries in the
same run, the bytes that the kernel counted, and what both processors are busy in a step by the kernel's clock: no step is
shorter than that.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from benchmarks.bridge import ETHERNET_SHARE, MIB, connect_in_namespace
from hethub.runtime.acceptance.plain_llama import PlainLlama, token_loss
from hethub.runtime.data import Dataset
from hethub.runtime.loop.trainer import Trainer
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.hosts import namespaces
from tests.support.ranks import start_ranks, values

MODEL = ModelSpec(name="link", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=2048, max_seq_len=512)
ISLANDS = [[0, 1], [2, 3]]
WARM_UP = 2
CROSSINGS = {1: 1.0, 3: 1.5}
"""Of all fp32 parameters, what crosses in each direction in a step: a reduce-scatter and one or two all-gathers."""


def trained(world: Any, model: ModelSpec, zero: int, seq_len: int) -> Callable[[], None]:
    cluster = {"name": "bench", "nodes": [{"name": "cpu", "accelerator": "CPU-core", "accelerators": 4}]}
    replicas = [{"ranks": [rank], "samples": 1, "micro_batch": 1} for rank in range(4)]
    plan = {
        "model": "link", "cluster": "bench", "global_batch": 4, "seq_len": seq_len, "precision": "fp32",
        "stages": [{"layers": [[0, model.layers]], "zero": zero, "replicas": replicas}],
    }  # fmt: skip
    layout = bind(PlanSpec.model_validate(plan), model, ClusterSpec.model_validate(cluster))
    dataset = Dataset.one(
        name="random", tokens=np.random.default_rng(0).integers(0, MODEL.vocab, 100_000), seq_len=seq_len, seed=1,
        vocab=MODEL.vocab, max_token=MODEL.vocab - 1, end_of_document=None, tokenizer="none",
    )  # fmt: skip
    trainer = Trainer(layout, world, dataset, TrainSpec(steps=10_000, warmup_steps=1, lr=1e-4, min_lr=1e-5))
    trainer.initialise()
    steps = iter(range(1, 10_000))

    def step() -> None:
        trainer.run_step(next(steps))

    return step


def computed(model: ModelSpec, seq_len: int) -> Callable[[], None]:
    module, tokens = PlainLlama(model, seq_len), torch.randint(0, MODEL.vocab, (1, seq_len + 1))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        token_loss(module(tokens[:, :-1]), tokens[:, 1:]).backward()

    return step


def measure(
    rank: int, store: Any, found: Any, layers: int, zero: int, seq_len: int, steps: int
) -> tuple[list[list[float]], float, float]:
    """Seconds of each step and of each plain loop, slowest rank; bytes that a step sends from the first island; seconds
    of processor time of a step, all ranks."""
    torch.set_num_threads(1)
    world = connect_in_namespace(rank, store, found, ISLANDS)
    model = MODEL.replace(layers=layers)
    kinds = trained(world, model, zero, seq_len), computed(model, seq_len)
    seconds: list[list[float]] = []
    for kind in kinds:
        taken = []
        for step in range(WARM_UP + steps):
            world.barrier()
            if step == WARM_UP and kind is kinds[0]:
                before, used = found.sent_bytes()[0], time.process_time()
            start = time.perf_counter()
            kind()
            taken.append(time.perf_counter() - start)
        if kind is kinds[0]:
            used = sum(world.all_gather_objects(time.process_time() - used)) / steps
            sent = (found.sent_bytes()[0] - before) / steps
        rows = world.all_gather_objects(taken[WARM_UP:])
        seconds.append([max(row) for row in zip(*rows, strict=True)])
    world.close()
    return seconds, sent, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=MODEL.layers)
    parser.add_argument("--seq-len", type=int, nargs=2, default=(96, 144), help="of the rows with ZeRO 1 and 3")
    arguments = parser.parse_args()
    if (reason := namespaces.why_no_namespaces()) is not None:
        sys.exit(f"not measured: it {reason}")
    parameters = MODEL.replace(layers=arguments.layers).parameters
    num_bytes = 4 * parameters
    print(f"{parameters / 1e6:.1f} M parameters, fp32: {num_bytes / MIB:.0f} MiB")
    print(
        "| plan | step s | computing alone s | link's bound s | communication | bound / step (0.9) | kernel's bytes / least"
        " | processors busy s |"
    )
    print("|---" * 8 + "|")
    with namespaces.namespaces("hethub-train") as found:
        for (zero, crossings), seq_len in zip(CROSSINGS.items(), arguments.seq_len, strict=True):
            outcomes = start_ranks(
                4, measure, found, arguments.layers, zero, seq_len, arguments.steps, timeout_seconds=600
            )
            (step, compute), sent, used = values(outcomes)[0]
            least = crossings * num_bytes
            wire = least * 8 / (namespaces.LINK_BITS_PER_SECOND * ETHERNET_SHARE)
            alone = statistics.median(compute)
            reached = statistics.median(max(wire, alone) / each for each in step)
            print(
                f"| DP 2+2, ZeRO {zero}, {seq_len} tokens a rank | {statistics.median(step):.3f} | {alone:.3f} | {wire:.3f}"
                f" | {wire / (wire + alone):.0%} | {reached:.3f} | {sent / least:.3f}"
                f" | {used / min(4, len(os.sched_getaffinity(0))):.3f} |",
                flush=True,
            )
        if (rates := found.iperf3(3)) is not None:
            share = min(rates) / (namespaces.LINK_BITS_PER_SECOND * ETHERNET_SHARE)
            print(f"iperf3, both directions at once: {share:.3f} of the bound")


if __name__ == "__main__":
    main()
