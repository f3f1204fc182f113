"""Speed of the predictor on this machine, beside what is asked of it.

python benchmarks/predictor.py
"""

import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec

LLAMA_140B = {
    "name": "llama-140b",
    "layers": 96,
    "hidden": 11008,
    "heads": 86,
    "ffn": 29696,
    "vocab": 32000,
    "max_seq_len": 4096,
}
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
    model: dict[str, Any], nodes: list[dict[str, Any]], tp: int, pp: int, micro_batch: int, batch: int, precision: str
) -> Layout:
    """tp x pp x dp over all accelerators of the nodes, stages as equal as they can be."""
    spec = ModelSpec.model_validate(model)
    cluster = ClusterSpec.model_validate({"name": "bench", "nodes": nodes})
    dp = cluster.size // (tp * pp)
    stages = []
    for s in range(pp):
        ranks = [range((s * dp + d) * tp, (s * dp + d + 1) * tp) for d in range(dp)]
        replicas = [{"ranks": list(own), "micro_batch": micro_batch, "samples": batch // dp} for own in ranks]
        layers = [[s * spec.layers // pp, (s + 1) * spec.layers // pp]]
        stages.append({"layers": layers, "replicas": replicas, "zero": 1 if dp > 1 else 0})
    plan = {"model": spec.name, "cluster": "bench", "global_batch": batch, "seq_len": spec.max_seq_len}
    plan |= {"precision": precision, "stages": stages}
    return bind(PlanSpec.model_validate(plan), spec, cluster)


def node(accelerator: str, count: int, each: int = 8) -> dict[str, Any]:
    shape = {"count": count, "accelerators": each, "nics": min(8, each), "gbps_per_nic": 200}
    return {"name": accelerator, "accelerator": accelerator, **shape}


def best_of(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times)


def fresh(code: str) -> float:
    """Seconds of the fastest of five fresh interpreters that run `code`, less an empty one's."""
    runs = [
        best_of(lambda code=text: subprocess.run([sys.executable, "-c", code], check=True), 5)
        for text in ("pass", code)
    ]  # type: ignore[misc]
    return runs[1] - runs[0]


def main() -> None:
    mixed = [node("MI250X-GCD", 16), node("A100-SXM4-80GB", 80)]
    big = uniform(LLAMA_140B, mixed, 2, 12, 1, 32 * 1000, "bf16")
    shape = "768 accelerators, TP 2, 12 stages, 32 replicas of 1,000 micro-batches"
    print(f"{shape}: {1e3 * best_of(lambda: predict(big), 5):.1f} ms (asked: <= 50)")
    huge = uniform(LLAMA_140B, [node("MI250X-GCD", 250), node("A100-SXM4-80GB", 1000)], 2, 50, 1, 6400, "bf16")
    print(f"10,000 accelerators: {best_of(lambda: predict(huge), 3):.3f} s (asked: <= 1)")
    core = {"name": "CPU-core", "accelerator": "CPU-core", "accelerators": 8, "gbps_per_nic": 8}
    plans = [
        uniform(TINY, [core], tp, pp, 1, batch, "fp32")
        for tp, pp, batch in ((1, 2, 32), (2, 2, 16), (1, 4, 8), (1, 8, 4), (4, 2, 4))
    ]
    small = sum(best_of(lambda plan=plan: predict(plan), 20) for plan in plans) / len(plans)  # type: ignore[misc]
    print(f"plans of 8 ranks: {1 / small:.0f} per second (asked: >= 500)")
    print(
        f"import hethub.predictor: {fresh('import hethub.predictor'):.3f} s beyond an empty interpreter (asked: < 0.3)"
    )


if __name__ == "__main__":
    main()
