"""A question posed: checked before any search, or refused; constraints that contradict the job or each other are named in
pairs."""

from collections.abc import Iterator

from hethub.planner.problem.problem import Batch, Problem, collapse
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB, Software
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, suggest
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec
from hethub.spec.plan import SCHEDULES


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
    _check_constraints(problem)
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
            raise BadInput.about(
                f"train.precision {precision}: accelerator {device_type.accelerator.name} (node '{node}') does not compute in it. All of "
                f"cluster '{problem.cluster.name}' compute in {', '.join(able)}; choose one of these, or leave that node out.",
                "train", "precision",
            )  # fmt: skip


Contradiction = tuple[str, str]  # two things of which no plan can keep both


def _check_constraints(problem: Problem) -> None:
    """Raises BadInput naming the first constraint that means nothing here, or the first pair that excludes every
    plan."""
    _check_forbidden_names(problem)
    for checks in (_of_degrees, _of_products, _of_batches, _of_modes):
        for one, other in checks(problem):
            name = one.partition(":")[0]
            raise BadInput.about(f"constraints.{one} contradicts {other}; change one of them.", "constraints", name)


def _check_forbidden_names(problem: Problem) -> None:
    types = problem.device_types
    known = list(dict.fromkeys([*(own.accelerator.name for own in types), *(own.island for own in types)]))
    for name in (name for pair in problem.constraints.forbid for name in pair):
        if name not in known:
            raise BadInput.about(
                f"constraints.forbid names '{name}', which is neither an accelerator nor a vendor of cluster "
                f"'{problem.cluster.name}'; {suggest(name, known)}",
                "constraints", "forbid",
            )  # fmt: skip


def _of_degrees(problem: Problem) -> Iterator[Contradiction]:
    """Single degrees against model, cluster and batch."""
    given, batch = problem.constraints, problem.batch.global_batch
    if given.tp and given.tp not in problem.degrees:
        listed = ", ".join(map(str, problem.degrees))
        yield (
            f"tp: {given.tp}",
            f"the degrees that the heads of '{problem.model.name}' allow inside one machine ({listed})",
        )
    if given.pp and given.pp > problem.model.layers:
        yield (f"pp: {given.pp}", f"the {problem.model.layers} layers of model '{problem.model.name}'")
    if given.dp and given.dp > batch:
        yield (f"dp: {given.dp}", f"global_batch {batch}: every replica needs a sample")


def _of_products(problem: Problem) -> Iterator[Contradiction]:
    """Degrees together against the accelerators."""
    given = problem.constraints
    replicas = sum(len(problem.units(device_type, given.tp or 1)) for device_type in problem.usable)
    if (given.pp or 1) * (given.dp or 1) > replicas:
        first, *others = [f"{key}: {value}" for key in ("tp", "pp", "dp") if (value := getattr(given, key))]
        named = first + (f" with {' and '.join(others)}" if others else "")
        yield (named, f"the {problem.size} accelerators of cluster '{problem.cluster.name}'")


def _of_batches(problem: Problem) -> Iterator[Contradiction]:
    given, batch = problem.constraints, problem.batch.global_batch
    if given.micro_batch and given.max_micro_batch and given.micro_batch > given.max_micro_batch:
        yield (f"micro_batch: {given.micro_batch}", f"max_micro_batch: {given.max_micro_batch}")
    if given.micro_batch and given.micro_batch > batch:
        yield (f"micro_batch: {given.micro_batch}", f"global_batch {batch}")
    if given.micro_batch and given.dp and given.dp * given.micro_batch > batch:
        yield (f"micro_batch: {given.micro_batch} with dp: {given.dp}", f"global_batch {batch}")


def _of_modes(problem: Problem) -> Iterator[Contradiction]:
    """Schedule and recompute."""
    given = problem.constraints
    schedule = SCHEDULES[given.schedule or "1f1b"]
    if given.recompute and not schedule.allows(given.recompute):
        yield (f"schedule: {given.schedule}", "recompute: full, which leaves no weights' gradients to put off")
    if schedule.takes_chunks and problem.model.layers < 2 * (given.pp or 1):
        stages = f" with pp: {given.pp}" if given.pp else ""
        yield (
            f"schedule: {given.schedule}{stages} (two chunks of layers or more in every stage)",
            f"the {problem.model.layers} layers of '{problem.model.name}'",
        )
