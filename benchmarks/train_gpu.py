"""A training step on one device over plain compiled PyTorch's, and copies of offloaded state over the device's own.

    python benchmarks/train_gpu.py [--rounds 3]

Llama 3.2 1B, and layers of Llama 3 8B under its head, bf16, sequences of 4,096. The peer holds the same 18 bytes a
parameter (fp32 weights and moments, autocast); beside it one that holds 8, all in bf16. Both sides are built anew in
every round. Without a device small models run, uncompiled, which shows that the script works and says nothing of one.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch

from hethub.communicator import World
from hethub.kernels.device import Clock, Device
from hethub.predictor.cost.operators import model_flops
from hethub.runtime.acceptance.training import LLAMA_1B, SMALL, Subject, lay_out, make_trainer, plain_step, timed_steps
from hethub.runtime.launch.session import session
from hethub.runtime.memory.host_arena import HostArena
from hethub.spec.cluster import ClusterSpec
from hethub.spec.model import ModelSpec

LAYERS_OF_8B = ModelSpec(
    name="llama-8b-layers", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, max_seq_len=4096,
    rope_theta=500000.0,
)  # fmt: skip
COPIED_BYTES, BLOCKS, REPEATS = 256 << 20, 16, 5


def seconds_of(world: World, cluster: ClusterSpec, subject: Subject, device: Device) -> list[float]:
    """A step of hethub's, of the plain loop and of the plain loop in half precision."""
    trainer = make_trainer(lay_out(subject, cluster), world)
    found = [timed_steps(trainer.run_step, device, subject.steps)]
    del trainer
    for pure in (False, True):
        device.release_memory()
        found.append(timed_steps(plain_step(subject, device, pure=pure), device, subject.steps))
    device.release_memory()
    return found


def copies(device: Device) -> dict[str, float]:
    """Bytes a second of the arena's stores and fetches over those of one pinned copy each way."""
    arena, clock = HostArena(device), Clock(device)
    hosts = [arena.empty(COPIED_BYTES // BLOCKS, torch.uint8) for _ in range(BLOCKS)]
    own = [torch.zeros(COPIED_BYTES // BLOCKS, dtype=torch.uint8, device=device.torch_device) for _ in range(BLOCKS)]
    host, whole = device.host_buffer(COPIED_BYTES), torch.cat(own)

    def stored() -> None:
        for block, values in zip(hosts, own, strict=True):
            arena.store(block, values)
        arena.synchronize()

    def fetched() -> None:
        for fetch in [arena.fetch(block, into) for block, into in zip(hosts, own, strict=True)]:
            fetch.wait()

    def seconds(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(REPEATS):
            device.synchronize()
            start = clock.stamp()
            call()
            taken.append(clock.between(start, clock.stamp()))
        return median(taken)

    down = seconds(lambda: host.copy_(whole, non_blocking=True))
    up = seconds(lambda: whole.copy_(host, non_blocking=True))
    return {"stores": down / seconds(stored), "fetches": up / seconds(fetched)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with session(None) as (world, cluster):
        device = world.device
        if device.is_gpu:
            subjects = [
                Subject(model=model, precision="bf16", seq_len=4096, samples=4, steps=12)
                for model in (LLAMA_1B, LAYERS_OF_8B)
            ]
        else:
            print("No GPU here: these figures are of a small model on a CPU.")
            subjects = [Subject(model=SMALL, precision="fp32", seq_len=32, samples=2, steps=6)]
        print(f"{device.name}, torch {torch.__version__}, medians of {rounds} rounds")
        print("| model | step s | MFU % | plain, 18 B / step (1.0) | plain, 8 B / step |")
        print("|---|---|---|---|---|")
        for subject in subjects:
            taken = [seconds_of(world, cluster, subject, device) for _ in range(rounds)]
            ours = median(row[0] for row in taken)
            flops = model_flops(subject.model, subject.samples, subject.seq_len)
            mfu = 100 * flops / ours / (cluster.places[0].accelerator.peak_flops(subject.precision) or float("nan"))
            plain, pure = (median(row[side] / row[0] for row in taken) for side in (1, 2))
            print(f"| {subject.model.name} | {ours:.4g} | {mfu:.1f} | {plain:.3f} | {pure:.3f} |", flush=True)
        for what, share in copies(device).items():
            print(f"{what} of offloaded state: {share:.2f} of one pinned copy (0.85)")


if __name__ == "__main__":
    main()
