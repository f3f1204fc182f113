"""Whether slow ranks, and no others, are named among real ranks of unlike work: what they really compute, step by step.

    python benchmarks/stragglers.py [LAYOUT ...] [--steps 1000]

Four rank processes on this host train a small Llama in fp32 under every layout, and watch each other as `hethub train`
with `replan: report` has them. First nobody is slow: no rank may be named. Then each rank in turn computes 1.3 times as
long: it, and no other, must be named within twenty steps. Ranks outnumber the cores here, so a rank's work is timed by
its thread's own CPU clock: what it waits for a core is not its own slowness. The speed of the cores is assumed, as in
any run that nobody profiled; how far that is off (measured / planned) is printed, and so is the largest median of a
clean rank's factor: an alarm is due at 1.2 in five steps on end. Five steps take 0.3 s here; in steps of a quarter of
the work, what disturbs a core for a tenth of a second was an alarm once in eight thousand.

Exits with 1 where a rank is named that is not slow, or one that is slow is not.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `tests` is meant

import torch

from hethub.kernels.device import Clock, Device, Stamp
from hethub.runtime.loop.replanning import Replanner
from hethub.runtime.loop.steps import SETTLING_STEPS
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.measure.rank_times import PASSES, planned_seconds
from hethub.runtime.pace import WatchedPace
from hethub.spec.job import StragglerSpec, TrainSpec
from hethub.spec.layout.execution import Kind
from hethub.spec.model import ModelSpec
from tests.support.layouts import Case, random_tokens, replica, stage
from tests.support.ranks import run_ranks

MODEL = ModelSpec(name="small", layers=4, hidden=128, heads=8, kv_heads=4, ffn=352, vocab=512, max_seq_len=64)
RANKS, SAMPLES, SLOWDOWN, NAMED_WITHIN = 4, 8, 1.3, 20
LAYOUTS = {
    "dp4": [stage((0, 4), *(replica([rank], 2, 2) for rank in range(4)), zero=1)],
    "dp4, uneven": [stage((0, 4), *(replica([rank], own, own) for rank, own in enumerate((3, 3, 1, 1))), zero=1)],
    "tp2 beside dp2": [stage((0, 4), replica([0, 1], 4, 4), replica([2], 2, 2), replica([3], 2, 2), zero=1)],
    "tp2 beside tp2": [stage((0, 4), replica([0, 1], 5, 5), replica([2, 3], 3, 3), zero=1)],
    "four stages": [stage((number, number + 1), replica([number], 8, 4)) for number in range(4)],
    "two stages of dp2": [
        stage((2 * number, 2 * number + 2), replica([2 * number], 4, 2), replica([2 * number + 1], 4, 2))
        for number in range(2)
    ],
    "tp2, then dp2": [stage((0, 2), replica([0, 1], 8, 4)), stage((2, 4), replica([2], 4, 4), replica([3], 4, 4))],
    "dp3, then one": [
        stage((0, 3), replica([0], 4, 4), replica([1], 2, 2), replica([2], 2, 2)), stage((3, 4), replica([3], 8, 4)),
    ],
}  # fmt: skip


class CpuClock(Clock):
    """The calling thread's own CPU seconds."""

    def stamp(self) -> Stamp:
        return Stamp(time.thread_time())


class SlowedPace(WatchedPace):
    """Times a rank's work by its CPU clock, and has it compute `slowdown` times as long."""

    def __init__(self, device: Device, slowdown: float) -> None:
        super().__init__(device)
        self._clock, self._slowdown = CpuClock(device), slowdown
        self._began = self._communicated = 0.0

    def enter(self, kind: Kind, layer: int) -> None:
        super().enter(kind, layer)
        self._began, self._communicated = time.thread_time(), 0.0

    def leave(self) -> None:
        now = time.thread_time()
        end = now + (self._slowdown - 1.0) * (now - self._began - self._communicated)
        while time.thread_time() < end:
            pass
        super().leave()

    @contextmanager
    def communicating(self) -> Iterator[bool]:
        began = time.thread_time()
        with super().communicating() as waits:
            yield waits
        self._communicated += time.thread_time() - began


class Watched(NamedTuple):
    """Who was named in which step, and by rank the median of measured over planned in the passes."""

    named: list[tuple[int, int]]
    ratios: list[float]


class Watch(Replanner):
    """Names slow ranks and looks for no other plan."""

    def _plan_anew(self) -> str:
        return ""


def train(world: Any, case: Case, num_steps: int, slow_rank: int | None) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    layout, pace = case.layout(), SlowedPace(world.device, SLOWDOWN if world.rank == slow_rank else 1.0)
    trainer = Trainer(layout, world, random_tokens(case), TrainSpec(steps=num_steps), pace=pace)
    trainer.initialise()
    job: Any = SimpleNamespace(spec=SimpleNamespace(drift=StragglerSpec(), replan="report", train=TrainSpec()))
    watch, planned = Watch(job, layout, None), planned_seconds(layout, None)
    named, steps = [], []
    for step in range(1, num_steps + 1):
        busy = trainer.run_step(step).busy_seconds
        if step > SETTLING_STEPS:
            rows = watch.note(step, busy, world)
            named += [(row["rank"], step) for row in rows if "kind" in row]  # the others say that one has recovered
            steps.append([passes(own or {}) / passes(expected) for own, expected in zip(busy, planned, strict=True)])
    return named, [median(own) for own in zip(*steps, strict=True)]


def passes(seconds: dict[str, float]) -> float:
    return sum(seconds.get(kind, 0.0) for kind in PASSES)


def run(name: str, num_steps: int, slow_rank: int | None = None) -> Watched:
    case = Case(name=name, stages=LAYOUTS[name], global_batch=SAMPLES, precision="fp32", model=MODEL, seq_len=64)
    return Watched(*run_ranks(RANKS, train, case, num_steps, slow_rank, timeout_seconds=60 + 10 * num_steps)[0])


def judge(name: str, num_steps: int) -> bool:
    """Whether the ranks of a layout are judged rightly; prints a line."""
    clean = run(name, num_steps)
    slowed = [run(name, NAMED_WITHIN, rank) for rank in range(RANKS)]
    right = not clean.named and all([rank for rank, _ in own.named] == [r] for r, own in enumerate(slowed))
    ratios = " ".join(f"{ratio:.2f}" for ratio in clean.ratios)
    told = "; ".join(", ".join(f"rank {rank} at step {step}" for rank, step in own.named) or "nobody" for own in slowed)
    print(
        f"{name:18} {num_steps} clean steps: {len(clean.named)} alarms {clean.named or ''}; measured / planned {ratios}; "
        f"ranks 0 to {RANKS - 1} slow in turn: {told}",
        flush=True,
    )
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=", ".join(LAYOUTS))
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    rights = [judge(name, options.steps) for name in options.layouts or LAYOUTS]
    return 0 if all(rights) else 1


if __name__ == "__main__":
    sys.exit(main())
