"""vTrain's single-node set as cases: steps composed from profiled layers."""

from collections.abc import Mapping
from pathlib import Path

from hethub.predictor.calibration.sources.cells import read_lines
from hethub.predictor.calibration.sources.training_steps import Case, collect, read_row

LAYERS_ALONE = "megatron-deepspeed, layers alone"  # no load of a whole step behind what was timed
ITERATION_TIME = "iteration time (ms)"
_SINGLE_NODE = {
    "global_batch": "global batch", "micro_batch": "micro batch", "hidden": "hidden size", "heads": "attention heads", "layers": "# layers",
    "seq": "sequence length", "tp": "tensor parallelism", "dp": "data parallelism", "pp": "pipeline parallelism",
}  # fmt: skip


def read_single_node(path: Path) -> tuple[list[Case], list[dict[str, str]]]:
    """vTrain's steps on 2, 4 and 8 A100 (GPT, fp16, full recompute, Megatron-DeepSpeed).

    They are sums: at equal shapes they are linear in layers and micro-batches to the last digit, so each was composed
    from one profiled layer. They count as layer times of that software, not as measured steps.
    Returned as `read_table` does.
    """
    columns = ("# GPUs", ITERATION_TIME, *_SINGLE_NODE.values())
    return collect(read_lines(path, columns), _single_node_row)


def _single_node_row(name: str, line: Mapping[str, str]) -> Case:
    """One of those steps. Raises ValueError saying what is wrong."""
    row = {ours: line[theirs] for ours, theirs in _SINGLE_NODE.items()}
    ranks = line["# GPUs"]
    fixed = {
        "id": name, "source": "vTrain, single node", "family": "gpt", "model": f"GPT-{row['layers']}x{row['hidden']}",
        "ffn": str(4 * int(row["hidden"])), "vocab": "51200", "accelerator": "A100-SXM4-80GB", "n_accelerators": ranks,
        "per_node": ranks, "precision": "fp16", "recompute": "full", "stack": LAYERS_ALONE, "flash_attention": "0",
        "step_seconds": str(float(line[ITERATION_TIME]) / 1e3),
    }  # fmt: skip
    return read_row({**row, **fixed})
