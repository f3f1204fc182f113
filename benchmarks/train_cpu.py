"""hethub's training step against PyTorch's own, case by case, both in the same processes of one run.

    python benchmarks/train_cpu.py [--pairs 11] [--cases one dp2 pp2 tp2 documents]

Both sides compiled are compared, and both as they stand. All four steps follow each other in turn, so that drift of a
shared machine hits all alike. The A/A control is the same ratio between hethub's own steps, one pair apart: its spread
says what a ratio means here. `documents` holds hethub with attention inside documents against hethub without.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from hethub.kernels import bodies
from hethub.runtime.acceptance.plain_llama import PlainLlama, token_loss
from hethub.runtime.data import Dataset
from hethub.runtime.loop.trainer import Trainer
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.ranks import run_ranks

MODEL = ModelSpec(name="bench", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=4096, max_seq_len=256)
SEQ_LEN, GLOBAL_BATCH, MICRO_BATCHES = 256, 4, 4
TRAIN = TrainSpec(steps=10_000, warmup_steps=1, lr=1e-4, min_lr=1e-5)
WARM_UP = 2

Step = Callable[[], None]
Compile = Callable[[nn.Module], Any]  # or leaves a module as it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    builds = [build for _, _, _, build in CASES]
    parser.add_argument("--cases", nargs="+", choices=builds, default=builds)
    chosen = parser.parse_args()
    print(f"model: {MODEL.parameters / 1e6:.1f} M parameters, {MODEL.to_dict()}")
    print(
        f"sequence {SEQ_LEN}, global batch {GLOBAL_BATCH}, fp32, one thread per rank, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(
        "| case | peer | hethub s/step | peer s/step | throughput, hethub / peer: median (lower 95 % bound) | A/A control |"
    )
    print("|---|---|---|---|---|---|")
    for name, peer, ranks, build in CASES:
        if build in chosen.cases:
            times = run_ranks(ranks, measure, build, chosen.pairs, timeout_seconds=1800)[0]
            for kind, ours, theirs in zip(("compiled", "eager"), times[::2], times[1::2], strict=True):
                print(row(f"{name}, {kind}", peer, ours, theirs), flush=True)


def row(name: str, peer: str, ours: list[float], theirs: list[float]) -> str:
    ratios, control = [b / a for a, b in zip(ours, theirs, strict=True)], [b / a for a, b in pairwise(ours)]
    shown = f"{statistics.median(ratios):.3f} ({lower_bound(ratios):.3f})"
    spread = f"{statistics.median(control):.3f} ({min(control):.3f} to {max(control):.3f})"
    return f"| {name} | {peer} | {statistics.median(ours):.3f} | {statistics.median(theirs):.3f} | {shown} | {spread} |"


def lower_bound(values: list[float]) -> float:
    """What the median of the values' distribution exceeds with at least 95 % certainty, whatever the distribution: the
    k-th smallest value, where k - 1 or fewer of n fair coins show heads with a probability of at most 5 %."""
    below = accumulate(math.comb(len(values), k) / 2 ** len(values) for k in range(len(values)))
    return sorted(values)[max(0, sum(chance <= 0.05 for chance in below) - 1)]


def measure(world: Any, build: str, pairs: int) -> tuple[list[float], ...]:
    """Seconds of every step on this rank: of hethub and its peer compiled, then of both as they stand, in turn."""
    torch.set_num_threads(1)
    steps = sides(world, build)
    times: tuple[list[float], ...] = tuple([] for _ in steps)
    for pair in range(WARM_UP + pairs):
        for step, kept in zip(steps, times, strict=True):
            world.barrier()
            start = time.perf_counter()
            step()
            world.barrier()
            if pair >= WARM_UP:
                kept.append(time.perf_counter() - start)
    return times


def sides(world: Any, build: str) -> list[Step]:
    if build == "documents":
        ours, theirs = hethub_step(world, "one", document_mask=True), hethub_step(world, "one")
        return [with_bodies(compiles, step) for compiles in (True, False) for step in (ours, theirs)]
    ours, peer = hethub_step(world, build), PEERS[build]
    return [
        with_bodies(True, ours),
        peer(world, lambda model: torch.compile(model, dynamic=False)),
        with_bodies(False, ours),
        peer(world, lambda model: model),
    ]


# -- hethub ------------------------------------------------------------------------------------------------------------


def with_bodies(compiles: bool, step: Step) -> Step:
    """The step with bodies compiled, or as they stand."""

    def run() -> None:
        bodies.choose(compiles)
        step()

    return run


def hethub_step(world: Any, build: str, *, document_mask: bool = False) -> Step:
    cluster = {"name": "bench", "nodes": [{"name": "cpu", "accelerator": "CPU-core", "accelerators": world.size}]}
    plan = {
        "model": "bench", "cluster": "bench", "global_batch": GLOBAL_BATCH, "seq_len": SEQ_LEN, "precision": "fp32",
        "stages": STAGES[build],
    }  # fmt: skip
    layout = bind(PlanSpec.model_validate(plan), MODEL, ClusterSpec.model_validate(cluster))
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab - 1, 100_000)
    tokens[:: SEQ_LEN // 4 - 1] = MODEL.vocab - 1  # documents of 62 tokens: four or five in a sample
    dataset = Dataset.one(
        name="random", tokens=tokens, seq_len=SEQ_LEN, seed=1, vocab=MODEL.vocab, max_token=MODEL.vocab - 1,
        end_of_document=MODEL.vocab - 1, tokenizer="none",
    )  # fmt: skip
    trainer = Trainer(layout, world, dataset, TRAIN, document_mask=document_mask)
    trainer.initialise()
    steps = iter(range(1, 10_000))

    def step() -> None:
        trainer.run_step(next(steps))

    return step


def _replica(ranks: list[int], samples: int, micro_batch: int) -> dict[str, Any]:
    return {"ranks": ranks, "samples": samples, "micro_batch": micro_batch}


STAGES = {
    "one": [{"layers": [[0, 8]], "replicas": [_replica([0], GLOBAL_BATCH, GLOBAL_BATCH)]}],
    "dp2": [{"layers": [[0, 8]], "replicas": [_replica([0], 2, 2), _replica([1], 2, 2)]}],
    "pp2": [
        {"layers": [[0, 4]], "replicas": [_replica([0], GLOBAL_BATCH, GLOBAL_BATCH // MICRO_BATCHES)]},
        {"layers": [[4, 8]], "replicas": [_replica([1], GLOBAL_BATCH, GLOBAL_BATCH // MICRO_BATCHES)]},
    ],
    "tp2": [{"layers": [[0, 8]], "replicas": [_replica([0, 1], GLOBAL_BATCH, GLOBAL_BATCH)]}],
}


# -- the peers: PyTorch's own parts, each as its documentation shows, with the fused AdamW that is its fastest ----------


def _batch(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, MODEL.vocab, (GLOBAL_BATCH, SEQ_LEN + 1)))[start:stop]
    return rows[:, :-1], rows[:, 1:]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]  # sharded and plain tensors never meet in a group, which fused AdamW would refuse
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


def _loop(model: nn.Module, compute: Callable[[], None], clip: Callable[[nn.Module], Any] | None = None) -> Step:
    optimizer = _optimizer(model)
    clip = clip or (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        compute()
        clip(model)
        optimizer.step()

    return step


def plain_step(world: Any, compiled: Compile) -> Step:
    model = PlainLlama(MODEL, SEQ_LEN)
    run, (tokens, targets) = compiled(model), _batch(0, GLOBAL_BATCH)
    return _loop(model, lambda: token_loss(run(tokens), targets).backward())


def ddp_step(world: Any, compiled: Compile) -> Step:
    group = dist.new_group(list(range(world.size)), backend="gloo")
    model = nn.parallel.DistributedDataParallel(
        PlainLlama(MODEL, SEQ_LEN), process_group=group, gradient_as_bucket_view=True
    )
    own = GLOBAL_BATCH // world.size
    run, (tokens, targets) = compiled(model), _batch(world.rank * own, (world.rank + 1) * own)
    return _loop(model, lambda: token_loss(run(tokens), targets).backward())


def pipeline_step(world: Any, compiled: Compile) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    group = dist.new_group(list(range(world.size)), backend="gloo")
    middle = MODEL.layers // 2
    model = PlainLlama(MODEL, SEQ_LEN, *((0, middle) if world.rank == 0 else (middle, MODEL.layers)))
    stage = PipelineStage(compiled(model), world.rank, world.size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=token_loss)
    tokens, targets = _batch(0, GLOBAL_BATCH)

    def compute() -> None:
        if world.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)

    return _loop(model, compute)


def tensor_parallel_step(world: Any, compiled: Compile) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    group = dist.new_group(list(range(world.size)), backend="gloo")
    mesh = DeviceMesh.from_group(group, "cpu")
    model = PlainLlama(MODEL, SEQ_LEN)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False),
    }
    for layer in range(MODEL.layers):
        plan |= {f"blocks.{layer}.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"blocks.{layer}.{name}": RowwiseParallel() for name in ("o", "down")}
    parallelize_module(model, mesh, plan)
    run, (tokens, targets) = compiled(model), _batch(0, GLOBAL_BATCH)

    def compute() -> None:
        with loss_parallel():
            token_loss(run(tokens), targets).backward()

    def clip(model: nn.Module) -> None:
        """clip_grad_norm_ refuses sharded beside plain gradients, so the norm is summed by hand, on local shards."""
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(square, group=group)
        torch._foreach_mul_(grads, min(1.0, 1.0 / (float(square) ** 0.5 + 1e-6)))

    return _loop(model, compute, clip)


PEERS = {"one": plain_step, "dp2": ddp_step, "pp2": pipeline_step, "tp2": tensor_parallel_step}
CASES = [
    ("one process", "plain PyTorch loop", 1, "one"),
    ("DP 2", "DistributedDataParallel", 2, "dp2"),
    ("PP 2, 1F1B", "torch.distributed.pipelining", 2, "pp2"),
    ("TP 2", "torch.distributed.tensor.parallel", 2, "tp2"),
    ("one process, document_mask", "hethub without it", 1, "documents"),
]

if __name__ == "__main__":
    main()
