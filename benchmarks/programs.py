"""What programs of strategy hap gain over data parallelism and ZeRO on unlike ranks, rehearsed operator by operator.

python benchmarks/programs.py [MODEL ...] [--svg docs/programs.svg]

HAP's four models, narrower than published, on two fast and six slow ranks: this machine's core, and one that takes
SLOWER times as long. Every operator of every rank's pieces is measured by itself on this core, in processor time and
with freed memory kept, as accelerators' allocators keep it; a step is then replayed in the order in which ranks run
it. The planner reads none of these times: it knows the core by two probes, a matrix product and an addition. Links are
so slow that all-reducing the weights takes LINKS times what data parallelism computes; what they take is the
predictor's own model, in plans and rehearsals alike.

Data parallelism (even samples, DP-EV; samples by speed, DP-CP) sums gradients in buckets of 25 MB beside the backward
pass; ZeRO scatters them so and gathers each weight ahead of its use, as early as the link allows.
"""

import argparse
import ctypes
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from benchmarks.synthesis import VGG19, Experts, Layer, mlp
from hethub.predictor.cost.layer import Device
from hethub.predictor.cost.operators import Product, Work
from hethub.spec.cluster import ClusterSpec
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Costs, Model, Move, Shares, move_cost, rank_seconds
from hethub.synthesis.costs import device_of as pricing_device
from hethub.synthesis.graph import Graph
from hethub.synthesis.pieces import OwnCall, local_shape
from hethub.synthesis.planning import data_parallel
from hethub.synthesis.program import Execution, runs_beside
from hethub.synthesis.ratios import alternate, by_speed, even
from hethub.synthesis.rules import WHOLE, Rule, Rules, State

RANKS, FAST, SLOWER = 8, 2, 1.7  # V100 and P100 differ by as much in fp32
LINKS = {"slow": 4.0, "fast": 0.25}  # all-reducing the weights over computing a data-parallel step
BUCKET_BYTES = 25e6
LEAST_SECONDS, REPEATS = 0.05, 3
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
GAINS = {"DP-EV": 1.3, "the best": 1.1}  # asked of VGG19 and BERT-MoE over the slow link


class Images(nn.Module):
    """A vision transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.encoder = nn.ModuleList(Layer(width, 8, nn.Sequential(*mlp(width))) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        values = torch.cat([self.token.expand(patches.shape[0], -1, -1), patches], 1) + self.positions
        for layer in self.encoder:
            values = layer(values)
        return nn.functional.cross_entropy(self.head(values[:, 0]), labels)


class Words(nn.Module):
    """BERT; with experts, every second layer's MLP is a mixture of them."""

    def __init__(self, width: int, layers: int, experts: int = 0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(4096, width), nn.Parameter(torch.zeros(64, width))
        inner = [
            Experts(width, experts, 4 * width) if experts and number % 2 else nn.Sequential(*mlp(width))
            for number in range(layers)
        ]
        self.encoder = nn.ModuleList(Layer(width, 8, part) for part in inner)
        self.head = nn.Linear(width, 4096)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = self.words(tokens) + self.positions
        for layer in self.encoder:
            values = layer(values)
        return nn.functional.cross_entropy(self.head(values).flatten(0, 1), labels.flatten())


def images(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.int64)


def words(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(batch, 64, dtype=torch.int64), torch.zeros(batch, 64, dtype=torch.int64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "VGG19": (VGG19, images),
    "ViT": (lambda: Images(512, 6), images),
    "BERT": (lambda: Words(512, 6), words),
    "BERT-MoE": (lambda: Words(512, 6, 8), words),
}
BATCH = 64


class Core(NamedTuple):
    """This core as the planner knows it: fp32 FLOP/s of a matrix product, bytes/s of an addition."""

    flops: float
    bandwidth: float


def keep_memory() -> None:
    """What is freed is neither given back to the kernel nor taken from it again, page by page, in what is measured."""
    library = ctypes.CDLL(None)
    if not (library.mallopt(M_MMAP_MAX, 0) and library.mallopt(M_TRIM_THRESHOLD, -1)):
        raise OSError("this C library's malloc cannot be told to keep memory; glibc's can")


def best_of(run: Callable[[], Any]) -> float:
    """Processor seconds of a call: the least of several after the first."""
    run()
    found, spent = float("inf"), 0.0
    for number in range(20):
        began = time.process_time()
        run()
        seconds = time.process_time() - began
        found, spent = min(found, seconds), spent + seconds
        if number + 1 >= REPEATS and spent > LEAST_SECONDS:
            break
    return found


def probe() -> Core:
    """The figures under which the predictor gives this core's times of a product and an addition."""
    side, size = 1024, 1 << 24
    a, b, values = torch.randn(side, side), torch.randn(side, side), torch.randn(size)
    out = torch.empty_like(values)
    core = Core(
        2.0 * side**3 / best_of(lambda: a @ b), 12.0 * size / best_of(lambda: torch.add(values, values, out=out))
    )
    added, product = probed(side, size)
    core = core._replace(bandwidth=core.bandwidth * device_of(core).seconds(added) * core.bandwidth / (12.0 * size))
    rest = device_of(core._replace(flops=1e3 * core.flops)).seconds(product)
    wanted = 2.0 * side**3 / core.flops
    return core._replace(flops=core.flops * (device_of(core).seconds(product) - rest) / (wanted - rest))


def probed(side: int, size: int) -> tuple[Work, Work]:
    """An addition of a tensor to itself, which is read once, and a product; what they make is read before it is written."""
    product = Product(side, side, side)
    return (
        Work.of((), 4, 0.0, 0.0, 0, fused_bytes=12.0 * size),
        Work.of((product,), 4, 0.0, 0.0, 0, fused_bytes=4.0 * side**2),
    )


def device_of(core: Core) -> Device:
    return pricing_device(cluster_of(core, 1.0).places[0].accelerator, "fp32")


def cluster_of(
    core: Core, gbytes: float, slow: Core | None = None, counts: tuple[int, int] = (FAST, RANKS - FAST)
) -> ClusterSpec:
    """Ranks of this core and of a slower one, a node each, in two islands."""
    cores = core, slow or Core(core.flops / SLOWER, core.bandwidth / SLOWER)
    nodes = []
    for name, vendor, count, own in zip(("fast", "slow"), ("nvidia", "amd"), counts, cores, strict=True):
        device = {
            "name": f"CPU, {name}", "vendor": vendor, "memory_gb": 64, "fp32_tflops": own.flops / 1e12,
            "memory_gbytes_per_second": own.bandwidth / 1e9, "link_gbytes_per_second": gbytes,
        }  # fmt: skip
        nodes.append(
            {"name": name, "count": count, "accelerator": device, "accelerators": 1, "gbps_per_nic": 8 * gbytes}
        )
    return ClusterSpec.model_validate({"name": "rehearsal", "nodes": nodes})


# -- operators, one by one -----------------------------------------------------------------------------------------------


class Table:
    """Seconds of every operator's pieces on this core, each measured by itself when first asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, number: int, rule: Rule, share: int, atoms: int) -> float:
        operator, graph = self._graph.operators[number], self._graph
        states = zip(operator.inputs, rule.inputs, strict=True)
        shapes = [local_shape(graph.tensors[t].shape, state, share, atoms) for t, state in states]
        key = (operator.key, repr(operator.args), tuple(shapes), str(rule), share)
        if key not in self._known:
            tensors = [self._tensor(graph.tensors[t].dtype, s) for t, s in zip(operator.inputs, shapes, strict=True)]
            made = [graph.tensors[t] for t in operator.made]
            call = OwnCall(operator, rule, [t.shape for t in made], [t.dtype for t in made], share, atoms)
            self._known[key] = best_of(lambda: call(tensors))
        return self._known[key]

    @staticmethod
    def _tensor(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return (
            torch.rand(tuple(shape), dtype=dtype) if dtype.is_floating_point else torch.zeros(tuple(shape), dtype=dtype)
        )

    def __len__(self) -> int:
        return len(self._known)


def by_rank(model: Model, table: Table, shares: Shares, number: int, rule: Rule) -> np.ndarray:
    """Measured seconds of an operator on every rank."""
    axis = model.rules.axis_of(number, rule)
    own = (1,) * RANKS if axis is None else shares[axis]
    atoms = 1 if axis is None else sum(own)
    found = [table.seconds(number, rule, share, atoms) if share else 0.0 for share in own]
    return np.array(found) * ([1.0] * FAST + [SLOWER] * (RANKS - FAST))


# -- a step --------------------------------------------------------------------------------------------------------------


class Rehearsal:
    """Replays a step: ranks go on by themselves, a collective begins when the last of them has come to it."""

    def __init__(
        self, execution: Execution, table: Table, *, bucket_bytes: float = 0.0, prefetches: bool = False
    ) -> None:
        self._execution, self._model, self._table = execution, execution.model, table
        self._bucket_bytes, self._prefetches = bucket_bytes, prefetches
        self._clock, self._network = np.zeros(RANKS), 0.0
        self._ready: dict[tuple[int, State], float] = {}
        self._bucket: list[Move] = []

    def seconds(self) -> float:
        graph, execution = self._model.graph, self._execution
        for number, operator in enumerate(graph.operators):
            rule = execution.rules[number]
            for tensor, state in zip(operator.inputs, rule.inputs, strict=True):
                self._bring(tensor, state)
            self._clock = self._clock + by_rank(self._model, self._table, execution.shares, number, rule)
            for tensor in operator.made:
                for name in graph.parameter_of_gradient.get(tensor, ()):
                    self._bring(tensor, execution.kept[name])
        self._bring(graph.loss, WHOLE)
        self._send()
        return float(max(self._clock.max(), self._network)) + execution.optimizer_seconds

    def _bring(self, tensor: int, state: State) -> None:
        if state == self._execution.source(tensor):
            return
        if (tensor, state) not in self._ready:
            move = next(move for move in self._execution.moves[tensor] if move.target == state)
            self._bring(tensor, move.source)
            self._ready[tensor, state] = self._move(move)
        self._clock = np.maximum(self._clock, self._ready[tensor, state])

    def _move(self, move: Move) -> float:
        """When it is there, as far as operators wait for it."""
        if not move.collective:
            return 0.0
        if runs_beside(self._model.graph, move):
            self._bucket.append(move)
            if sum(self._model.graph.tensors[own.tensor].num_bytes for own in self._bucket) >= self._bucket_bytes:
                self._send()
            return 0.0
        ahead = self._prefetches and move.tensor in self._model.graph.parameters.values()
        self._network = max(self._network, 0.0 if ahead else float(self._clock.max())) + self._cost(move)
        return self._network

    def _send(self) -> None:
        if self._bucket:
            latency = self._model.costs.reduce_scatter.fixed * (2.0 if self._bucket[0].target == WHOLE else 1.0)
            spared = latency * (len(self._bucket) - 1)
            seconds = sum(self._cost(move) for move in self._bucket) - spared
            self._network = max(self._network, float(self._clock.max())) + seconds
            self._bucket = []

    def _cost(self, move: Move) -> float:
        return move_cost(self._model, self._execution.shares, move.tensor, move.source, move.target)[0]


def scattered(execution: Execution) -> Execution:
    """The data-parallel program with every parameter cut along the dimension with the most atoms, as ZeRO keeps it."""
    model = execution.model
    kept: dict[str, State] = {}
    axes = model.rules.axes
    for name, tensor in model.graph.parameters.items():
        atoms = {cut: axes[model.rules.axis(tensor, cut)].atoms for cut in model.rules.cuts(tensor)}
        finest = max(atoms, key=lambda cut: atoms[cut], default=None)
        kept[name] = WHOLE if finest is None or atoms[finest] < RANKS else finest
    return Execution(model, execution.numbers, kept, execution.shares)


class Row(NamedTuple):
    model: str
    link: str
    seconds: dict[str, float]  # rehearsed, by what was run
    predicted: float  # of HAP's program

    @property
    def gains(self) -> dict[str, float]:
        others = {name: own for name, own in self.seconds.items() if name != "hap"}
        return {"DP-EV": others["DP-EV"] / self.seconds["hap"], "the best": min(others.values()) / self.seconds["hap"]}

    @property
    def error_percent(self) -> float:
        return 100.0 * (self.predicted / self.seconds["hap"] - 1.0)


def measure(name: str, core: Core) -> list[Row]:
    make, inputs = MODELS[name]
    graph = trace(make(), inputs(BATCH))
    rules, table, rows = Rules(graph), Table(graph), []
    weights = sum(graph.tensors[tensor].num_bytes for tensor in graph.parameters.values())
    unlinked = Model(graph, rules, Costs(cluster_of(core, 1e4), "fp32"))
    shares = by_speed(unlinked)
    computing = data_parallel(unlinked).search(shares).execution.seconds
    for link, times in LINKS.items():
        gbytes = 2.0 * weights * (RANKS - 1) / RANKS / (times * computing) / 1e9
        model = Model(graph, rules, Costs(cluster_of(core, gbytes), "fp32"))
        found = alternate(model, None).found
        parallel = data_parallel(model)
        by_samples = {
            "DP-EV": parallel.search(even(model)).execution,
            "DP-CP": parallel.search(by_speed(model)).execution,
        }
        zero = scattered(by_samples["DP-CP"])
        seconds = {"hap": Rehearsal(found.execution, table).seconds()}
        for other, execution in by_samples.items():
            seconds[other] = Rehearsal(execution, table, bucket_bytes=BUCKET_BYTES).seconds()
        seconds["ZeRO"] = Rehearsal(zero, table, bucket_bytes=BUCKET_BYTES, prefetches=True).seconds()
        rows.append(Row(name, link, seconds, found.execution.step_seconds))
        print(shown(rows[-1]), flush=True)
    parts = sum(
        float(rank_seconds(model, found.execution.shares, n, rule).max())
        for n, rule in enumerate(found.execution.rules)
    )
    print(
        f"<!-- {name}: {weights / 1e6:.0f} MB of weights, {len(table)} pieces of operators measured; the last program's"
        f" computing predicted {parts:.3f} s -->",
        flush=True,
    )
    return rows


def shown(row: Row) -> str:
    cells = [f"{row.seconds[name]:.3f}" for name in ("hap", "DP-EV", "DP-CP", "ZeRO")]
    gains = [f"{gain:.2f}" for gain in row.gains.values()]
    return f"| {row.model} | {row.link} | {' | '.join(cells)} | {' | '.join(gains)} | {row.predicted:.3f} | {row.error_percent:+.0f} % |"


def picture(rows: Sequence[Row]) -> str:
    """Bars of how many times as fast as even data parallelism each is."""
    colours = {"hap": "#1b6ca8", "DP-CP": "#9dbad5", "ZeRO": "#c9c9c9"}
    width, left, step = 640, 110, 62
    most = max(row.seconds["DP-EV"] / min(row.seconds.values()) for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{step * len(rows) + 40}" font-family="sans-serif" font-size="12">'
    ]
    for number, row in enumerate(rows):
        top = 24 + number * step
        lines.append(f'<text x="4" y="{top + 26}">{row.model}, {row.link}</text>')
        for place, (name, colour) in enumerate(colours.items()):
            gain = row.seconds["DP-EV"] / row.seconds[name]
            length = gain / most * (width - left - 90)
            y = top + place * 16
            lines.append(f'<rect x="{left}" y="{y}" width="{length:.0f}" height="13" fill="{colour}"/>')
            lines.append(f'<text x="{left + length + 5:.0f}" y="{y + 11}">{name} {gain:.2f}x</text>')
    lines.append(f'<text x="{left}" y="14">steps per second over even data parallelism, rehearsed</text></svg>')
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--svg", type=Path, help="where to draw the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    logging.getLogger("torch.__trace").disabled = True
    core = probe()
    print(f"this core: {core.flops / 1e9:.0f} GFLOP/s, {core.bandwidth / 1e9:.1f} GB/s")
    print("| model | link | hap s | DP-EV s | DP-CP s | ZeRO s | over DP-EV | over the best | predicted s | off by |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    rows = [row for name in options.models or MODELS for row in measure(name, core)]
    if options.svg:
        options.svg.write_text(picture(rows), encoding="utf-8")
    slow = [row for row in rows if row.link == "slow" and row.model in ("VGG19", "BERT-MoE")]
    held = [all(row.gains[other] >= gain for other, gain in GAINS.items()) for row in slow]
    held += [row.gains["the best"] >= 1.0 and abs(row.error_percent) <= 10.0 for row in rows]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
