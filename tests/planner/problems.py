"""Small questions for the planner: a tiny model, clusters of a few accelerators, and plans evaluated on them."""

from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.table import tabulate
from hethub.planner.plan import find
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec
from hethub.spec.plan import ReplicaSpec

TINY = ModelSpec(name="tiny", layers=6, hidden=128, heads=8, kv_heads=4, ffn=352, vocab=512, max_seq_len=128)


def cpu(name: str, tflops: float, memory_gb: float = 4.0, vendor: str = "cpu") -> dict[str, object]:
    return {
        "name": name, "vendor": vendor, "memory_gb": memory_gb, "memory_gbytes_per_second": 200 * tflops, "fp32_tflops": tflops,
        "fp16_tflops": tflops, "bf16_tflops": tflops, "link_gbytes_per_second": 2,
    }  # fmt: skip


def cluster(*nodes: tuple[str, int, float, float]) -> ClusterSpec:
    """Nodes of (vendor, count of accelerators, tflops, memory)."""
    return ClusterSpec.model_validate(
        {
            "name": "test",
            "emulated": True,
            "nodes": [
                {
                    "name": f"n{i}",
                    "accelerator": cpu(f"{vendor}-{tflops}", tflops, memory, vendor),
                    "accelerators": count,
                }
                for i, (vendor, count, tflops, memory) in enumerate(nodes)
            ],
        }
    )


MIXED = cluster(("amd", 2, 0.05, 4.0), ("nvidia", 2, 0.1, 4.0))


def mixed(**constraints: object) -> Problem:
    """Two slow accelerators of one maker and two fast ones of another."""
    return pose(TINY, MIXED, Batch(16, 64, "fp32"), ConstraintsSpec.model_validate(constraints))


def incumbent_of(problem: Problem) -> Incumbent:
    """Nothing tried yet."""
    return Incumbent(problem)


def answer(problem: Problem) -> Evaluation:
    """The best plan of `auto`, without bounds and explanations."""
    best = find(incumbent_of(problem), "auto")
    assert best is not None
    return best


def every_plan(problem: Problem, number: int = 40) -> list[Evaluation]:
    """The best cuts that are plans, evaluated."""
    incumbent = incumbent_of(problem)
    cuts = best_cuts(problem, tabulate(problem, incumbent.costs.unit_costs), number)
    found = map(incumbent.consider, cuts)
    return [evaluation for evaluation in found if evaluation is not None]


def kind_of(problem: Problem, replica: ReplicaSpec) -> int:
    return next(
        index for index, device_type in enumerate(problem.device_types) if replica.ranks[0] in device_type.ranks
    )
