"""A question posed: checked before any search, or refused."""

from hethub.planner.problem.contradictions import check_constraints
from hethub.planner.problem.problem import Batch, Problem, collapse
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB, Software
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec


def pose(
    model: ModelSpec,
    cluster: ClusterSpec,
    batch: Batch,
    constraints: ConstraintsSpec | None = None,
    profile: ProfileSpec | None = None,
    software: Software = HETHUB,
) -> Problem:
    """The problem, checked. Raises BadInput where precision, batch or constraints leave no plan at all.

    What `profile` measured counts instead of estimates; it raises too where it measured another model.
    """
    if profile is not None:
        profile.check_model(model)
        profile.check_version()
    problem = Problem(
        model=model,
        cluster=cluster,
        batch=batch,
        constraints=constraints or ConstraintsSpec(),
        device_types=collapse(cluster),
        profile=profile,
        software=software,
    )
    _check_precision(problem)
    check_constraints(problem)
    if batch.seq_len > model.max_seq_len:
        raise BadInput(
            f"seq_len is {batch.seq_len}, but model '{model.name}' takes at most {model.max_seq_len} tokens; shorten seq_len."
        )
    return problem


def _check_precision(problem: Problem) -> None:
    precision = problem.batch.precision
    for device_type in problem.device_types:
        if not device_type.accelerator.peak_flops(precision):
            node = problem.cluster.places[device_type.ranks[0]].node.name
            able = [
                p for p in ("bf16", "fp16", "fp32") if all(k.accelerator.peak_flops(p) for k in problem.device_types)
            ]
            raise BadInput(
                f"precision {precision}: accelerator {device_type.accelerator.name} (node '{node}') does not compute in it. All of cluster "
                f"'{problem.cluster.name}' compute in {', '.join(able)}; choose one of these, or leave that node out."
            )
