"""Speed of the predictor on this machine, each figure beside what is asked of it.

python benchmarks/predictor.py
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import load_job
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, save_plan

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = {
    "name": "tiny",
    "layers": 8,
    "hidden": 192,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 432,
    "vocab": 272,
    "max_seq_len": 256,
}


def uniform(
    model: ModelSpec,
    cluster: ClusterSpec,
    tp: int,
    pp: int,
    batch: int,
    precision: str,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> Layout:
    """tp x pp x dp over all accelerators of the cluster in micro-batches of one sample, stages as equal as they can
    be."""
    dp, parts = cluster.size // (tp * pp), pp * chunks
    stages = []
    for s in range(pp):
        ranks = [range((s * dp + d) * tp, (s * dp + d + 1) * tp) for d in range(dp)]
        replicas = [{"ranks": list(own), "micro_batch": 1, "samples": batch // dp} for own in ranks]
        places = [c * pp + s for c in range(chunks)]
        layers = [[place * model.layers // parts, (place + 1) * model.layers // parts] for place in places]
        stages.append({"layers": layers, "replicas": replicas, "zero": 1 if dp > 1 else 0})
    plan = {"model": model.name, "cluster": cluster.name, "global_batch": batch, "seq_len": model.max_seq_len}
    plan |= {"precision": precision, "stages": stages, "schedule": schedule}
    return bind(PlanSpec.model_validate(plan), model, cluster)


KINDS = (
    "A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "V100-SXM2-32GB", "MI250X-GCD", "MI300X", "MI325X", "A100-SXM4-40GB",
)  # fmt: skip


def unlike(model: ModelSpec, schedule: str, samples: Callable[[int, int], int]) -> Layout:
    """768 accelerators of eight types, TP 2, 12 stages; the 32 replicas lie one after the other, so that they are of eight
    sorts. `samples` of (replica, stage)."""
    cluster, stages = cluster_of(*((name, 12) for name in KINDS)), []
    for s in range(12):
        ranks = [range(2 * (12 * d + s), 2 * (12 * d + s) + 2) for d in range(32)]
        replicas = [{"ranks": list(own), "micro_batch": 1, "samples": samples(d, s)} for d, own in enumerate(ranks)]
        stages.append(
            {"layers": [[s * model.layers // 12, (s + 1) * model.layers // 12]], "replicas": replicas, "zero": 1}
        )
    plan = {"model": model.name, "cluster": "bench", "global_batch": sum(samples(d, 0) for d in range(32))}
    plan |= {"seq_len": model.max_seq_len, "precision": "fp16", "stages": stages, "schedule": schedule}
    return bind(PlanSpec.model_validate(plan), model, cluster)


def unlike_plans(model: ModelSpec) -> None:
    """Prints the figures of unlike replicas: up to eight sorts fold, others are replayed."""
    for schedule in ("1f1b", "gpipe", "zero_bubble"):
        layout = unlike(model, schedule, lambda d, s: 1000)
        say(f"768, eight sorts of replicas, {schedule}", best_of(lambda layout=layout: predict(layout), 5), 0.05)  # type: ignore[misc]
    dealt = [984 + d for d in range(31)] + [32_000 - sum(984 + d for d in range(31))]
    for schedule, of_stages in (("1f1b", 12), ("zero_bubble", 12), ("1f1b", 6)):
        layout = unlike(model, schedule, lambda d, s, most=of_stages: dealt[d] if s < most else 1000)  # type: ignore[misc]
        what = f"768, replicas all unlike in {of_stages} of 12 stages, {schedule}"
        say(what, best_of(lambda layout=layout: predict(layout), 2), 5.0)  # type: ignore[misc]


def cluster_of(*nodes: tuple[str, int]) -> ClusterSpec:
    """Machines of eight accelerators each."""
    shape = {"accelerators": 8, "nics": 8, "gbps_per_nic": 200}
    entries = [{"name": name, "accelerator": name, "count": count, **shape} for name, count in nodes]
    return ClusterSpec.model_validate({"name": "bench", "nodes": entries})


def best_of(run: Callable[[], object], repeats: int, clock: Callable[[], float] = process_time) -> float:
    """Seconds of the fastest of some runs, of processor time, which other work on the machine changes little."""
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def fresh(arguments: list[str], folder: str) -> float:
    """Seconds of the fastest of five fresh interpreters, their bytecode compiled as an installed package's is."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *arguments]
    return best_of(
        lambda: subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL), 6, perf_counter
    )


def say(what: str, seconds: float, bound: float) -> None:
    print(
        f"{'met' if seconds <= bound else 'OVER':4s}  {what}: {1e3 * seconds:.0f} ms (asked: <= {1e3 * bound:.0f} ms)"
    )


def large_plans() -> Layout:
    """Prints the figures of hundreds and thousands of accelerators; the plan of 768 under 1F1B."""
    job = load_job(CONFIGS / "jobs" / "hethub-768.yaml")
    assert job.cluster is not None
    shapes = [("1f1b", 12, 1), ("gpipe", 12, 1), ("zero_bubble", 12, 1), ("interleaved", 12, 2), ("interleaved", 8, 3)]
    found = []
    for schedule, pp, chunks in shapes:
        batch = job.cluster.size // (2 * pp) * 1000
        layout = uniform(job.model, job.cluster, 2, pp, batch, "bf16", schedule, chunks)
        what = f"768 accelerators, TP 2, {pp} stages, {chunks} chunks, 1,000 micro-batches, {schedule}"
        say(what, best_of(lambda layout=layout: predict(layout), 5), 0.05)  # type: ignore[misc]
        bound = best_of(lambda layout=layout: bind(layout.plan, layout.model, layout.cluster), 2)  # type: ignore[misc]
        print(f"      bound in {1e3 * bound:.0f} ms")
        found.append(layout)
    unlike_plans(job.model)
    huge = uniform(job.model, cluster_of(("MI250X-GCD", 250), ("A100-SXM4-80GB", 1000)), 2, 50, 6400, "bf16")
    say(f"{huge.cluster.size:,} accelerators", best_of(lambda: predict(huge), 3), 1.0)
    return found[0]


def small_plans() -> None:
    tiny = ModelSpec.model_validate(TINY)
    core: Any = {"name": "CPU-core", "accelerator": "CPU-core", "accelerators": 8, "gbps_per_nic": 8}
    cluster = ClusterSpec.model_validate({"name": "bench", "nodes": [core]})
    plans = [
        uniform(tiny, cluster, tp, pp, batch, "fp32")
        for tp, pp, batch in ((1, 2, 32), (2, 2, 16), (1, 4, 8), (1, 8, 4), (4, 2, 4))
    ]
    for name, full in (("", False), (", every action replayed and its timeline built", True)):
        times = [best_of(lambda plan=plan, full=full: predict(plan, with_timeline=full), 20) for plan in plans]  # type: ignore[misc]
        rate = len(times) / sum(times)
        verdict = "met" if rate >= 1000 else "OVER"
        print(f"{verdict:4s}  plans of 8 ranks{name}: {rate:.0f} per second (asked: >= 1000)")


def fresh_processes(layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        save_plan(layout.plan, plan)
        empty = fresh(["-c", "pass"], folder)
        say(
            "import hethub.predictor, beyond an empty interpreter",
            fresh(["-c", "import hethub.predictor"], folder) - empty,
            0.3,
        )
        job = ["-m", "hethub", "predict", str(CONFIGS / "jobs" / "hethub-768.yaml"), "--plan", str(plan)]
        batch = f"train.global_batch={layout.plan.global_batch}"
        say("hethub predict, 768 accelerators, the whole process", fresh([*job, "--set", batch], folder), 0.5)
        small = Path(folder) / "small.yaml"
        laptop = str(CONFIGS / "jobs" / "laptop-mixed.yaml")
        subprocess.run(
            [sys.executable, "-m", "hethub", "plan", laptop, "--out", str(small)], check=True, stdout=subprocess.DEVNULL
        )
        say(
            "hethub predict, laptop-mixed, the whole process",
            fresh(["-m", "hethub", "predict", laptop, "--plan", str(small)], folder),
            0.5,
        )


if __name__ == "__main__":
    small_plans()
    fresh_processes(large_plans())
