"""Plans on one device: step and memory as predicted from the catalogue and from a profile, beside those measured.

    python benchmarks/predict_gpu.py [--steps 6]

Llama 3.2 1B and four layers of Llama 3 8B under their head, bf16: recompute, offload, long and short sequences, larger
microbatches. Steps are medians by the device's events, behind two that compile; memory is the peak that torch's allocator
has reserved, and the prediction without the driver's own. Without a device a small model runs, which shows that the
script works and says nothing of one.
"""

import argparse
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `benchmarks` is meant

from benchmarks.train_gpu import LAYERS_OF_8B
from hethub.communicator import World
from hethub.predictor import predict
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.memory.ranks import rank_memory
from hethub.runtime.acceptance.training import (
    LLAMA_1B,
    SETTLING_STEPS,
    SMALL,
    Subject,
    lay_out,
    make_trainer,
    timed_steps,
)
from hethub.runtime.launch.session import session
from hethub.runtime.measure.profiler import profile_world
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout

LONG = LLAMA_1B.replace(name="llama-1b-long", max_seq_len=16384)


class Plan(NamedTuple):
    """All layers on the device: what is trained, and how."""

    name: str
    subject: Subject
    micro_batch: int
    options: dict[str, Any]


def _name(options: dict[str, Any]) -> str:
    """What differs from a plan that keeps everything on the device."""
    values = {key: value if isinstance(value, str) else " and ".join(value) for key, value in options.items()}
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "as it is"


def plans(steps: int, *, on_gpu: bool) -> list[Plan]:
    """Those of every model together, so that each model is profiled once."""
    offloads = [["parameters"], ["optimizer"], ["activations"], ["parameters", "optimizer"]]
    options: list[dict[str, Any]] = [
        {},
        {"recompute": "selective"},
        {"recompute": "full"},
        *({"offload": each} for each in offloads),
    ]
    of_all = [(_name(each), each) for each in options]
    if not on_gpu:
        small = Subject(model=SMALL, precision="fp32", seq_len=32, samples=2, steps=steps)
        return [Plan(name, small, 1, each) for name, each in of_all]
    one = Subject(model=LLAMA_1B, precision="bf16", seq_len=4096, samples=4, steps=steps)
    eight = replace(one, model=LAYERS_OF_8B)
    return [
        *(Plan(name, one, 1, each) for name, each in of_all),
        Plan("microbatches of 4", replace(one, samples=8), 4, {}),
        Plan("microbatches of 8 x 1,024", replace(one, seq_len=1024, samples=16), 8, {}),
        Plan("16,384 tokens", replace(one, model=LONG, seq_len=16384, samples=2), 1, {}),
        Plan("as it is", eight, 1, {}),
        Plan("recompute full, microbatches of 2", eight, 2, {"recompute": "full"}),
        Plan("offload optimizer", eight, 1, {"offload": ["optimizer"]}),
    ]


def measured(layout: Layout, world: World, steps: int) -> tuple[float, int]:
    """Seconds of a step, and the bytes reserved for it."""
    world.device.release_memory()
    trainer = make_trainer(layout, world)
    return timed_steps(trainer.run_step, world.device, steps), trainer.memory_bytes


def profiled(world: World, cluster: ClusterSpec, of_model: list[Plan]) -> ProfileSpec:
    """The profile of a model at every size that its plans have."""
    world.device.release_memory()
    subjects = [plan.subject for plan in of_model]
    return profile_world(
        world, subjects[0].model, cluster.places[0].accelerator, subjects[0].precision, [0],
        seq_lens=sorted({own.seq_len for own in subjects}), micro_batches=sorted({plan.micro_batch for plan in of_model}),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    with session(None) as (world, cluster):
        chosen = plans(steps + SETTLING_STEPS, on_gpu=world.device.is_gpu)
        if not world.device.is_gpu:
            print("No GPU here: these figures are of a small model on a CPU.")
        print(
            "| model | plan | catalogue s | profile s | measured s | off by, % | | predicted GiB | reserved / predicted |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        off: list[tuple[float, float]] = []
        for model, each in groupby(chosen, lambda plan: plan.subject.model):
            profile = profiled(world, cluster, of_model := list(each))
            for plan in of_model:
                layout = lay_out(plan.subject, cluster, micro_batch=plan.micro_batch, **plan.options)
                foretold = [predict(layout, profile=each).step_seconds for each in (None, profile)]
                memory = rank_memory(layout)[0]
                num_bytes = memory.bytes - memory.parts["framework"]
                seconds, held = measured(layout, world, plan.subject.steps)
                off.append((foretold[0] / seconds - 1, foretold[1] / seconds - 1))
                print(
                    f"| {model.name} | {plan.name} | {foretold[0]:.4f} | {foretold[1]:.4f} | {seconds:.4f} |"
                    f" {100 * off[-1][0]:+.1f} | {100 * off[-1][1]:+.1f} | {num_bytes / 2**30:.2f} | {held / num_bytes:.3f} |",
                    flush=True,
                )
        means = [100 * mean(abs(each[side]) for each in off) for side in (0, 1)]
        print(f"mean error by the catalogue {means[0]:.1f} %, by the profile {means[1]:.1f} %")


if __name__ == "__main__":
    main()
