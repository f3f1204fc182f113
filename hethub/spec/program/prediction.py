"""What is predicted of a program: all of it stands in its plan file, but for the memory that its ranks may use."""

from typing import Any

from hethub.spec.cluster import ClusterSpec
from hethub.spec.program.plan_file import ProgramFor, ProgramPlanSpec


def memory_limits(cluster: ClusterSpec, reserve: float = 0.0) -> list[int]:
    """Bytes of each rank that a program may use where the fraction `reserve` of what others leave stays free."""
    return [int(place.node.usable_memory_bytes * (1.0 - reserve)) for place in cluster.places]


def prediction_of(plan: ProgramPlanSpec, made_for: ProgramFor) -> dict[str, Any]:
    """What is predicted of a plan, as JSON-able data; what a program has no figure for is null."""
    program, step = plan.program, plan.program.predicted_seconds
    computing = sum(operator.seconds for operator in program.operators)
    communicating = max(0.0, step - computing - program.optimizer_seconds)  # what is not hidden behind computing
    usable, limits = memory_limits(made_for.cluster, made_for.reserve), memory_limits(made_for.cluster)
    names = [place.accelerator.name for place in made_for.cluster.places]
    rows = zip(names, program.memory_bytes, limits, strict=True)
    tokens = plan.global_batch * plan.seq_len / step if made_for.items == "tokens" else None
    return {
        "strategy": "hap",
        "fits": all(used <= limit for used, limit in zip(program.memory_bytes, usable, strict=True)),
        "step_seconds": step,
        "step_seconds_interval": None,
        "tokens_per_second": tokens,
        "samples_per_second": plan.global_batch / step,
        "mfu": None,
        "percent_of_makers_alone": None,
        "makers_alone_tokens_per_second": None,
        "percent_of_upper_bound": None,  # the old names of these two
        "upper_bound_tokens_per_second": None,
        "percent_of_ceiling": None,
        "breakdown": {
            "compute": step - communicating - program.optimizer_seconds,
            "communication": communicating,
            "optimizer": program.optimizer_seconds,
        },
        "memory": [
            {"rank": rank, "accelerator": name, "bytes": used, "limit": limit}
            for rank, (name, used, limit) in enumerate(rows)
        ],
        "proved_optimal": program.proved_optimal,
    }
