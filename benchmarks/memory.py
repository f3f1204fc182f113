"""What ranks really hold: their peak proportional set beside the runtime's own count and the prediction.

    python benchmarks/memory.py [PLAN ...]

Four rank processes train three steps of a Llama of 97 M parameters under every plan. A thread of each rank reads
/proc/self/smaps_rollup all the while: the proportional set (Pss) counts a page that n processes share as 1/n. What an
idle rank takes is subtracted: the same processes and imports with a model of 0.1 M parameters. The counted bytes and
the predicted ones are those of the accelerator and of host memory together, for both are this process's memory here.

`left` is the proportional set behind the last step, and `trimmed` the same after malloc_trim(0): what lies between
them is memory that is free, and that the C library has not given back.
"""

import argparse
import ctypes
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `tests` is meant

from hethub.predictor.memory.ranks import rank_memory
from hethub.spec.model import ModelSpec
from tests.support.layouts import Case, build_trainer, chunked, replica, stage
from tests.support.ranks import run_ranks

MODEL = ModelSpec(name="bench", layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=8192, max_seq_len=64)
TINY = MODEL.replace(hidden=24, ffn=64, vocab=256)
RANKS, STEPS, SAMPLING_SECONDS = 4, 3, 0.004
EACH = [replica([rank], 2, 1) for rank in range(RANKS)]


def whole(zero: int, **more: Any) -> list[dict[str, Any]]:
    """All layers on every rank, data parallel."""
    return [stage((0, 12), *EACH, zero=zero, **more)]


def chunks(**more: Any) -> list[dict[str, Any]]:
    """Two stages of three ministages, two replicas each."""
    first, second = [(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 12)]
    return [
        chunked(first, replica([0], 4, 1), replica([1], 4, 1), **more),
        chunked(second, replica([2], 4, 1), replica([3], 4, 1), **more),
    ]


PLANS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "zero 0": (whole(0), "1f1b"),
    "zero 1": (whole(1), "1f1b"),
    "zero 2": (whole(2), "1f1b"),
    "zero 3": (whole(3), "1f1b"),
    "zero 3, layered": (whole(3), "layered"),
    "ministages": (chunks(), "ministages"),
    "ministages, zero 3": (chunks(zero=3), "ministages"),
    "zero 0, parameters offloaded": (whole(0, offload=["parameters"]), "1f1b"),
    "zero 3, parameters offloaded": (whole(3, offload=["parameters"]), "1f1b"),
}


def case(plan: str, model: ModelSpec) -> Case:
    stages, schedule = PLANS[plan]
    return Case(name=plan, stages=stages, schedule=schedule, model=model, precision="fp32", seq_len=64, global_batch=8)


def kilobytes(path: str, key: str) -> int:
    """A line of a /proc file, in bytes."""
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def pss() -> int:
    return kilobytes("/proc/self/smaps_rollup", "Pss")


class Sampler(threading.Thread):
    """Remembers the largest proportional set until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._stopped = 0, False

    def run(self) -> None:
        while not self._stopped:
            self.peak = max(self.peak, pss())
            time.sleep(SAMPLING_SECONDS)

    def stop(self) -> int:
        self._stopped = True
        self.join()
        return self.peak


def watch(world: Any, plan: str, model: ModelSpec) -> dict[str, int]:
    """Bytes of this rank: peaks while it is built and while it trains, and what is left behind the last step."""
    sampler = Sampler()
    sampler.start()
    trainer = build_trainer(world, case(plan, model))
    building, sampler = sampler.stop(), Sampler()
    world.barrier()
    sampler.start()
    for step in range(1, STEPS + 1):
        trainer.run_step(step)
    found = {"building": building, "training": sampler.stop(), "resident": kilobytes("/proc/self/status", "VmHWM")}
    found["left"] = pss()
    ctypes.CDLL(None).malloc_trim(0)
    return {**found, "trimmed": pss(), "counted": trainer.memory_bytes + trainer.arena.peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", metavar="PLAN", default=list(PLANS), help=f"of {', '.join(PLANS)}")
    plans = parser.parse_args().plans
    print(f"{MODEL.parameters / 1e6:.1f} M parameters, fp32, {RANKS} ranks, sequence 64, global batch 8, {STEPS} steps")
    idle = run_ranks(RANKS, watch, "zero 0", TINY, timeout_seconds=600)
    print(
        f"an idle rank: Pss {idle[0]['training'] / 1e6:.0f} MB, VmHWM {idle[0]['resident'] / 1e6:.0f} MB; MB beyond it:"
    )
    print("| plan | rank | predicted | counted | peak Pss | Pss / predicted | building | VmHWM | left | trimmed |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for plan in plans:
        foreseen = rank_memory(case(plan, MODEL).layout())
        results = run_ranks(RANKS, watch, plan, MODEL, timeout_seconds=900)
        for rank, (entry, found, base) in enumerate(zip(foreseen, results, idle, strict=True)):
            print(row(plan, rank, entry.bytes + entry.host_bytes, found, base), flush=True)


def row(plan: str, rank: int, predicted: int, found: dict[str, int], idle: dict[str, int]) -> str:
    beyond = {key: found[key] - idle["resident" if key == "resident" else "training"] for key in found}
    shown = [f"{value / 1e6:.0f}" for value in (predicted, found["counted"], beyond["training"])]
    rest = [f"{beyond[key] / 1e6:.0f}" for key in ("building", "resident", "left", "trimmed")]
    return f"| {plan} | {rank} | {' | '.join(shown)} | {beyond['training'] / predicted:.2f} | {' | '.join(rest)} |"


if __name__ == "__main__":
    main()
