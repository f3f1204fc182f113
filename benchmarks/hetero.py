"""What unlike accelerators are worth together: python benchmarks/hetero.py [CASE …] [--steps N] [--out FOLDER]

makers    two makers, 4 + 4 accelerators with rates 1 : 1.6: auto over the upper bound (both emulated) and over uniform
poplar    Poplar's three kinds of cluster (memory, compute, both), ZeRO 0 to 3, against the even split
cephalo   a model that fits only where training state is split unevenly
zorse     ministages and offload: memory saved, time lost
quotas    measured, not emulated: two CPU ranks on 100 % and 40 % of a core, by cgroups

All but `quotas` are emulated: CPU processes compute the real model and take the time that the emulated accelerators
would (hethub/runtime/emulate/pace.py). Accelerators are a catalogue's, made slow enough for a tiny model
(emulate.pocket). Prints markdown; with --out also writes hetero.md and hetero.svg there.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from benchmarks.emulate import LINKS_SMALLER, MOST_OVERRUN_PERCENT, Emulated, emulate_in_pace, pocket
from benchmarks.quotas import measured_rows
from hethub.planner import plan
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor import LayerCost, predict
from hethub.predictor.memory.ranks import RankMemory, rank_memory
from hethub.report.drawing import stacked
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.execution import check_executable
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec

MODEL = ModelSpec(name="pocket", layers=8, hidden=64, heads=4, kv_heads=2, ffn=176, vocab=256, max_seq_len=64)
ZORSE_MODEL = MODEL.replace(name="state-heavy", layers=16, hidden=128, ffn=352)
CEPHALO_MODEL = MODEL.replace(name="wide", hidden=256, ffn=704)  # more state to an activation the wider it is
SEQ_LEN = 32
PRECISION: Precision = "fp32"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One emulated plan; `of` names the case it belongs to."""

    of: str
    what: str
    layout: Layout
    emulated: Emulated

    @property
    def tokens_per_second(self) -> float:
        plan_ = self.layout.plan
        return plan_.global_batch * plan_.seq_len / self.emulated.step_seconds


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A line of the table: what came out and what was to be reached; None where it could not be run, with the
    reason."""

    case: str
    figure: str
    to_reach: str
    reached: bool | None
    how: str = "emulated"


class Bench:
    """Rehearses plans and keeps what came out."""

    def __init__(self, steps: int) -> None:
        self.steps, self.runs, self.findings = steps, list[Run](), list[Finding]()

    def run(self, of: str, what: str, layout: Layout) -> Run:
        """One plan emulated; again on a slower clock where the cores could not keep the pace."""
        check_executable(layout)
        done = Run(of=of, what=what, layout=layout, emulated=emulate_in_pace(layout, steps=self.steps))
        self.runs.append(done)
        print(f"| {' | '.join(run_cells(done))} |", flush=True)
        return done

    def found(self, case: str, figure: str, to_reach: str, reached: bool | None, how: str = "emulated") -> None:
        self.findings.append(Finding(case=case, figure=figure, to_reach=to_reach, reached=reached, how=how))

    def left_out(self, case: str, to_reach: str, reason: BadInput) -> None:
        self.found(case, f"not run: {reason}", to_reach, None)


# -- clusters and plans ------------------------------------------------------------------------------------------------


def cluster(name: str, *nodes: tuple[AcceleratorSpec, int], gbps: float = 200.0) -> ClusterSpec:
    """Nodes of some accelerators of a kind each, an interface per accelerator."""
    listed = [
        {"name": f"{name}-{index}", "accelerator": accelerator, "accelerators": count, "nics": count,
         "gbps_per_nic": gbps / LINKS_SMALLER}
        for index, (accelerator, count) in enumerate(nodes)
    ]  # fmt: skip
    return ClusterSpec.model_validate({"name": name, "emulated": True, "nodes": listed})


def planned(
    on: ClusterSpec, global_batch: int, strategy: str, *, model: ModelSpec = MODEL, **constraints: Any
) -> Layout:
    """The strategy's plan, bound."""
    wishes = ConstraintsSpec(**constraints)
    batch = (global_batch, SEQ_LEN, PRECISION)
    return bind(plan(model, on, batch, wishes, strategy=strategy, with_bounds=False).plan, model, on)


def written(
    on: ClusterSpec, global_batch: int, stages: list[dict[str, Any]], schedule: str = "1f1b", model: ModelSpec = MODEL
) -> Layout:
    """A plan given in full, bound."""
    content = {
        "model": model.name, "cluster": on.name, "global_batch": global_batch, "seq_len": SEQ_LEN, "precision": PRECISION,
        "schedule": schedule, "stages": stages,
    }  # fmt: skip
    return bind(PlanSpec.model_validate(content), model, on)


def even_split(on: ClusterSpec, global_batch: int, zero: int) -> Layout:
    """Equal samples and state on all accelerators: uniform's plan of one stage, at any ZeRO level."""
    layout = planned(on, global_batch, "uniform", zero=min(zero, 1), pp=1, tp=1, reserve=0.0)
    stages = tuple(stage.replace(zero=zero) for stage in layout.stages)
    return bind(layout.plan.replace(stages=stages), MODEL, on)


def own_bytes(used: RankMemory) -> int:
    """A rank's bytes without what the framework and the communicators take on every accelerator."""
    return used.bytes - used.parts["framework"] - used.parts["communicator"]


def with_memory(accelerator: AcceleratorSpec, num_bytes: float) -> AcceleratorSpec:
    """The accelerator with so much memory beyond what the framework and the communicators take on any."""
    (used, _) = rank_memory(planned(cluster("probe", (accelerator, 2)), 2, "uniform"))
    return accelerator.replace(memory_gb=(used.bytes - own_bytes(used) + num_bytes) / 2**30)


# -- the cases ---------------------------------------------------------------------------------------------------------


def makers(bench: Bench) -> None:
    """HETHUB's question: how near do two makers together come to the sum of both alone?"""
    case, global_batch = "two makers, 4 + 4, rates 1 : 1.6", 104
    fast, slow = pocket("A100-SXM4-80GB"), pocket("MI250X-GCD")
    ratio = layer_seconds(slow) / layer_seconds(fast)
    on = cluster("makers", (fast, 4), (pocket("MI250X-GCD", speed=ratio / 1.6), 4))
    mixed = bench.run(case, "auto", planned(on, global_batch, "auto"))
    problem = pose(MODEL, on, Batch(global_batch, SEQ_LEN, PRECISION), None)
    alone = plan(MODEL, on, (global_batch, SEQ_LEN, PRECISION)).homogeneous_parts
    bound = 0.0
    for index, kind in enumerate(alone):
        layout = bind(kind.plan, MODEL, problem.of_device_type(index).cluster)
        bound += bench.run(case, f"{kind.island} alone, batch {kind.global_batch}", layout).tokens_per_second
    share = mixed.tokens_per_second / bound
    bench.found(f"{case}: auto / upper bound", f"{share:.3f}", "≥ 0.975 (HETHUB: 0.9749)", share >= 0.975)
    even = bench.run(case, "uniform", planned(on, global_batch, "uniform"))
    gain = mixed.tokens_per_second / even.tokens_per_second
    bench.found(f"{case}: auto / uniform", f"{gain:.2f}x", "≥ 1.25x", gain >= 1.25)


def layer_seconds(accelerator: AcceleratorSpec) -> float:
    return LayerCost(MODEL, accelerator, SEQ_LEN, PRECISION).layer(8).total / 8


def poplar(bench: Bench) -> None:
    """Poplar's clusters at every ZeRO level, samples by measured speed against the even split."""
    gains: list[float] = []
    global_batch = 24
    for kind, on in poplar_clusters():
        for zero in range(4):
            case = f"Poplar, {kind}, ZeRO {zero}"
            uneven = bench.run(case, "poplar", planned(on, global_batch, "poplar", zero=zero, reserve=0.0))
            even = bench.run(case, "even split", even_split(on, global_batch, zero))
            gain = uneven.tokens_per_second / even.tokens_per_second
            foreseen = even.emulated.predicted_seconds / uneven.emulated.predicted_seconds
            gains.append(gain)
            reached = gain >= 1.0 and abs(gain / foreseen - 1.0) <= 0.05
            figure = f"{gain:.2f}x (predicted {foreseen:.2f}x)"
            bench.found(case, figure, "≥ 1.0x, within 5 % of predicted", reached)
    if gains:
        bench.found("Poplar, the best", f"{max(gains):.2f}x", "≥ 1.5x", max(gains) >= 1.5)


def poplar_clusters() -> Iterator[tuple[str, ClusterSpec]]:
    """Two accelerators of each type. Where memories differ, so does the largest micro-batch: about 8 and 2 samples."""
    state = 20.0 * MODEL.parameters
    small = state + 2.5 * bytes_per_sample()
    large = state + 10.0 * bytes_per_sample()
    a100, a800, v100 = pocket("A100-PCIe-80GB"), pocket("A800-SXM4-80GB"), pocket("V100-PCIe-32GB")
    yield "memory", cluster("memory", (with_memory(a100, large), 2), (with_memory(pocket("A100-PCIe-40GB"), small), 2))
    yield "compute", cluster("compute", (pocket("V100-PCIe-16GB"), 2), (pocket("T4"), 2))
    yield "both", cluster("both", (with_memory(a800, large), 2), (with_memory(v100, small), 2))


def bytes_per_sample() -> float:
    """What a sample in flight takes on an accelerator that holds the whole model."""
    on = cluster("probe", (pocket("A100-PCIe-80GB"), 2))
    sizes = [
        sum(rank_memory(even(on, samples))[0].parts[part] for part in ("activations", "logits", "buffers"))
        for samples in (1, 2)
    ]
    return float(sizes[1] - sizes[0])


def even(on: ClusterSpec, micro_batch: int, samples: int = 8, **stage: Any) -> Layout:
    """One stage of all ranks, each with as many samples."""
    replicas = [{"ranks": [rank], "micro_batch": micro_batch, "samples": samples} for rank in range(on.size)]
    return written(on, samples * on.size, [{"layers": [[0, MODEL.layers]], "replicas": replicas, **stage}])


def cephalo(bench: Bench) -> None:
    """The faster half of the accelerators has no room for an even part of the training state, however little else they
    keep.

    Both plans recompute, as Cephalo's do.
    """
    case, goal = "Cephalo, state fits only unevenly", "trains; ≥ 0.95 of the throughput without the memory limit"
    fast, slow, global_batch = pocket("A100-PCIe-40GB"), pocket("V100-PCIe-16GB"), 40
    wishes: dict[str, Any] = {"model": CEPHALO_MODEL, "recompute": "full", "reserve": 0.0}
    free = cluster("cephalo", (fast, 2), (slow, 2))
    roomy = planned(free, global_batch, "cephalo", **wishes)
    used = rank_memory(sharded(roomy, state_shares={0: 0.1, 1: 0.1}))
    sizes = [with_memory(accelerator, 1.05 * own_bytes(used[rank])) for accelerator, rank in ((fast, 0), (slow, 2))]
    tight = cluster("cephalo", (sizes[0], 2), (sizes[1], 2))
    limited = planned(tight, global_batch, "cephalo", **wishes)
    leanest = sharded(limited, state_shares={}, offload=("activations",))
    refused = not predict(leanest, reserve=0.0).fits
    within = bench.run(case, "state by shares", limited)
    share = within.tokens_per_second / bench.run(case, "without the memory limit", roomy).tokens_per_second
    shares = {rank: round(part, 3) for rank, part in limited.stages[0].state_shares.items()}
    figure = f"{share:.3f} (even state {'does not fit' if refused else 'fits'}; shares {shares})"
    bench.found(case, figure, goal, refused and bool(shares) and share >= 0.95)


def sharded(layout: Layout, **stage: Any) -> Layout:
    """A plan of one stage with other ways to keep its state."""
    stages = tuple(own.replace(**stage) for own in layout.stages)
    return bind(layout.plan.replace(stages=stages), layout.model, layout.cluster)


def zorse(bench: Bench) -> None:
    """As many ministages as layers allow, with state offloaded, against one; and offload alone. A model heavy in
    state."""
    on = cluster("zorse", (pocket("A100-PCIe-40GB"), 2), (pocket("V100-PCIe-16GB"), 2))
    plain = bench.run("Zorse", "one chunk", chunked(on, 1, []))
    for case, chunks, offload, slower, less in (
        ("offload alone", 1, ["optimizer"], 3.0, None),
        ("most ministages", ZORSE_MODEL.layers // 2, ["parameters", "optimizer"], 20.0, 35.0),
    ):
        run = bench.run("Zorse", case, chunked(on, chunks, offload))
        lost = 100.0 * (1.0 - run.tokens_per_second / plain.tokens_per_second)
        saved = 100.0 * (1.0 - counted_bytes(run) / counted_bytes(plain))
        reached = lost <= slower and (less is None or saved >= less)
        limits = f"≤ {slower:g} % slower" + (f", ≥ {less:g} % less memory" if less else "")
        bench.found(
            f"Zorse, {case}",
            f"{lost:.1f} % slower, {saved:.0f} % less memory beyond the framework's and the communicators'",
            limits,
            reached,
        )


def counted_bytes(run: Run) -> int:
    """What the run counted on the fullest rank, without what the framework and the communicators take."""
    used = rank_memory(run.layout)[0]
    return run.emulated.memory_bytes - (used.bytes - own_bytes(used))


def chunked(on: ClusterSpec, chunks: int, offload: list[str]) -> Layout:
    """Two stages of one node each, every stage with `chunks` equal runs of layers in turn."""
    size = ZORSE_MODEL.layers // (2 * chunks)
    stages = []
    for stage in range(2):
        layers = [[(2 * chunk + stage) * size, (2 * chunk + stage + 1) * size] for chunk in range(chunks)]
        replicas = [{"ranks": [2 * stage + index], "micro_batch": 2, "samples": 8} for index in range(2)]
        stages.append({"layers": layers, "replicas": replicas, "zero": 2, "recompute": "full", "offload": offload})
    return written(on, 16, stages, "ministages" if chunks > 1 else "1f1b", ZORSE_MODEL)


def quotas(bench: Bench) -> None:
    """Measured on CPU ranks that the kernel gives unlike parts of a core."""
    for row in measured_rows():
        bench.found(**row)


# -- the answer --------------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Bench], None]] = {
    "makers": makers, "poplar": poplar, "cephalo": cephalo, "zorse": zorse, "quotas": quotas,
}  # fmt: skip
RUN_HEAD = [
    "case",
    "plan",
    "predicted s",
    "emulated s",
    "predicted / emulated - 1, %",
    "overrun %",
    "memory, predicted / counted",
]


def run_cells(run: Run) -> list[str]:
    r = run.emulated
    return [
        run.of, run.what, f"{r.predicted_seconds:.3f}", f"{r.step_seconds:.3f}", f"{r.error_percent:+.1f}",
        f"{r.overrun_percent:.2f}", f"{r.predicted_bytes / r.memory_bytes:.3f}",
    ]  # fmt: skip


def summary(bench: Bench) -> None:
    """Adds the lines about all runs together."""
    errors = [abs(run.emulated.error_percent) for run in bench.runs]
    if not errors:
        return
    figure = f"mean {statistics.fmean(errors):.1f} %, largest {max(errors):.1f} % over {len(errors)} runs"
    reached = statistics.fmean(errors) <= 4.0 and max(errors) <= 10.0
    bench.found("predicted vs emulated step time", figure, "mean ≤ 4 %, largest ≤ 10 %", reached)
    overrun = max(run.emulated.overrun_percent for run in bench.runs)
    within = overrun <= MOST_OVERRUN_PERCENT
    bench.found("overrun of the emulated time", f"{overrun:.2f} %", f"≤ {MOST_OVERRUN_PERCENT:g} %", within)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(bench: Bench) -> str:
    """Every run's step, predicted above emulated, as an SVG file's text."""
    rows = []
    for run in bench.runs:
        longest = max(run.emulated.predicted_seconds, run.emulated.step_seconds)
        rows.append((f"{run.of}: {run.what}", {"compute": run.emulated.predicted_seconds / longest}, None))
        rows.append(("emulated", {"reduce": run.emulated.step_seconds / longest}, None))
    drawn = stacked(rows, "of the longer")
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="10" ', 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    started, bench = time.perf_counter(), Bench(options.steps)
    print(f"| {' | '.join(RUN_HEAD)} |\n| {' | '.join(['---'] * len(RUN_HEAD))} |")
    for name in options.cases or CASES:
        CASES[name](bench)
    summary(bench)
    words = {True: "yes", False: "no", None: "-"}
    found = [[f.case, f.how, f.figure, f.to_reach, words[f.reached]] for f in bench.findings]
    answer = table(["case", "how", "came out", "to reach", "reached"], found)
    print(f"\n{answer}\n\n{len(bench.runs)} emulations, {time.perf_counter() - started:.0f} s")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        runs = table(RUN_HEAD, [run_cells(run) for run in bench.runs])
        (options.out / "hetero.md").write_text(f"{answer}\n\n{runs}\n", encoding="utf-8")
        (options.out / "hetero.svg").write_text(plot(bench), encoding="utf-8")
    if any(finding.reached is False for finding in bench.findings):
        sys.exit(1)


if __name__ == "__main__":
    main()
