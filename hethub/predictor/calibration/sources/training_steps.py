"""Rows of published measurements as plans: what a table says, read into the same layouts that hethub predicts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from hethub.predictor.calibration.sources.cells import THE_ROW, Numbers, check_named, read_lines
from hethub.predictor.calibration.sources.software_stacks import HALF_GRADIENT_BYTES, Stack, server_of, stack_of
from hethub.predictor.cost.constants import NARROW, largest_peak
from hethub.predictor.cost.operators import model_flops
from hethub.predictor.cost.software import HETHUB, MathPrecision, Software
from hethub.predictor.memory.ranks import rank_memory
from hethub.spec.accelerator import AcceleratorSpec, find_accelerator
from hethub.spec.base import build
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec

REQUIRED = ("id", "source", "family", "layers", "hidden", "heads", "ffn", "vocab", "seq", "accelerator", "n_accelerators",
            "tp", "pp", "dp", "global_batch", "precision", "step_seconds")  # fmt: skip
# What the table may have beside these, and a row may leave empty; any other column is the reader's own.
OPTIONAL = ("kv_heads", "gated", "micro_batch", "cp", "zero", "recompute", "flash_attention", "sequence_parallel",
            "virtual_stages", "layers_per_stage", "per_node", "inter_node_gbps", "optimizer_included", "stack",
            "peak_memory_gib", "suspect", "note")  # fmt: skip
# What a cell of these may say; an empty one leaves it open.
NAMED = {
    "recompute": ("none", "selective", "full"),
    **dict.fromkeys(("gated", "flash_attention", "sequence_parallel", "optimizer_included", "suspect"), ("0", "1")),
}
IN_NODE_NICS, MOST_ZERO = 8, 3
FAR_BEYOND, NEAR = 1.3, 0.2  # measured peak memory over that of the named precision, and from that of tf32
LONG_PIPELINE, FEW_MICROBATCHES = 8, 4  # stages, and micro-batches for each, that programs interleave
# What sources' published programs say and their tables do not: Sailor's ports of OPT and GPT-Neo have no dropout in
# attention and a head of their own (github.com/eth-easl/sailor). The rows' peak memory agrees.
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
    inferred: Mapping[str, str] = field(default_factory=dict)  # what the row leaves open and its makers would have set

    @property
    def accelerator(self) -> AcceleratorSpec:
        """The first rank's; in tables of steps all are alike."""
        return self.layouts[0].cluster.places[0].accelerator

    @property
    def open_choice(self) -> str | None:
        """What the row leaves unknown, or None."""
        return "micro_batch" if not self.row.get("micro_batch") else None


def read_table(path: Path) -> tuple[list[Case], list[dict[str, str]]]:
    """The cases of a CSV table, and the rows that are none, each with its reason. Raises BadInput for no such table."""
    return collect(read_lines(path, REQUIRED), lambda name, row: read_row(row | {"id": name}))


def near_misses(columns: Iterable[str]) -> list[str]:
    """What to say of columns that are not read but called nearly as one that would be and is not there, a line each."""
    columns = set(columns)
    free = [name for name in OPTIONAL if name not in columns]
    found = {name: get_close_matches(name, free, n=1, cutoff=0.85) for name in columns - {*REQUIRED, *OPTIONAL}}
    return [f"column {name} is not read; did you mean {near[0]}?" for name, near in sorted(found.items()) if near]


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


def read_row(row: Mapping[str, str]) -> Case:
    """One row as a case. Raises ValueError saying what is inconsistent.

    A row in half precision whose measured peak memory is far beyond it, and is that of fp32 weights and activations,
    ran in tf32: NVIDIA's containers compute fp32 products so.
    """
    check_named(row, NAMED)
    named = row["precision"]
    if named not in get_args(MathPrecision):
        raise ValueError(f"precision {named} is unknown")
    case = _read_in(row, named)  # type: ignore[arg-type]
    held, device = case.measured_memory_bytes, case.accelerator
    if held is None or named not in ("fp16", "bf16") or not device.tf32_tflops or held < FAR_BEYOND * _peak(case):
        return case
    wide = _read_in(row, "tf32")
    if abs(_peak(wide) / held - 1.0) > NEAR:
        return case
    return replace(wide, inferred={**wide.inferred, "precision": f"tf32 by its peak memory, not {named}"})


def _peak(case: Case) -> float:
    """Predicted bytes of the fullest rank."""
    return max(used.bytes for used in rank_memory(case.layouts[0], case.software))


def _read_in(row: Mapping[str, str], precision: MathPrecision) -> Case:
    """One row as a case whose products ran in `precision`."""
    number = Numbers(row)
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
    given = number("micro_batch", 0)
    sizes = [given] if given else [1 << i for i in range(8) if batch // dp % (1 << i) == 0]
    if given > batch // dp:
        raise ValueError(f"micro_batch {given} is more than the {batch // dp} samples of a replica")
    stack, inferred = stack_of(row.get("stack") or "unknown"), dict[str, str]()
    cluster = _cluster(row, number, total, inferred)
    zero = number("zero", 0)
    if zero > MOST_ZERO:
        raise ValueError(f"zero is {zero}; it is 0, 1, 2 or 3, or left empty")
    if not row.get("zero"):
        zero = stack.zero
        inferred["zero"] = str(zero)
    if zero == 2 and pp > 1 and stack.reduces_once:
        zero = 1
        inferred["zero"] = "2, which sums gradients once a step in this pipeline, as 1 does"
    if not zero and precision in stack.shards_states:
        zero = 1
        inferred["zero"] = "0, whose optimizer shards its states in this precision, as 1 does"
    layers = _layers_per_stage(row, model.layers, pp)
    if min(layers) < 1:
        raise ValueError(f"pp {pp} leaves a stage without any of the {model.layers} layers")
    stages = [stage_specs(layers, tp * cp, dp, size, batch, zero, row.get("recompute") or "none") for size in sizes]
    plan_precision: Any = "bf16" if precision in NARROW else {"tf32": "fp32"}.get(precision, precision)
    plans = [
        PlanSpec.model_construct(model=model.name, cluster=cluster.name, global_batch=batch, seq_len=seq, precision=plan_precision,
                                 schedule="1f1b", stages=stage)
        for stage in stages
    ]  # fmt: skip
    _check_rate(model, cluster, batch, seq, seconds, precision)
    memory = number.positive("peak_memory_gib")
    return Case(
        id=row["id"],
        source=row["source"],
        group=f"{row.get('model') or model.name} x {row['accelerator']}",
        layouts=tuple(Layout(plan, model, cluster) for plan in plans),
        software=_software(row, number, precision, zero, stack, inferred),
        measured_seconds=seconds,
        measured_memory_bytes=None if memory is None else memory * 2**30,
        suspect=row.get("suspect") == "1",
        row=row,
        inferred=inferred,
    )


def _check_rate(
    model: ModelSpec, cluster: ClusterSpec, batch: int, seq: int, seconds: float, precision: MathPrecision
) -> None:
    """Raises ValueError where the step would be faster than its products alone at the accelerators' peak."""
    peak = sum(largest_peak(node.device, precision) * node.accelerators * node.count for node in cluster.nodes)
    least = model_flops(model, batch, seq) / peak
    if seconds < least:
        raise ValueError(
            f"step_seconds {seconds:g} is beyond physics: the products alone take {least:.3g} s at the peak of "
            f"{len(cluster.places):,} accelerators; look at its unit (seconds), global_batch (sequences) and precision"
        )


def _model(row: Mapping[str, str], number: Numbers) -> ModelSpec:
    seq = number("seq")
    shape = {
        "name": row.get("model") or "model",
        "family": row["family"],
        **{key: number(key) for key in ("layers", "hidden", "heads", "ffn", "vocab")},
        "kv_heads": number("kv_heads", 0) or None,
        "gated": row["gated"] == "1" if row.get("gated") else None,
        "max_seq_len": seq,
        "tied_head": row["family"] != "llama" and not row["source"].startswith(WITH_OWN_HEAD),
    }
    return build(ModelSpec, shape, THE_ROW, "model")


def _cluster(row: Mapping[str, str], number: Numbers, total: int, inferred: dict[str, str]) -> ClusterSpec:
    """The machines of a row; what it does not say of them is as their makers build them."""
    accelerator, usual = find_accelerator(row["accelerator"]), server_of(row["accelerator"])
    per_node = min(number("per_node", 0) or min(total, usual.accelerators if usual else 8), total)
    gbps, machines = number.positive("inter_node_gbps"), 1
    if usual and usual.domain:
        machines = _machines_in_domain(per_node, total, usual.domain)
        inferred["fast_domain"] = f"{machines * per_node} accelerators"
    if gbps is None and usual and total > per_node:
        gbps = usual.gbps
        inferred["inter_node_gbps"] = f"{gbps:g}"
    per_node *= machines
    node: dict[str, Any] = {
        "name": "node",
        "accelerator": accelerator,
        "count": total // per_node,
        "accelerators": per_node,
    }
    if gbps is not None:
        nics = min(IN_NODE_NICS * machines, per_node)
        node |= {"nics": nics, "gbps_per_nic": gbps * machines / nics}
    nodes = [node]
    if total % per_node:
        nodes.append({**node, "name": "last", "count": 1, "accelerators": total % per_node})
    return build(ClusterSpec, {"name": f"{total} {row['accelerator']}", "nodes": nodes}, THE_ROW, "cluster")


def _machines_in_domain(per_node: int, total: int, domain: int) -> int:
    """How many machines one fast switch joins where the job cuts its accelerators evenly."""
    return max(count for count in range(1, domain // per_node + 1) if total % (count * per_node) == 0 or count == 1)


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
    if sum(counts) != layers:
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


def _interleaving(row: Mapping[str, str], number: Numbers) -> int:
    """Chunks per stage where a row leaves them open: two where it says "interleaved"; chunks of two layers, as recipes
    have, where eight stages or more get few micro-batches; else one."""
    stages = number("pp")
    if "interleaved" in (row.get("note") or "") and stages > 1:
        return 2
    few = number("global_batch") // number("dp") // number("micro_batch", 1) <= FEW_MICROBATCHES * stages
    return max(1, -(-number("layers") // stages) // 2) if stages >= LONG_PIPELINE and few else 1


def _sums_in_fp32(row: Mapping[str, str], stack: str, math: MathPrecision) -> bool:
    """Whether gradients travel in fp32: AMP's DeepSpeed and torchtitan by default, Composer unless its mode is PURE."""
    by_default = stack == "deepspeed" or "torchtitan" in stack or "mode DEFAULT" in (row.get("note") or "")
    return by_default or math in ("fp32", "tf32")


def _software(
    row: Mapping[str, str], number: Numbers, math: MathPrecision, zero: int, known: Stack, inferred: dict[str, str]
) -> Software:
    """What the stack's name and the row's flags say of the execution; facts about the software, not fitted figures."""
    stack = row.get("stack") or "unknown"
    sharded = "fsdp" in stack or "titan" in stack
    virtual = number("virtual_stages", 0)
    if not virtual:
        virtual = 1 if stack == HETHUB.stack else _interleaving(row, number)  # of others what their recipes have
        inferred["virtual_stages"] = str(virtual)
    if virtual > 1 and number("pp") == 1:
        inferred["virtual_stages"] = f"{virtual}, which in one stage follow each other, as 1 does"
        virtual = 1
    if stack == HETHUB.stack:
        return replace(HETHUB, math=math, interleave=virtual)
    fused = row.get("flash_attention") == "1"
    if not row.get("flash_attention"):
        fused = known.fused_attention
        inferred["flash_attention"] = str(int(fused))
    return Software(
        stack=stack,
        math=math,
        fused_attention=fused,
        fused_activation=known.fused_activation or row["family"] != "gpt",
        attention_dropout=not row["source"].startswith(WITHOUT_ATTENTION_DROPOUT),
        gathers_ahead=False,
        sums_beside_weights=False,
        norms_apart=False,
        one_tied_copy=False,
        keeps_gate_activation=not known.fused_gate,
        gradient_pass_bytes=None if known.autocast else HALF_GRADIENT_BYTES,
        gradient_wire_bytes=4 if known.autocast or _sums_in_fp32(row, stack, math) else 2,
        sequence_parallel=row.get("sequence_parallel") == "1",
        context_parallel=number("cp", 1),
        interleave=virtual,
        selective_fraction=0.4 if sharded else None,
        chunked_loss=False,
        optimizer_included=row.get("optimizer_included") != "0",
        half_gradients=math in known.half_gradients,
        kept_products="all" if row.get("recompute") else known.kept_products,
        layers_in_host=known.layers_in_host * (zero == 3),
        **known.facts(),
    )
