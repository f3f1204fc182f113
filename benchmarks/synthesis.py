"""How long programs of strategy hap take to find, and what they cost beside data parallelism.

python benchmarks/synthesis.py [MODEL ...] [--devices 8 64] [--runs 3]

HAP's four models at their published sizes (VGG19, ViT, BERT-Base, BERT-MoE), nothing allocated, on V100 and P100 by 1 to 3
as in its testbed, 10.4 Gbit/s between machines. Seconds are medians of processor time, which other load does not change much:
tracing once, then rules, search and ratios together. Beside the step: the best of DP-EV, DP-CP and HAP's own rules and costs.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn as nn
from torch.fx.experimental.proxy_tensor import FakeTensorMode
from torch.nn import functional as F

from hethub.spec.cluster import ClusterSpec
from hethub.spec.program import memory_limits
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Costs, Model, precision_of
from hethub.synthesis.graph import Graph
from hethub.synthesis.planning import baselines
from hethub.synthesis.ratios import alternate
from hethub.synthesis.rules import Rules

BATCH_PER_DEVICE = 32  # images or sequences
BATCHES = {"BERT-MoE": 8}  # every expert sees every token, so that more do not fit


class VGG19(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for block, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(count):
                layers += [nn.Conv2d(width, block, 3, padding=1), nn.ReLU(inplace=True)]
                width = block
            layers.append(nn.MaxPool2d(2))
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, 1000)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(torch.flatten(self.pool(self.features(images)), 1)), labels)


class ViT(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 768)), nn.Parameter(torch.zeros(1, 197, 768))
        self.encoder = nn.ModuleList(Layer(768, 12, nn.Sequential(*mlp(768))) for _ in range(layers))
        self.head = nn.Linear(768, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        values = torch.cat([self.token.expand(patches.shape[0], -1, -1), patches], 1) + self.positions
        for layer in self.encoder:
            values = layer(values)
        return F.cross_entropy(self.head(values[:, 0]), labels)


class Bert(nn.Module):
    """BERT-Base; with experts, every second layer's MLP is a mixture of them."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, 768), nn.Parameter(torch.zeros(128, 768))
        inner = [
            Experts(768, experts, 3072) if experts and number % 2 else nn.Sequential(*mlp(768)) for number in range(12)
        ]
        self.encoder = nn.ModuleList(Layer(768, 12, part) for part in inner)
        self.head = nn.Linear(768, 30522)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = self.words(tokens) + self.positions
        for layer in self.encoder:
            values = layer(values)
        return F.cross_entropy(self.head(values).flatten(0, 1), labels.flatten())


def mlp(width: int) -> list[nn.Module]:
    return [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.inner = nn.MultiheadAttention(width, heads, batch_first=True), inner

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        normed = self.first(values)
        values = values + self.attention(normed, normed, normed, need_weights=False)[0]
        return values + self.inner(self.second(values))


class Experts(nn.Module):
    """Top-2 routing by einsums, as in GShard."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.zeros(experts, width, inner)),
            nn.Parameter(torch.zeros(experts, inner, width)),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scores = self.gate(values).softmax(-1)
        best, chosen = scores.topk(2, dim=-1)
        weights = (F.one_hot(chosen, scores.shape[-1]).to(scores.dtype) * best.unsqueeze(-1)).sum(-2)
        sent = torch.einsum("bte,btw->ebtw", (weights > 0).to(scores.dtype), values)
        made = torch.einsum("ebti,eiw->ebtw", F.gelu(torch.einsum("ebtw,ewi->ebti", sent, self.up)), self.down)
        return torch.einsum("bte,ebtw->btw", weights, made)


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether it sees images
    "VGG19": (VGG19, True),
    "ViT-12": (lambda: ViT(12), True),
    "ViT-24": (lambda: ViT(24), True),
    "BERT-Base": (Bert, False),
    "BERT-MoE": (lambda: Bert(8), False),
}


def graph_of(name: str, batch: int) -> Graph:
    """The traced step of a model for a batch; no weight is allocated."""
    make, sees_images = MODELS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = make()
        if sees_images:
            inputs = (torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64))
        else:
            inputs = (torch.zeros(batch, 128, dtype=torch.int64), torch.zeros(batch, 128, dtype=torch.int64))
    return trace(module, inputs)


def cluster_of(size: int) -> ClusterSpec:
    """A quarter V100, the rest P100, in machines of at most eight."""
    nodes = []
    for name, accelerator, number in (
        ("v100", "V100-SXM2-16GB", size // 4),
        ("p100", "P100-PCIe-16GB", size - size // 4),
    ):
        per_node = next(n for n in (8, 6, 4, 3, 2, 1) if number % n == 0)
        nodes.append(
            {"name": name, "count": number // per_node, "accelerator": accelerator, "accelerators": per_node, "gbps_per_nic": 10.4}
        )  # fmt: skip
    return ClusterSpec.model_validate({"name": f"{size} devices", "nodes": nodes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.__trace").disabled = True
    print(
        f"{'model':10} {'devices':>7} {'operators':>9} {'trace s':>8} {'search s':>9} {'rounds':>6} {'step ms':>9} {'others':>9}  proved"
    )
    for name in options.models or list(MODELS):
        for size in options.devices:
            measure(name, size, options.runs)


def measure(name: str, size: int, runs: int) -> None:
    began = time.process_time()
    graph = graph_of(name, BATCHES.get(name, BATCH_PER_DEVICE) * size)
    traced = time.process_time() - began
    cluster, seconds = cluster_of(size), []
    for _ in range(runs):
        began = time.process_time()
        model = Model(graph, Rules(graph), Costs(cluster, precision_of(graph)))
        best = alternate(model, memory_limits(cluster, 0.06))
        seconds.append(time.process_time() - began)
    print(
        f"{name:10} {size:7} {len(graph.operators):9} {traced:8.2f} {statistics.median(seconds):9.2f} {best.rounds:6}"
        f" {best.seconds * 1e3:9.2f} {min(baselines(model).values()) * 1e3:9.2f}  {'yes' if best.found.is_optimal else 'no'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
