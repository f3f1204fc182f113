"""What each generator, sort of change and constant of `auto` wins: the answers to many questions without it.

python benchmarks/ablation.py [run] [table] [--only WORD ...] [--questions WORD ...]

run     answers every question as the planner is and under every change, each change in a process of its own; a line an
        answer in docs/evidence/ablation.jsonl, where what stands already is not answered again
        (delete the file first where the planner or the predictor has changed since)
table   by change, how much larger the mean over the scenarios (J) gets over all questions and at worst, in how many it
        gets larger or smaller by more than 0.1 %, and what CPU time is left of the search

Predicted throughout, by the function the planner decides with: it says what a part of the search is worth to the search
and nothing about the predictor.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.reference import QUESTIONS  # noqa: E402
from benchmarks.search_times import cluster_named, model_named  # noqa: E402
from hethub.commands.common import processors  # noqa: E402
from hethub.planner import plan  # noqa: E402
from hethub.planner.problem.problem import Batch  # noqa: E402
from hethub.planner.search.effort import Effort, effort_for  # noqa: E402
from hethub.spec.cluster import ClusterSpec  # noqa: E402
from hethub.spec.errors import BadInput  # noqa: E402
from hethub.spec.model import ModelSpec  # noqa: E402
from tests.oracle.question import random_question  # noqa: E402

KEPT = ROOT / "docs" / "evidence" / "ablation.jsonl"
SMALL = [(seed, size) for size in (3, 4, 5, 6, 8) for seed in (900, 901, 902, 903)]  # random clusters
SAME = 1e-3  # J that differs by less is equal
Asked = tuple[ModelSpec, ClusterSpec, Batch]
Change = Callable[[], dict[str, Any]]


def questions() -> Iterator[tuple[str, Asked]]:
    """The reference questions, one that memory rules, and small random clusters."""
    for cluster, model, size, seq_len, precision in QUESTIONS:
        batch = Batch(size, seq_len, precision)  # type: ignore[arg-type]
        yield f"{cluster} {model} {size}", (model_named(model), cluster_named(cluster), batch)
    node = {"name": "n", "accelerator": "H100-SXM5-80GB", "accelerators": 8, "nics": 8, "gbps_per_nic": 400}
    eight = ClusterSpec.model_validate({"name": "eight", "nodes": [{**node, "host_memory_gb": 2048}]})
    yield "8 H100 llama3-70b 64", (model_named("llama3-70b"), eight, Batch(64, 8192, "bf16"))
    for seed, size in SMALL:
        own = random_question(seed, size, 2 * size)
        yield f"random {size} {seed}", (own.model, own.cluster, Batch(own.global_batch, own.seq_len, own.precision))


def nothing(*_: object, **__: object) -> tuple[()]:
    return ()


def none(*_: object, **__: object) -> list[object]:
    return []


AUTO, NEAR = "hethub.planner.search.auto", "hethub.planner.search.neighbours"
LOCAL = "hethub.planner.search.local_search"
EFFORT = "hethub.planner.plan.effort_for"
CUTS, SMALL_ONES = "hethub.planner.generate.cuts", "hethub.planner.generate.small"
LAYOUTS, STAGES = "hethub.planner.generate.stage_layouts", "hethub.planner.generate.device_type_stages"


def with_effort(**given: Any) -> Change:
    """The effort of every size with some of it given."""

    def effort(problem: Any) -> Effort:
        return replace(effort_for(problem), **given)

    return lambda: {EFFORT: effort}


def without_families(*names: str) -> Change:
    def change() -> dict[str, Any]:
        own = importlib.import_module(AUTO)
        return {f"{AUTO}.FAMILIES": {name: family for name, family in own.FAMILIES.items() if name not in names}}

    return change


def as_given(incumbent: Any, candidates: Any) -> dict[Any, float]:
    """In place of `with_slacks`: the candidates with their default of microbatches in flight."""
    return dict(zip(candidates, incumbent.costs.estimate(candidates), strict=True))


def constant(name: str, value: Any) -> Change:
    return lambda: {name: value}


CHANGES: dict[str, Change] = {
    "as it is": dict,
    # generators
    "no small": constant(f"{SMALL_ONES}.propose", nothing),
    "no device_type_stages": constant(f"{AUTO}.stages_by_device_type", none),
    "no modes": constant(f"{AUTO}.in_modes", none),
    "no microbatches beyond the default, other schedules of cuts": constant(f"{AUTO}.with_slacks", as_given),
    "no uniform": without_families("uniform"),
    "no hethub": without_families("hethub"),
    "no poplar": without_families("poplar"),
    "no cephalo": without_families("cephalo"),
    "no zorse": without_families("zorse"),
    "no families": without_families("uniform", "hethub", "poplar", "cephalo", "zorse"),
    "nothing unused": constant(f"{AUTO}.parts", nothing),
    # search
    "no descents": with_effort(descents=0),
    "no climbs": with_effort(climbs=0, arrangements=0),
    "no next micro-batch": constant(f"{NEAR}._micro_batches", nothing),
    "no even microbatches": constant(f"{NEAR}._even_microbatches", nothing),
    "no other mode": constant(f"{NEAR}._modes", nothing),
    "no replica moved or exchanged": constant(f"{NEAR}._groups", nothing),
    "no other degree": constant(f"{NEAR}._degrees", nothing),
    "no other number of stages": constant(f"{NEAR}._depths", nothing),
    "no unused accelerator joins": constant(f"{NEAR}._more_replicas", nothing),
    "no pairs of changes": with_effort(pairs=0),
    "no nudged sample": lambda: dict.fromkeys((f"{NEAR}.nudges", f"{LOCAL}.nudges"), nothing),
    # constants
    "one uphill of 1.004": with_effort(uphill=1.004),
    "one optimism of 0.98": with_effort(optimism=0.98),
    "arrangements 0": with_effort(arrangements=0),
    "cuts 32": with_effort(cuts=32),
    "finalists 8": with_effort(finalists=8),
    "descents 2": with_effort(descents=2),
    "tried_per_step 4": with_effort(tried_per_step=4),
    "steps 8": with_effort(steps=8),
    "MOST_CUTS 8": constant(f"{AUTO}.MOST_CUTS", 8),
    "FAR 1.05": lambda: dict.fromkeys((f"{AUTO}.FAR", f"{LOCAL}.FAR"), 1.05),
    "FAMILY_FINALISTS 1": constant(f"{AUTO}.FAMILY_FINALISTS", 1),
    "WHOLE_FINALISTS 1": constant(f"{AUTO}.WHOLE_FINALISTS", 1),
    "WORTHWHILE 0": constant(f"{LOCAL}.WORTHWHILE", 0.0),
    "PER_SORT 1": constant(f"{CUTS}.PER_SORT", 1),
    "ESTIMATE_ERR 1.2": constant(f"{CUTS}.ESTIMATE_ERR", 1.2),
    "PURE_CUTS 8": constant("hethub.planner.generate.families.hethub.PURE_CUTS", 8),
    "MOST_NUDGED 0": constant(f"{NEAR}.MOST_NUDGED", 0),
    "small MOST_ESTIMATED 500": constant(f"{SMALL_ONES}.MOST_ESTIMATED", 500),
    "small CUT_ERR 1": constant(f"{SMALL_ONES}.CUT_ERR", 1.0),
    "small WORTH_MOVING 1": constant(f"{SMALL_ONES}.WORTH_MOVING", 1.0),
    "stage_layouts EXPOSED 1": constant(f"{LAYOUTS}.EXPOSED", 1.0),
    "stage_layouts IN_FLIGHT 1": constant(f"{LAYOUTS}.IN_FLIGHT", 1.0),
    "device_type_stages 16 candidates": constant(f"{STAGES}.MOST_CANDIDATES", 16),
}


def answer(asked: Asked) -> dict[str, float]:
    """J, the predicted step and CPU seconds; infinite where no plan fits."""
    started = time.process_time()
    try:
        found = plan(*asked, with_bounds=False)
    except BadInput:
        return {"objective": float("inf"), "step": float("inf"), "cpu": time.process_time() - started}
    cpu = time.process_time() - started
    return {"objective": found.outlook.objective_seconds, "step": found.prediction.step_seconds, "cpu": cpu}


def one(change: str, words: list[str]) -> None:
    """Answers what was not answered yet under one change."""
    seen = {(row["change"], row["question"]) for row in kept()}
    with ExitStack() as stack, KEPT.open("a") as file:
        for name, value in CHANGES[change]().items():
            stack.enter_context(patch(name, value))
        for name, asked in questions():
            if (change, name) not in seen and (not words or any(word in name for word in words)):
                print(json.dumps({"change": change, "question": name, **answer(asked)}), file=file, flush=True)


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def table() -> None:
    """A line a change, beside the planner as it is."""
    by_change: dict[str, dict[str, dict[str, Any]]] = {}
    for row in kept():
        by_change.setdefault(row["change"], {})[row["question"]] = row
    plain = by_change["as it is"]
    print("| without it, or with | questions | J, mean | at worst | larger | smaller | CPU |\n" + "|---" * 7 + "|")
    for change in CHANGES:
        if change == "as it is" or change not in by_change:
            continue
        own = by_change[change]
        names = [name for name in own if name in plain and plain[name]["objective"] < float("inf")]
        ratios = {name: own[name]["objective"] / plain[name]["objective"] for name in names}
        worst = max(ratios, key=ratios.__getitem__)
        larger, smaller = (sum(sign * (r - 1) > SAME for r in ratios.values()) for sign in (1, -1))
        cpu = sum(own[name]["cpu"] for name in names) / sum(plain[name]["cpu"] for name in names)
        mean = statistics.geometric_mean(ratios.values())
        print(
            f"| {change} | {len(names)} | {100 * (mean - 1):+.2f} % | {100 * (ratios[worst] - 1):+.1f} % ({worst}) | "
            f"{larger} | {smaller} | {100 * cpu:.0f} % |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help="run, table; both where none is named")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="changes whose name has one of the words")
    parser.add_argument("--questions", nargs="+", default=[], metavar="WORD", help="questions whose name has one")
    parser.add_argument("--one", choices=CHANGES, help="one change, in this process")
    options = parser.parse_args()
    if options.one:
        one(options.one, options.questions)
        return
    if "run" in options.modes or not options.modes:
        beside = ["--questions", *options.questions] if options.questions else []
        wanted = [name for name in CHANGES if not options.only or any(word in name for word in options.only)]
        commands = [[sys.executable, __file__, "--one", name, *beside] for name in wanted]
        with ThreadPoolExecutor(processors()) as pool:
            for _ in pool.map(partial(subprocess.run, check=True), commands):
                pass
    if "table" in options.modes or not options.modes:
        table()


if __name__ == "__main__":
    main()
