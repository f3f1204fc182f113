"""Steps of narrow models under programs of strategy hap on one CPU rank: predicted, measured, and of plain PyTorch.

python benchmarks/narrow_programs.py [MODEL ...] [--turns 5] [--drawn SEED] [--kinds]

Such steps are mostly what calling each operator takes. Processor seconds, both sides in turn, of every turn the
least step, of these the median. The planner knows the core by two probes, a matrix product and an addition, taken anew
before each model. The optimizer is left out on all sides. `--drawn` takes DRAWN models of drawn sizes in place of the named
ones; `--kinds` adds what operators of each kind took inside the step, of every operator the median, over their price.
Exits with 1 where a prediction is more than WITHIN_PERCENT off.
"""

import argparse
import logging
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
from hethub.synthesis.costs import Costs, is_view
from hethub.synthesis.graph import Graph, Operator
from hethub.synthesis.lower import Step
from hethub.synthesis.planning import plan_graph
from hethub.synthesis.table import short

WITHIN_PERCENT = 25.0
DRAWN = 10
# Part of an operator's name, and what kind it is; the first that fits.
KINDS = {
    "scaled_dot_product": "attention", "convolution": "convolution", "mm": "product", "mv": "product", "softmax": "softmax",
    "layer_norm": "norm", "embedding": "embedding", "nll_loss": "loss", "pool": "pooling", "sum": "reduction", "clone": "copy",
    "select_backward": "copy", "cat": "copy",
}  # fmt: skip
Kinds = dict[str, list[tuple[float, float]]]  # measured and priced seconds of each operator
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


class Pixels(nn.Module):
    """Three convolutions and pooling."""

    def __init__(self, width: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), activation(), nn.Conv2d(width, 2 * width, 3, padding=1), activation(),
            nn.AvgPool2d(2), nn.Conv2d(2 * width, 2 * width, 1), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(2 * width, 10),
        )  # fmt: skip

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(values), labels)


def drawn(seed: int) -> dict[str, tuple[Callable[[], nn.Module], Batch]]:
    draw = random.Random(seed)
    found: dict[str, tuple[Callable[[], nn.Module], Batch]] = {}
    for number in range(DRAWN):
        width, layers = draw.choice((32, 48, 64, 96, 128, 192, 256, 384)), draw.randint(1, 4)
        batch, activation = draw.choice((2, 4, 6, 8, 12, 16, 24)), draw.choice((nn.ReLU, nn.SiLU, nn.Tanh, nn.GELU))
        kinds: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
            "chain": (partial(Chain, width), rows(width, 8 * batch)),
            "ViT": (partial(Images, width, layers), images(batch)),
            "BERT": (partial(Words, width, layers), words(batch)),
            "BERT-MoE": (partial(Words, width, layers + 1, 4), words(batch)),
            "pixels": (partial(Pixels, width // 4, activation), pixels(batch)),
        }
        kind = draw.choice(sorted(kinds))
        found[f"{number}: {kind} of {width}, batch {batch}"] = kinds[kind]
    return found


def pixels(batch: int) -> Batch:
    return torch.randn(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)


def kind_of(operator: Operator) -> str:
    """What is in no other kind is pointwise."""
    found = (kind for part, kind in KINDS.items() if part in short(operator))
    return "view" if is_view(operator) else next(found, "pointwise")


def by_kind(graph: Graph, costs: Costs, step: Step, inputs: Batch, turns: int) -> Kinds:
    """What each operator takes inside the step."""
    taken = [list[int]() for _ in graph.operators]
    (samples, (laid, parts)) = next(iter(step._layouts.items()))

    def timed(call: Any, into: list[int]) -> Any:
        def run(tensors: list[torch.Tensor]) -> Any:
            began = time.thread_time_ns()
            result = call(tensors)
            into.append(time.thread_time_ns() - began)
            return result

        return run

    clocked = [part._replace(call=timed(part.call, own)) for part, own in zip(parts, taken, strict=True)]
    step._layouts[samples] = laid, clocked
    for _ in range(5 * turns):
        step.loss(*inputs)
    found: Kinds = defaultdict(list)
    for operator, own in zip(graph.operators, taken, strict=True):
        starting, working = costs.operator(graph, operator)
        found[kind_of(operator)].append((statistics.median(own) / 1e9, float(starting[0] + working[0])))
    return found


def measure(
    name: str, source: tuple[Callable[[], nn.Module], Batch], turns: int, group: torch.distributed.ProcessGroup
) -> tuple[float, Kinds]:
    """How far the prediction is off, in percent, and what its operators take."""
    torch.manual_seed(0)
    make, inputs = source
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
    return off, by_kind(graph, Costs(cluster.replace(nodes=cluster.nodes[:1]), "fp32"), step, inputs, turns)


def show(kinds: Kinds) -> None:
    print("\n| kind | operators | measured ms | priced ms | measured over priced |\n|---|---:|---:|---:|---:|")
    for kind, own in sorted(kinds.items(), key=lambda row: -sum(taken for taken, _ in row[1])):
        taken, priced = (1e3 * sum(column) for column in zip(*own, strict=True))
        print(f"| {kind} | {len(own)} | {taken:.2f} | {priced:.2f} | {taken / priced:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--drawn", type=int, metavar="SEED")
    parser.add_argument("--kinds", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.__trace").disabled = True
    world = connect(Rendezvous.on_one_host(HashStore(), 0, 1), device=Device(vendor="cpu"), islands=[[0]])
    print("| model | operators | predicted ms | measured ms | plain ms | off by | over plain |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    models = MODELS if options.drawn is None else drawn(options.drawn)
    off, kinds = list[float](), defaultdict[str, list[tuple[float, float]]](list)
    for name in options.models or models:
        error, found = measure(name, models[name], options.turns, world.default_group)
        off.append(error)
        for kind, own in found.items():
            kinds[kind] += own
    world.close()
    if options.kinds:
        show(kinds)
    within = sum(abs(each) <= WITHIN_PERCENT for each in off)
    print(f"mean {statistics.mean(map(abs, off)):.0f} %, {within} of {len(off)} within {WITHIN_PERCENT:.0f} %")
    return 0 if all(abs(each) <= WITHIN_PERCENT for each in off) else 1


if __name__ == "__main__":
    sys.exit(main())
