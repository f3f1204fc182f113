"""Short training runs on ranks of one machine: a step's time beside a plain loop's, the same bits twice, memory.

In processes of their own (__main__.py), so that what runs out of memory or breaks takes nothing with it. The first rank
prints rows as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hethub.communicator import World
from hethub.kernels.device import Clock, Device
from hethub.predictor.cost.operators import model_flops
from hethub.predictor.memory.ranks import rank_memory
from hethub.runtime.acceptance.plain_llama import PlainLlama, token_loss
from hethub.runtime.data import Dataset
from hethub.runtime.launch.session import session
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.parity.row import Row, State
from hethub.runtime.state.storage import DTYPES
from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec

LEAST_RATIO = 0.97  # of a plain compiled loop's speed
MEMORY_WITHIN = 0.10  # of what was predicted
SETTLING_STEPS = 2
# Llama 3.2 1B; of state it takes 18 bytes a parameter, 22 GB.
LLAMA_1B = ModelSpec(
    name="llama-1b", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, max_seq_len=4096,
    rope_theta=500000.0, tied_head=True,
)  # fmt: skip
SMALL = ModelSpec(name="small", layers=2, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=320, max_seq_len=64)
STATE_BYTES, STATE_SHARE = 18, 0.5  # of a parameter, and of the device's memory that they may take


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained: each replica takes `samples` a step."""

    model: ModelSpec
    precision: Precision
    seq_len: int
    samples: int
    steps: int


def subject_for(device: Device) -> Subject:
    """A Llama of 1 B parameters on devices, of fewer layers where their memory is small; on CPUs a small one."""
    memory = device.memory_bytes()
    if memory is None:
        return Subject(model=SMALL, precision="fp32", seq_len=32, samples=2, steps=6)
    precision: Precision = "bf16" if device.supports(torch.bfloat16) else "fp16"
    layers = LLAMA_1B.layers
    while layers > 1 and LLAMA_1B.replace(layers=layers).parameters * STATE_BYTES > STATE_SHARE * memory:
        layers -= 1
    return Subject(model=LLAMA_1B.replace(layers=layers), precision=precision, seq_len=4096, samples=4, steps=20)


def lay_out(subject: Subject, cluster: ClusterSpec, *, micro_batch: int = 1, **options: Any) -> Layout:
    """Data parallel over all ranks; `options` are the stage's, as in a plan file."""
    replicas = [
        {"ranks": [rank], "micro_batch": micro_batch, "samples": subject.samples} for rank in range(cluster.size)
    ]
    stage = {"layers": [[0, subject.model.layers]], "replicas": replicas, **options}
    plan = {
        "model": subject.model.name, "cluster": cluster.name, "global_batch": subject.samples * cluster.size,
        "seq_len": subject.seq_len, "precision": subject.precision, "stages": [stage],
    }  # fmt: skip
    return bind(PlanSpec.model_validate(plan), subject.model, cluster)


def make_trainer(layout: Layout, world: World) -> Trainer:
    """Return a trainer with initial weights, on random tokens."""
    model, plan = layout.model, layout.plan
    tokens = np.random.default_rng(0).integers(0, model.vocab, 64 * plan.global_batch * plan.seq_len)
    dataset = Dataset.one(
        name="random tokens", tokens=tokens, seq_len=plan.seq_len, seed=1, vocab=model.vocab, max_token=model.vocab - 1,
        end_of_document=None, tokenizer="none",
    )  # fmt: skip
    train = TrainSpec(
        steps=1000, warmup_steps=1, lr=1e-4, min_lr=1e-5, global_batch=plan.global_batch, seq_len=plan.seq_len,
        precision=plan.precision,
    )  # fmt: skip
    trainer = Trainer(layout, world, dataset, train)
    trainer.initialise()
    return trainer


def timed_steps(step: Callable[[int], object], device: Device, steps: int) -> float:
    """The median seconds of a step, without the first ones."""
    clock, seconds = Clock(device), list[float]()
    for number in range(1, steps + 1):
        device.synchronize()
        start = clock.stamp()
        step(number)
        seconds.append(clock.between(start, clock.stamp()))
    return median(seconds[SETTLING_STEPS:])


def speed(world: World, cluster: ClusterSpec) -> Iterator[Row]:
    """A step of one rank beside the same step of a plain loop with the same bytes of state a parameter."""
    device, subject = world.device, subject_for(world.device)
    trainer = make_trainer(lay_out(subject, cluster), world)
    ours = timed_steps(trainer.run_step, device, subject.steps)
    del trainer
    device.release_memory()
    theirs = timed_steps(plain_step(subject, device), device, subject.steps)
    flops = model_flops(subject.model, subject.samples, subject.seq_len)
    peak = cluster.places[0].accelerator.peak_flops(subject.precision)
    figures = {"step_seconds": ours, "plain_step_seconds": theirs, "ratio": theirs / ours}
    found = f"{ours:.4g} s a step, a plain {'compiled ' if device.is_gpu else ''}loop {theirs:.4g} s: {theirs / ours:.2f} of its speed"
    if not device.is_gpu:
        reason = "CPUs: a small model, the plain loop eager, no limit is held to"
        yield Row(what="training", where=device.name, state="note", found=found, reason=reason, figures=figures)
        return
    figures["mfu"] = 100 * flops / ours / peak if peak else 0.0
    slow = theirs / ours < LEAST_RATIO
    yield Row(
        what=f"training {subject.model.parameters / 1e9:.2f} B parameters, {subject.precision}", where=device.name,
        state="fail" if slow else "pass", found=f"{found}; MFU {figures['mfu']:.1f} %",
        reason=f"at least {LEAST_RATIO} is expected" if slow else "", figures=figures,
    )  # fmt: skip


def plain_step(subject: Subject, device: Device, *, pure: bool = False) -> Callable[[int], object]:
    """One step of PyTorch's own parts: fp32 weights, autocast, fused AdamW; compiled on a device. If `pure`, weights,
    gradients and moments are of the half precision themselves: 8 bytes a parameter for 18."""
    where, half = device.torch_device, DTYPES[subject.precision]
    with torch.device(where):
        model: nn.Module = PlainLlama(subject.model, subject.seq_len)
    if pure:
        model.to(half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    rows = torch.randint(0, subject.model.vocab, (subject.samples, subject.seq_len + 1), device=where)

    def loss_of(row: Tensor) -> Tensor:
        return token_loss(model(row[:, :-1]), row[:, 1:])

    run = torch.compile(loss_of) if device.is_gpu else loss_of

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        for row in rows.split(1):
            with torch.autocast(where.type, half, enabled=device.is_gpu and not pure):
                loss = run(row)
            (loss / subject.samples).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def repeats(world: World, cluster: ClusterSpec) -> Iterator[Row]:
    """Whether three steps give the same bits when they are trained again; on devices at least losses within a unit of their
    precision, which the order of sums does not reach."""
    subject = subject_for(world.device)
    layout = lay_out(subject, cluster)
    runs = []
    for _ in range(2):
        runs.append(_bits(make_trainer(layout, world)))
        world.device.release_memory()  # two states need not fit on a device
    equal = runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    unit = torch.finfo(DTYPES[subject.precision]).eps
    near = all(abs(one - other) <= unit * abs(one) for one, other in zip(runs[0][0], runs[1][0], strict=True))
    ordered = world.device.is_gpu and near
    state: State = "pass" if equal else "note" if ordered else "fail"
    # By parts: all of a billion parameters in fp64 would be tens of gigabytes of the host's.
    parts = zip(*(weights.split(1 << 24) for _, weights in runs), strict=True)
    far = max(float((one.double() - other.double()).abs().max()) for one, other in parts)
    reason = "sums by atomics come in any order: set torch's deterministic algorithms to compare runs"
    yield Row(
        what="the same bits twice", where=world.device.name, state=state,
        found="" if equal else f"weights differ by {far:.3g}",
        reason="" if equal else reason if ordered else "no order of sums explains it",
        figures={"largest_difference": far},
    )  # fmt: skip


def _bits(trainer: Trainer) -> tuple[list[float], Tensor]:
    losses = [trainer.run_step(step).loss for step in (1, 2, 3)]
    trainer.stepping.flush()
    return losses, trainer.storage.weights.cpu()


def memory(world: World, cluster: ClusterSpec) -> Iterator[Row]:
    """Peaks of the allocator beside predictions, without and with ZeRO-3 and offload; on CPUs our own count of them."""
    device, subject = world.device, subject_for(world.device)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("replicated", {}),
        # The ranks share one host's memory: each keeps a part of the moments there, not all.
        ("offloaded", {"offload": ("parameters", "optimizer"), "zero": int(world.size > 1)}),
    ]
    if world.size > 1:
        kinds.insert(1, (f"ZeRO-3 over {world.size}", {"zero": 3}))
    for name, options in kinds:
        layout = lay_out(subject, cluster, **options)
        device.release_memory()
        trainer = make_trainer(layout, world)
        for step in (1, 2):
            trainer.run_step(step)
        share = trainer.memory_bytes / _allocated(layout, world.rank)
        shares = world.all_gather_objects(share)
        del trainer
        device.release_memory()
        furthest = max(shares, key=lambda each: abs(each - 1))
        off = abs(furthest - 1) > MEMORY_WITHIN
        state: State = ("fail" if off else "pass") if device.is_gpu else "note"
        reason = f"within {MEMORY_WITHIN:.0%} is expected" if off else ""
        if not device.is_gpu:
            reason = "counted by tensors: a CPU has no allocator that tells"
        yield Row(
            what=f"memory, {name}", where=device.name, state=state,
            found=f"{min(shares):.2f} to {max(shares):.2f} of the prediction",
            reason=reason,
            figures={"share_of_prediction": furthest},
        )  # fmt: skip


def _allocated(layout: Layout, rank: int) -> int:
    """What the prediction says of torch's allocator: without the driver's and the libraries' own."""
    memory = rank_memory(layout)[rank]
    return memory.bytes - memory.parts["framework"] - memory.parts["communicator"]


PARTS = {"speed": speed, "repeats": repeats, "memory": memory}


def main() -> None:
    with session(None) as (world, cluster):
        rows = [row.to_dict() for part in sys.argv[1:] for row in PARTS[part](world, cluster)]
        first = world.rank == 0
    if first:
        print(json.dumps(rows))
