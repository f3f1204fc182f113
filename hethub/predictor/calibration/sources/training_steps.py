"""Rows of published measurements as plans: what a table says, read into the same layouts that hethub predicts."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, get_args

from hethub.predictor.cost.software import MathPrecision, Software
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec

REQUIRED = ("id", "source", "family", "layers", "hidden", "heads", "ffn", "vocab", "seq", "accelerator", "n_accelerators",
            "tp", "pp", "dp", "global_batch", "precision", "step_seconds")  # fmt: skip
IN_NODE_NICS = 8
LARGEST = 10**7  # of any count in a table: larger ones are slips, and would be laid out one by one
HALF_GRADIENT_BYTES = 6.0  # gradients kept in half precision: the new and the old one read, the sum written
# What sources' published programs say and their tables do not. Sailor's launch scripts ask for no half precision,
# neither of Megatron (--fp16) nor in DeepSpeed's configuration, though the table says fp16; NVIDIA's container
# computes fp32 products in tf32; its ports of OPT and GPT-Neo have no dropout in attention and a head of their own
# (github.com/eth-easl/sailor). The rows' peak memory agrees.
RAN_IN: Mapping[str, MathPrecision] = {"Sailor": "tf32"}
WITHOUT_ATTENTION_DROPOUT = WITH_OWN_HEAD = ("Sailor",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured step as a layout under its software; `choices` are the plans to try where the row leaves it open."""

    id: str
    source: str
    group: str  # model × accelerator: what cross-validation keeps together
    layouts: tuple[Layout, ...]
    software: Software
    measured_seconds: float
    measured_memory_bytes: float | None
    suspect: bool
    row: Mapping[str, str]

    @property
    def open_choice(self) -> str | None:
        """What the row leaves unknown, or None."""
        return "micro_batch" if not self.row.get("micro_batch") else None


def read_table(path: Path) -> tuple[list[Case], list[dict[str, str]]]:
    """The cases of a CSV table, and the rows that are none, each with its reason. Raises BadInput for no such table."""
    return collect(read_lines(path, REQUIRED), lambda name, row: read_row(row | {"id": name}))


def collect(
    lines: Iterable[tuple[str, dict[str, str]]], read: Callable[[str, dict[str, str]], Case]
) -> tuple[list[Case], list[dict[str, str]]]:
    """What `read` makes of named rows, and those that it refuses, each with its reason."""
    cases, skipped = [], []
    for name, row in lines:
        try:
            cases.append(read(name, row))
        except ValueError as error:  # BadInput, a number that is none, or a spec's rule
            skipped.append({"id": name, "why": " ".join(str(error).split())})
    return cases, skipped


def columns_of(path: Path) -> tuple[str, ...]:
    """The names in the first line of a CSV table. Raises BadInput where it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return tuple(csv.DictReader(file).fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: the table cannot be read: {error}.") from None


def read_lines(path: Path, required: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The rows of a CSV table with their names: the column id, else the line. Raises BadInput where a column is
    missing."""
    columns = columns_of(path)
    if missing := [name for name in required if name not in columns]:
        raise BadInput(f"{path}: the table lacks the column(s) {', '.join(missing)}; its first line names the columns.")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: the table cannot be read: {error}.") from None
    return [(row.get("id") or f"line {number}", row) for number, row in enumerate(rows, 2)]


def read_row(row: Mapping[str, str]) -> Case:
    """One row as a case. Raises ValueError saying what is inconsistent."""
    number = _Numbers(row)
    model = _model(row, number)
    tp, pp, cp, dp = number("tp"), number("pp"), number("cp", 1), number("dp")
    total, batch, seq = number("n_accelerators"), number("global_batch"), number("seq")
    if tp * pp * cp * dp != total:
        raise ValueError(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} is not n_accelerators {total}")
    if batch < dp:
        raise ValueError(f"global_batch {batch} leaves some of the {dp} replicas without a sample")
    seconds = number.positive("step_seconds") or 0.0
    if not 0 < seconds < 1e7:
        raise ValueError(f"step_seconds {row['step_seconds'] or 'is empty and'} is no positive time")
    precision = _math_of(row)
    given = number("micro_batch", 0)
    sizes = [given] if given else [1 << i for i in range(8) if batch // dp % (1 << i) == 0]
    if given > batch // dp:
        raise ValueError(f"micro_batch {given} is more than the {batch // dp} samples of a replica")
    cluster = _cluster(row, number, total)
    layers = _layers_per_stage(row, model.layers, pp)
    stages = [
        stage_specs(layers, tp * cp, dp, size, batch, number("zero", 0), row.get("recompute") or "none")
        for size in sizes
    ]
    plan_precision: Any = {"fp8": "bf16", "tf32": "fp32"}.get(precision, precision)
    plans = [
        PlanSpec.model_construct(model=model.name, cluster=cluster.name, global_batch=batch, seq_len=seq, precision=plan_precision,
                                 schedule="1f1b", stages=stage)
        for stage in stages
    ]  # fmt: skip
    memory = number.positive("peak_memory_gib")
    return Case(
        id=row["id"],
        source=row["source"],
        group=f"{row.get('model') or model.name} x {row['accelerator']}",
        layouts=tuple(Layout(plan, model, cluster) for plan in plans),
        software=_software(row, number, cp),
        measured_seconds=seconds,
        measured_memory_bytes=None if memory is None else memory * 2**30,
        suspect=row.get("suspect") == "1",
        row=row,
    )


def _math_of(row: Mapping[str, str]) -> MathPrecision:
    """What the row's products ran in: the precision it names, unless its source is known to have run another."""
    named = row["precision"]
    if named not in get_args(MathPrecision):
        raise ValueError(f"precision {named} is unknown")
    return next((ran for source, ran in RAN_IN.items() if row["source"].startswith(source)), named)  # type: ignore[arg-type]


class _Numbers:
    """Whole numbers of a row; an empty cell is the default, or an error without one."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row

    def __call__(self, key: str, default: int | None = None) -> int:
        text = self.row.get(key) or ""
        if not text and default is not None:
            return default
        value = self._float(key)
        if not (0 if default == 0 else 1) <= value <= LARGEST or value != int(value):
            raise ValueError(f"{key} is {text or 'empty'}; a whole number is needed, up to {LARGEST:,}")
        return int(value)

    def positive(self, key: str) -> float | None:
        """A positive finite number; None for an empty cell."""
        if not self.row.get(key):
            return None
        if not 0 < (value := self._float(key)) < inf:
            raise ValueError(f"{key} is {self.row[key]}; a positive number is needed")
        return value

    def _float(self, key: str) -> float:
        """0 for an empty cell."""
        try:
            return float(self.row.get(key) or 0.0)
        except ValueError:
            raise ValueError(f"{key} is {self.row[key]!r}; a number is needed") from None


def _model(row: Mapping[str, str], number: _Numbers) -> ModelSpec:
    seq = number("seq")
    return ModelSpec(
        name=row.get("model") or "model",
        family=row["family"],
        layers=number("layers"),
        hidden=number("hidden"),
        heads=number("heads"),
        kv_heads=number("kv_heads", 0) or None,
        ffn=number("ffn"),
        gated=row["gated"] == "1" if row.get("gated") else None,
        vocab=number("vocab"),
        max_seq_len=seq,
        tied_head=row["family"] != "llama" and not row["source"].startswith(WITH_OWN_HEAD),
    )


def _cluster(row: Mapping[str, str], number: _Numbers, total: int) -> ClusterSpec:
    per_node = min(number("per_node", 0) or min(total, 8), total)
    accelerator = find_accelerator(row["accelerator"])
    node: dict[str, Any] = {
        "name": "node",
        "accelerator": accelerator,
        "count": total // per_node,
        "accelerators": per_node,
    }
    if (gbps := number.positive("inter_node_gbps")) is not None:
        node |= {"nics": min(IN_NODE_NICS, per_node), "gbps_per_nic": gbps / min(IN_NODE_NICS, per_node)}
    nodes = [node]
    if total % per_node:
        nodes.append({**node, "name": "last", "count": 1, "accelerators": total % per_node})
    return ClusterSpec.model_validate({"name": f"{total} {row['accelerator']}", "nodes": nodes})


def _layers_per_stage(row: Mapping[str, str], layers: int, pp: int) -> list[int]:
    """Transformer layers of every stage; published cuts may count the embedding and the head's parts as layers."""
    if not row.get("layers_per_stage"):
        if layers % pp == 0:
            return [layers // pp] * pp
        if (layers + 2) % pp == 0:
            return without_ends([(layers + 2) // pp] * pp, 2)
        return [layers // pp + (stage < layers % pp) for stage in range(pp)]
    given = [int(part) for part in row["layers_per_stage"].split("/")]
    if len(given) != pp:
        raise ValueError(f"layers_per_stage {row['layers_per_stage']} names {len(given)} stages, pp is {pp}")
    counts = without_ends(given, sum(given) - layers)
    if sum(counts) != layers or min(counts) < 0:
        raise ValueError(f"layers_per_stage {row['layers_per_stage']} does not hold {layers} layers")
    return counts


def without_ends(counts: list[int], extra: int) -> list[int]:
    """The counts without the modules that are no layers: a third of them at the front, the rest at the back.

    Embedding and head are one each; DeepSpeed's GPT-2 pipeline has two modules before its layers (embedding, transpose)
    and four behind (transpose, norm, head, cast).
    """
    if extra <= 0:
        return counts
    front = max(1, extra // 3)
    counts = [counts[0] - front, *counts[1:]]
    counts[-1] -= extra - front
    return counts


def stage_specs(
    layers: list[int], replica_ranks: int, dp: int, micro_batch: int, batch: int, zero: int, recompute: Any
) -> tuple[StageSpec, ...]:
    """Megatron's order of ranks: tensor-parallel innermost, replicas next, stages outermost."""
    stages, first, rank = [], 0, 0
    for count in layers:
        replicas = []
        for position in range(dp):
            ranks = tuple(range(rank, rank + replica_ranks))
            samples = batch // dp + (position < batch % dp)
            shape: dict[str, Any] = {
                "micro_batch": micro_batch,
                "samples": samples,
                "in_flight": None,
                "tensor_shares": None,
            }
            replicas.append(ReplicaSpec.model_construct(ranks=ranks, **shape))
            rank += replica_ranks
        chunk: Any = ((first, first + count),)
        rest: dict[str, Any] = {"zero": zero, "state_shares": {}, "recompute": recompute, "offload": ()}
        stages.append(StageSpec.model_construct(layers=chunk, replicas=tuple(replicas), **rest))
        first += count
    return tuple(stages)


def _sums_in_fp32(row: Mapping[str, str], stack: str) -> bool:
    """Whether gradients travel in fp32: AMP's DeepSpeed and torchtitan by default, Composer unless its mode is PURE."""
    by_default = stack == "deepspeed" or "torchtitan" in stack or "mode DEFAULT" in (row.get("note") or "")
    return by_default or _math_of(row) in ("fp32", "tf32")


def _software(row: Mapping[str, str], number: _Numbers, cp: int) -> Software:
    """What the stack's name and the row's flags say of the execution; facts about the software, not fitted figures."""
    stack = row.get("stack") or "unknown"
    sharded = "fsdp" in stack or "titan" in stack
    virtual = number("virtual_stages", 0) or (2 if "interleaved" in (row.get("note") or "") and number("pp") > 1 else 1)
    return Software(
        stack=stack,
        math=_math_of(row),
        fused_attention=row.get("flash_attention") == "1",
        fused_softmax="eager" not in stack,
        fused_activation="eager" not in stack or row["family"] != "gpt",
        attention_dropout=not row["source"].startswith(WITHOUT_ATTENTION_DROPOUT),
        fused_elementwise=any(name in stack for name in ("compile", "megatron", "deepspeed", "composer")),
        spread_boundaries="megatron" in stack or "deepspeed" in stack,
        overlapped_reduction=sharded,
        gathers_ahead=False,
        one_tied_copy=False,
        keeps_gate_activation=True,
        gradient_pass_bytes=HALF_GRADIENT_BYTES,
        gradient_wire_bytes=4 if _sums_in_fp32(row, stack) else 2,
        sequence_parallel=row.get("sequence_parallel") == "1",
        context_parallel=cp,
        interleave=virtual,
        selective_fraction=0.4 if sharded else None,
        chunked_loss=False,
        optimizer_included=row.get("optimizer_included") != "0",
    )
