"""Programs of strategy hap on two CPU ranks with unlike parts of a core: measured, not emulated.

python benchmarks/program_quotas.py [MODEL ...] [--rounds 5]

Each rank is held to its part by a cgroup quota and measures itself there, both at once: a matrix product, an addition
and a sum over both ranks, nothing else. The planner knows these figures. Then the ranks train HAP's program, even data
parallelism (DP-EV) and data parallelism by speed (DP-CP), a step of each in every round; medians count. The machine
must be quiet: quotas bind only where the cores are there. Exits with 1 where a program is slower than one of the
others, or its prediction is more than 10 % off.
"""

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from benchmarks.programs import Core, Images, Words, cluster_of, device_of, images, keep_memory, probed, words
from benchmarks.quotas import NoQuotas, quota_groups
from hethub.communicator import Rendezvous, connect
from hethub.kernels.device import Device
from hethub.runtime.launch.consensus import all_gather, broadcast
from hethub.spec.program import ProgramSpec
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Costs, Model
from hethub.synthesis.graph import Graph
from hethub.synthesis.lower import Step
from hethub.synthesis.planning import data_parallel, plan_model, program_of
from hethub.synthesis.program import Program
from hethub.synthesis.ratios import by_speed, even
from hethub.synthesis.rules import Rules
from tests.support.ranks import start_ranks, values

PARTS = (0.5, 0.2)  # of a core
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[torch.Tensor, ...]]] = {
    "ViT": (lambda: Images(768, 2), images(48)),
    "BERT-MoE": (lambda: Words(512, 2, 4), words(14)),
}
WARM_UP = 1
PROBED_SECONDS, PROBED_BYTES = 1.0, 1 << 24
WITHIN_PERCENT = 10.0
PATIENCE_SECONDS = 120.0


def mean_seconds(run: Callable[[], Any], times: int = 0) -> float:
    """Of a call, over many periods of the quota; `times` where all ranks must call alike."""
    run()
    began, done = time.perf_counter(), 0
    while done < times or (not times and time.perf_counter() - began < PROBED_SECONDS):
        run()
        done += 1
    return (time.perf_counter() - began) / done


def own_core() -> Core:
    """The figures under which the predictor gives this rank's times of a product and an addition."""
    side, size = 1024, 1 << 22
    a, b, one = torch.randn(side, side), torch.randn(side, side), torch.randn(size)
    product, added = mean_seconds(lambda: a @ b), mean_seconds(lambda: torch.add(one, one))
    core = Core(2.0 * side**3 / product, 12.0 * size / added)
    works = probed(side, size)
    for _ in range(20):
        told = [device_of(core).seconds(work) for work in works]
        core = Core(core.flops * told[1] / product, core.bandwidth * told[0] / added)
    return core


def posed(graph: Graph, cores: list[Core], summing: float) -> Model:
    """The step on both ranks, with a link over which a sum of PROBED_BYTES takes as long as measured."""
    rules, gbytes = Rules(graph), 1.0
    for _ in range(20):
        costs = Costs(cluster_of(cores[0], gbytes, slow=cores[1], counts=(1, 1)), "fp32")
        gbytes *= costs.collective("all-reduce", PROBED_BYTES, 0.5, 0.5) / summing
    return Model(graph, rules, costs)


def programs_of(model: Model) -> dict[str, Program]:
    parallel = data_parallel(model)
    by_samples = {"DP-EV": parallel.search(even(model)), "DP-CP": parallel.search(by_speed(model))}
    others = {n: program_of(own.execution, is_optimal=own.is_optimal, rounds=1) for n, own in by_samples.items()}
    return {"hap": plan_model(model), **others}


def train(rank: int, store: Any, groups: list[str], name: str, rounds: int) -> dict[str, Any]:
    """A rank: measures itself, plans with the other, trains all programs in turn."""
    torch.set_num_threads(1)
    logging.getLogger("torch.__trace").disabled = True
    keep_memory()
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    module = make()
    graph = trace(module, inputs)
    (Path(groups[rank]) / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
    meeting = Rendezvous.on_one_host(store, rank, 2)
    world = connect(meeting, device=Device(vendor="cpu"), islands=[[0, 1]])
    group = world.default_group
    all_gather(meeting, "start", None)
    cores = [Core(*row) for row in all_gather(meeting, "cores", tuple(own_core()))]
    sent = torch.ones(PROBED_BYTES // 4)
    summing = mean_seconds(lambda: dist.all_reduce(sent, group=group), times=10)

    def find() -> dict[str, Any]:
        found = programs_of(posed(graph, cores, summing))
        return {each: program.to_spec().model_dump(mode="json", by_alias=True) for each, program in found.items()}

    specs = broadcast(meeting, "programs", find, patience_seconds=PATIENCE_SECONDS)
    programs = {each: Program.from_spec(ProgramSpec.model_validate(spec)) for each, spec in specs.items()}
    steps = {each: Step(module, graph, program, group) for each, program in programs.items()}
    optimizers = {
        each: torch.optim.AdamW([s for s in step.parameters() if s.numel()], fused=True) for each, step in steps.items()
    }
    times: dict[str, list[float]] = {each: [] for each in steps}
    for _ in range(WARM_UP + rounds):
        for each, step in steps.items():
            world.barrier()
            began = time.perf_counter()
            optimizers[each].zero_grad()
            step(*inputs)
            optimizers[each].step()
            world.barrier()
            times[each].append(time.perf_counter() - began)
    world.close()
    return {
        "cores": [tuple(core) for core in cores],
        "summing": summing,
        "measured": {each: statistics.median(own[WARM_UP:]) for each, own in times.items()},
        "predicted": {each: program.predicted_seconds for each, program in programs.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    holds = True
    print(f"two ranks on {' and '.join(f'{part:.0%}' for part in PARTS)} of a core, load {os.getloadavg()[0]:.1f}")
    print("| model | hap s | DP-EV s | DP-CP s | over DP-EV | over the best | predicted s | off by |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for name in options.models or MODELS:
        try:
            with quota_groups(PARTS) as groups:
                folders = [str(group) for group in groups]
                found = values(start_ranks(2, train, folders, name, options.rounds, timeout_seconds=280))[0]
        except NoQuotas as reason:
            sys.exit(f"skipped: {reason}")
        seconds = found["measured"]
        gains = seconds["DP-EV"] / seconds["hap"], min(seconds["DP-EV"], seconds["DP-CP"]) / seconds["hap"]
        off = 100.0 * (found["predicted"]["hap"] / seconds["hap"] - 1.0)
        cells = [f"{seconds[each]:.3f}" for each in ("hap", "DP-EV", "DP-CP")] + [f"{gain:.2f}" for gain in gains]
        print(f"| {name} | {' | '.join(cells)} | {found['predicted']['hap']:.3f} | {off:+.0f} % |")
        rates = ", ".join(f"{flops / 1e9:.1f} GFLOP/s and {bytes_ / 1e9:.1f} GB/s" for flops, bytes_ in found["cores"])
        print(f"<!-- {rates}; {PROBED_BYTES / 1e6:.0f} MB summed in {found['summing']:.3f} s -->", flush=True)
        holds &= min(gains) >= 1.0 and abs(off) <= WITHIN_PERCENT
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
