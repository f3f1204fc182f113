"""A folder with a tiny job in it: model, cluster of two makers, plan, text; every part can be replaced."""

from pathlib import Path
from typing import Any

import yaml

MODEL = {
    "name": "tiny",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
    "vocab": 272,
    "max_seq_len": 64,
}
CLUSTER = {
    "name": "two-makers",
    "nodes": [
        {"name": maker, "vendor": maker, "accelerator": "CPU-core", "accelerators": 2, "gbps_per_nic": 8}
        for maker in ("amd", "nvidia")
    ],
}
STAGES = [
    {
        "layers": [[0, 2]],
        "replicas": [{"ranks": [0], "micro_batch": 2, "samples": 4}, {"ranks": [1], "micro_batch": 1, "samples": 4}],
    },
    {"layers": [[2, 4]], "replicas": [{"ranks": [2, 3], "micro_batch": 4, "samples": 8}]},
]
OTHER_STAGES = [
    {"layers": [[0, 3]], "replicas": [{"ranks": [0, 1], "micro_batch": 1, "samples": 8}]},
    {"layers": [[3, 4]], "replicas": [{"ranks": [2], "micro_batch": 2, "samples": 6}, {"ranks": [3], "micro_batch": 1, "samples": 2}]},
]  # fmt: skip
ALONE = [{"layers": [[0, 4]], "replicas": [{"ranks": [0], "micro_batch": 4, "samples": 8}]}]
TRAIN = {
    "steps": 4,
    "global_batch": 8,
    "seq_len": 32,
    "precision": "fp32",
    "lr": 3e-3,
    "min_lr": 3e-4,
    "warmup_steps": 2,
}

# So slow that narrow models are worth sharing out.
SLOW_CORE = {
    "name": "CPU-core", "vendor": "cpu", "memory_gb": 4, "memory_gbytes_per_second": 0.01, "fp64_tflops": 2.5e-5,
    "fp32_tflops": 5e-5, "link_gbytes_per_second": 2, "source": "assumed",
}  # fmt: skip


def plan(stages: list[dict[str, Any]] = STAGES, cluster: str = "two-makers", **changes: Any) -> dict[str, Any]:
    """A plan file's content."""
    return {
        "version": 1, "model": "tiny", "cluster": cluster, "global_batch": 8, "seq_len": 32, "precision": "fp32",
        "schedule": "1f1b", "stages": stages, **changes,
    }  # fmt: skip


PROGRAM = {
    "ranks": 4, "predicted_seconds": 0.25, "optimizer_seconds": 0.05, "memory_bytes": [2**20, 2**20, 2**21, 2**20],
    "proved_optimal": True, "rounds": 2, "fingerprint": "a1", "ratios": {"samples": [0.25, 0.25, 0.25, 0.25]},
    "axes": [{"name": "samples", "shares": [2, 2, 2, 2]}], "parameters": {"head.weight": "whole"}, "moves": [],
    "operators": [{
        "operator": "aten.mm.default", "module": "head", "pass": "forward", "number": 0, "rule": "cut(0), whole -> cut(0)",
        "axis": "samples", "seconds": 0.15, "collectives": ["all-reduce"], "collective_seconds": 0.05, "bytes": 1024,
    }],
}  # fmt: skip


def program_plan(**program: Any) -> dict[str, Any]:
    """A plan file of strategy hap, as `hethub plan` writes it."""
    head = {key: plan()[key] for key in ("model", "cluster", "global_batch", "seq_len", "precision")}
    job = {"cluster": CLUSTER, "reserve": 0.2, "items": "tokens"}
    return {"strategy": "hap", **head, "program": {**PROGRAM, **program}, "job": job}


def write_yaml(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def write_job(
    folder: Path,
    *,
    model: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    plan_file: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    cluster_name: str = "cluster.yaml",
    model_name: str = "model.yaml",
    **job: Any,
) -> Path:
    """`folder/job.yaml` and all it names; `model`, `cluster`, `train` change single keys, `job` whole sections."""
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / "model.yaml", {**MODEL, **(model or {})})
    write_yaml(folder / "cluster.yaml", {**CLUSTER, **(cluster or {})})
    write_yaml(folder / "plan.yaml", plan_file or plan())
    (folder / "text.txt").write_text("".join(f"line {n}: {n * n} is the square of {n}\n" for n in range(1500)))
    content = {
        "model": model_name,
        "cluster": cluster_name,
        "data": {"source": "text", "path": "text.txt"},
        "train": {**TRAIN, **(train or {})},
        "plan": "plan.yaml",
        "checkpoint": {"every_steps": 2, "keep": 2},
        "communicator": {"timeout_seconds": 60},
    }
    return write_yaml(folder / "job.yaml", {**content, **job})


def write_pair_job(folder: Path, **job: Any) -> Path:
    """As `write_job`, for two ranks, one of each maker: what is started as a user's shell would costs seconds per
    rank."""
    nodes = [{**node, "accelerators": 1} for node in CLUSTER["nodes"]]
    stages = [
        {"layers": [[start, start + 2]], "replicas": [{"ranks": [rank], "micro_batch": 2, "samples": 8}]}
        for rank, start in enumerate((0, 2))
    ]
    return write_job(folder, cluster={"nodes": nodes}, plan_file=plan(stages), **job)
