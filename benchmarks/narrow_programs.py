"""Steps of narrow models under programs of strategy hap on one CPU rank: predicted, measured, and of plain PyTorch.

python benchmarks/narrow_programs.py [MODEL ...] [--turns 5]

Such steps are mostly what calling each operator takes. Processor seconds, both sides in turn, of every turn the
least step, of these the median. The planner knows the core by two probes, a matrix product and an addition, taken anew
before each model. The optimizer is left out on all sides. Exits with 1 where a prediction is more
than WITHIN_PERCENT off.
"""

import argparse
import logging
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from torch.distributed import HashStore

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from benchmarks.programs import Images, Words, best_of, cluster_of, images, probe, words
from hethub.communicator import Rendezvous, connect
from hethub.kernels.device import Device
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.lower import Step
from hethub.synthesis.planning import plan_graph

WITHIN_PERCENT = 25.0
Batch = tuple[torch.Tensor, ...]


class Chain(nn.Module):
    """Eight linear layers with activations and norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
        self.layers = nn.Sequential(*layers)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(values), labels)


def rows(width: int, batch: int) -> Batch:
    return torch.randn(batch, width), torch.zeros(batch, dtype=torch.int64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "chain of 8": (lambda: Chain(8), rows(8, 6)),
    "chain of 128": (lambda: Chain(128), rows(128, 64)),
    "ViT of 64": (lambda: Images(64, 4), images(4)),
    "ViT of 256": (lambda: Images(256, 2), images(8)),
    "BERT of 64": (lambda: Words(64, 2), words(4)),
    "BERT of 256": (lambda: Words(256, 2), words(4)),
    "BERT-MoE of 64": (lambda: Words(64, 2, 4), words(4)),
}


def measure(name: str, turns: int, group: torch.distributed.ProcessGroup) -> float:
    """How far the prediction is off, in percent."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    module = make()
    graph = trace(module, inputs)
    cluster = cluster_of(probe(), 1.0, counts=(1, 1))
    program = plan_graph(graph, cluster.replace(nodes=cluster.nodes[:1]))
    step = Step(module, graph, program, group)

    def ours() -> None:
        for shard in step.parameters():
            shard.grad = None
        step(*inputs)

    def plain() -> None:
        module.zero_grad()
        module(*inputs).backward()

    times = [(best_of(ours), best_of(plain)) for _ in range(turns)]
    own, torchs = (statistics.median(each) for each in zip(*times, strict=True))
    predicted = program.predicted_seconds - program.optimizer_seconds
    off = 100.0 * (predicted / own - 1.0)
    cells = [f"{1e3 * each:.2f}" for each in (predicted, own, torchs)]
    calls = len(graph.operators)
    print(f"| {name} | {calls} | {' | '.join(cells)} | {off:+.0f} % | {own / torchs:.2f} |", flush=True)
    return off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.__trace").disabled = True
    world = connect(Rendezvous.on_one_host(HashStore(), 0, 1), device=Device(vendor="cpu"), islands=[[0]])
    print("| model | operators | predicted ms | measured ms | plain ms | off by | over plain |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    off = [measure(name, options.turns, world.default_group) for name in options.models or MODELS]
    world.close()
    return 0 if all(abs(each) <= WITHIN_PERCENT for each in off) else 1


if __name__ == "__main__":
    sys.exit(main())
