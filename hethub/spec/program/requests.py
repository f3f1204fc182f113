"""What a job may ask of a program."""

from hethub.spec.errors import BadInput
from hethub.spec.job import STRATEGIES, ConstraintsSpec, EmulationSpec, Job, StragglerSpec

KEPT = {"reserve", "time_limit_seconds", "seed", "keep_global_batch"}  # the constraints that programs know
PRECISIONS = ("fp32", "fp64")


def check_plannable(job: Job) -> None:
    """Raises BadInput where the job asks for what no program can have."""
    if job.factory is not None and job.spec.plan in STRATEGIES and job.spec.plan not in ("auto", "hap"):
        raise BadInput(
            f"{job.source.at(('plan',))} is {job.spec.plan}, which cuts hethub's own Llama into layers; a model of Python takes plan: hap."
        )
    for name, field in ConstraintsSpec.model_fields.items():
        if name not in KEPT and getattr(job.spec.constraints, name) != field.default:
            raise BadInput(
                f"{job.source.at(('constraints', name))} is for plans of layers; strategy 'hap' knows {', '.join(sorted(KEPT))}. Remove it."
            )
    spec = job.spec
    if spec.train.precision not in PRECISIONS:
        raise BadInput(
            f"{job.source.at(('train', 'precision'))} is {spec.train.precision}; programs of strategy 'hap' compute in fp32 or fp64. "
            "Set one."
        )
    if spec.data.document_mask:
        raise BadInput(
            f"{job.source.at(('data', 'document_mask'))} is for hethub's own Llama; a module under strategy 'hap' sees tokens alone. "
            "Set it to false."
        )
    wanted = {
        "profile": spec.profile is not None,
        "measure": spec.measure == "always",
        "replan": spec.replan in ("report", "auto"),
        "train.compile": spec.train.compile,
        "drift": spec.drift != StragglerSpec(),
        "parity": spec.parity == "report",
        "rehearsal": spec.rehearsal != EmulationSpec(),
    }
    for name, given in wanted.items():
        if given:
            place = job.source.at(tuple(name.split(".")))
            raise BadInput(f"{place} is for plans of layers and not taken by strategy 'hap'; remove it.")
