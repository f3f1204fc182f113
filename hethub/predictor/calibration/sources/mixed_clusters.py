"""Published plans on clusters of unlike accelerators, measured by AMP and Sailor, as cases."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from hethub.predictor.calibration.sources.cells import LARGEST
from hethub.predictor.calibration.sources.software_stacks import HALF_GRADIENT_BYTES
from hethub.predictor.calibration.sources.training_steps import (
    WITH_OWN_HEAD,
    Case,
    collect,
    stage_specs,
    without_ends,
)
from hethub.predictor.cost.node_links import through_host
from hethub.predictor.cost.software import Software
from hethub.spec.accelerator import AcceleratorSpec, find_accelerator
from hethub.spec.base import describe, form_of
from hethub.spec.cluster import ClusterSpec
from hethub.spec.documents import read_json
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec


def read_mixed(path: Path) -> tuple[list[Case], list[dict[str, str]]]:
    """Measured plans on clusters of unlike accelerators: AMP's in modules over nodes in order, Sailor's stage by stage.

    Returned as `read_table` does. Raises BadInput where the file is no list.
    """
    rows = read_json(path, "list of measured plans", unique=True)
    if not isinstance(rows, list):
        raise BadInput(
            f"{path}: measured plans on mixed clusters are a list; this holds {form_of(rows)}. Name such a file, a table (CSV) or a "
            "folder of cases."
        )
    return collect([(_name(row, index), row) for index, row in enumerate(rows)], _mixed_row)


def _name(row: Any, index: int) -> str:
    return str(row.get("case", f"case {index}")) if isinstance(row, dict) else f"case {index}"


def _mixed_row(name: str, row: Any) -> Case:
    """One measured plan. Raises ValueError saying what is missing or inconsistent."""
    if not isinstance(row, dict):
        raise ValueError(f"a measured plan is a mapping; this is {form_of(row)}")
    try:
        case = _amp(row, name) if "tp" in row else _sailor(row, name)
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        why = (
            f"it has no {error}" if isinstance(error, KeyError) else "a value in it is not of the form that theirs has"
        )
        raise ValueError(f"no measured plan as AMP or Sailor published theirs: {why}") from None
    for key in ("micro_batch", "global_batch"):
        if not isinstance(row[key], int) or not 1 <= row[key] <= LARGEST:
            raise ValueError(f"{key} is {describe(row[key])}; a whole number is needed, up to {LARGEST:,}")
    plan, size = case.layouts[0].plan, case.layouts[0].cluster.size
    if sorted(plan.ranks) != list(range(size)):
        raise ValueError(f"the stages hold {len(plan.ranks)} accelerators, the cluster {size}")
    held = [stage.num_layers for stage in plan.stages]
    if min(held) < 0 or sum(held) != case.layouts[0].model.layers:
        raise ValueError(f"the stages hold {held} layers, the model has {case.layouts[0].model.layers}")
    if plan.global_batch < max(len(stage.replicas) for stage in plan.stages):
        raise ValueError(f"global_batch {plan.global_batch} leaves a replica without a sample")
    if not 0 < case.measured_seconds < 1e7:
        raise ValueError(f"step_seconds {case.measured_seconds} is no positive time")
    return case


def _model(row: dict[str, Any]) -> ModelSpec:
    shape = {key: row["model"][key] for key in ("family", "layers", "hidden", "heads", "ffn", "vocab")}
    return ModelSpec(
        name="mixed", max_seq_len=row["model"]["seq"], tied_head=not row["source"].startswith(WITH_OWN_HEAD), **shape
    )


def _linked(name: str, measured_gbps: float) -> AcceleratorSpec:
    """The accelerator with a measured in-node link where that is a slower dedicated one than its data sheet's.

    PCIe stays as the sheet has it: the fitted fraction is one of sheets.
    """
    accelerator = find_accelerator(name)
    measured = measured_gbps / 8
    if through_host(accelerator, measured):
        return accelerator
    return accelerator.replace(name=name, link_gbytes_per_second=measured)


def _amp(row: dict[str, Any], name: str) -> Case:
    given = row["cluster"]
    nodes = [
        {"name": f"n{i}", "accelerator": _linked(device, inside), "accelerators": count,
         "nics": 1, "gbps_per_nic": outside}
        for i, ((device, count), inside, outside) in enumerate(zip(given["nodes"], given["intra_gbps"], given["inter_gbps"], strict=True))
    ]  # fmt: skip
    cluster = ClusterSpec.model_validate({"name": row["source"], "nodes": nodes})
    model, cuts = _model(row), row["cut_points_of_30_modules"]
    modules = [b - a for a, b in pairwise(cuts)]
    layers = without_ends(modules, sum(modules) - model.layers)
    stages = stage_specs(layers, row["tp"], row["dp"], row["micro_batch"], row["global_batch"], 0, "none")
    software = Software(stack="deepspeed", gradient_wire_bytes=4, attention_dropout=True, **_EAGER_MEGATRON)
    return _case(row, name, model, cluster, stages, software)


_EAGER_MEGATRON: dict[str, Any] = {
    "math": "fp16", "fused_attention": False, "fused_elementwise": True, "overlapped_reduction": False, "chunked_loss": False,
    "gradient_pass_bytes": HALF_GRADIENT_BYTES, "spread_boundaries": True, "gathers_ahead": False,
    "sums_beside_weights": False,
    "norms_apart": False, "one_tied_copy": False, "keeps_gate_activation": True,
}  # fmt: skip


def _sailor(row: dict[str, Any], name: str) -> Case:
    """One machine per replica, as Sailor's cluster was; stages count embedding and head as layers."""
    model = _model(row)
    layers = without_ends(
        [stage["layers"] for stage in row["stages"]], sum(stage["layers"] for stage in row["stages"]) - model.layers
    )
    nodes: list[dict[str, Any]] = []
    stages, rank, first = [], 0, 0
    for stage, count in zip(row["stages"], layers, strict=True):
        replicas = []
        for replica in stage["replicas"]:
            samples = row["global_batch"] // len(stage["replicas"])
            ranks = tuple(range(rank, rank + replica["tp"]))
            replicas.append(ReplicaSpec(ranks=ranks, micro_batch=row["micro_batch"], samples=samples))
            nodes.append({"name": f"n{len(nodes)}", "accelerator": find_accelerator(replica["accelerator"]), "accelerators": replica["tp"],
                          "gbps_per_nic": WORKSTATION_GBPS})  # fmt: skip
            rank += replica["tp"]
        stages.append(StageSpec(layers=((first, first + count),), replicas=tuple(replicas)))
        first += count
    cluster = ClusterSpec.model_validate({"name": row["source"], "nodes": nodes})
    software = Software(stack="megatron-deepspeed", gradient_wire_bytes=2, **_EAGER_MEGATRON)
    return _case(row, name, model, cluster, tuple(stages), software)


WORKSTATION_GBPS = 10.0  # between machines of consumer cards where nothing is published: their Ethernet


def _case(
    row: dict[str, Any],
    name: str,
    model: ModelSpec,
    cluster: ClusterSpec,
    stages: tuple[StageSpec, ...],
    software: Software,
) -> Case:
    plan = PlanSpec.model_construct(
        model=model.name, cluster=cluster.name, global_batch=row["global_batch"], seq_len=model.max_seq_len, precision="fp16",
        schedule="1f1b", stages=stages,
    )  # fmt: skip
    return Case(
        id=name,
        source=row["source"],
        group=row["source"],
        layouts=(Layout(plan, model, cluster),),
        software=software,
        measured_seconds=row["step_seconds"],
        measured_memory_bytes=row.get("peak_memory_bytes"),
        suspect=False,
        row={
            "micro_batch": str(row["micro_batch"]),
            "source": row["source"],
            "model": model.name,
            "accelerator": cluster.name,
            "n_accelerators": str(len(cluster.places)),
            "global_batch": str(row["global_batch"]),
            "seq": str(model.max_seq_len),
            "precision": "fp16",
        },
    )
