"""Plans on one device: step and memory as predicted from the catalogue and from a profile, beside those measured.

    python benchmarks/predict_gpu.py [--steps 6]

Llama 3.2 1B and four layers of Llama 3 8B under their head, bf16: recompute, offload, long and short sequences, larger
microbatches. Steps are medians by the device's events, behind two that compile; memory is the peak that torch's allocator
has reserved, and the prediction without the driver's own. Without a device a small model runs, which shows that the
script works and says nothing of one.
"""

import argparse
from statistics import mean
from typing import Any, NamedTuple

from hethub.communicator import World
from hethub.predictor import predict
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.memory.ranks import rank_memory
from hethub.runtime.acceptance.training import LLAMA_1B, SMALL, make_trainer, timed_steps
from hethub.runtime.launch.session import session
from hethub.runtime.measure.profiler import profile_world
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec

LAYERS_OF_8B = ModelSpec(
    name="llama-8b-layers", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, max_seq_len=4096,
    rope_theta=500000.0,
)  # fmt: skip
LONG = LLAMA_1B.replace(name="llama-1b-long", max_seq_len=16384)


class Plan(NamedTuple):
    """All layers on the device."""

    name: str
    model: ModelSpec
    seq_len: int
    micro_batch: int
    samples: int
    options: dict[str, Any]

    def layout(self, cluster: ClusterSpec, precision: str) -> Layout:
        replica = {"ranks": [0], "micro_batch": self.micro_batch, "samples": self.samples}
        plan = {
            "model": self.model.name, "cluster": cluster.name, "global_batch": self.samples, "seq_len": self.seq_len,
            "precision": precision,
            "stages": [{"layers": [[0, self.model.layers]], "replicas": [replica], **self.options}],
        }  # fmt: skip
        return bind(PlanSpec.model_validate(plan), self.model, cluster)


def _name(options: dict[str, Any]) -> str:
    """What differs from a plan that keeps everything on the device."""
    values = {key: value if isinstance(value, str) else " and ".join(value) for key, value in options.items()}
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "as it is"


def plans(*, on_gpu: bool) -> list[Plan]:
    """Those of every model together, so that each model is profiled once."""
    offloads = [["parameters"], ["optimizer"], ["activations"], ["parameters", "optimizer"]]
    options = [{}, {"recompute": "selective"}, {"recompute": "full"}, *({"offload": each} for each in offloads)]
    of_all = [(_name(each), each) for each in options]
    if not on_gpu:
        return [Plan(name, SMALL, 32, 1, 2, each) for name, each in of_all]
    return [
        *(Plan(name, LLAMA_1B, 4096, 1, 4, each) for name, each in of_all),
        Plan("microbatches of 4", LLAMA_1B, 4096, 4, 8, {}),
        Plan("microbatches of 8 x 1,024", LLAMA_1B, 1024, 8, 16, {}),
        Plan("16,384 tokens", LONG, 16384, 1, 2, {}),
        Plan("as it is", LAYERS_OF_8B, 4096, 1, 4, {}),
        Plan("recompute full, microbatches of 2", LAYERS_OF_8B, 4096, 2, 4, {"recompute": "full"}),
        Plan("offload optimizer", LAYERS_OF_8B, 4096, 1, 4, {"offload": ["optimizer"]}),
    ]


def measured(layout: Layout, world: World, steps: int) -> tuple[float, int]:
    """Seconds of a step, and the bytes reserved for it."""
    world.device.release_memory()
    trainer = make_trainer(layout, world)
    seconds = timed_steps(trainer.run_step, world.device, steps + 2)
    return seconds, trainer.memory_bytes


def profiled(world: World, cluster: ClusterSpec, model: ModelSpec, of_model: list[Plan], precision: Any) -> ProfileSpec:
    """The model's profile at every size that its plans have."""
    world.device.release_memory()
    return profile_world(
        world, model, cluster.places[0].accelerator, precision, [0],
        seq_lens=sorted({plan.seq_len for plan in of_model}), micro_batches=sorted({plan.micro_batch for plan in of_model}),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    with session(None) as (world, cluster):
        on_gpu = world.device.is_gpu
        precision, chosen = "bf16" if on_gpu else "fp32", plans(on_gpu=on_gpu)
        if not on_gpu:
            print("No GPU here: these figures are of a small model on a CPU.")
        print(
            "| model | plan | catalogue s | profile s | measured s | off by, % | | predicted GiB | reserved / predicted |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        off: list[tuple[float, float]] = []
        for model in dict.fromkeys(plan.model for plan in chosen):
            of_model = [plan for plan in chosen if plan.model == model]
            profile = profiled(world, cluster, model, of_model, precision)
            for plan in of_model:
                layout = plan.layout(cluster, precision)
                foretold = [predict(layout, profile=each).step_seconds for each in (None, profile)]
                memory = rank_memory(layout)[0]
                num_bytes = memory.bytes - memory.parts["framework"]
                seconds, held = measured(layout, world, steps)
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
