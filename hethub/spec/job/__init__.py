"""The job file: its keys, and a job with everything it names loaded.

Start reading: job.py, then data.py.
May import: spec.accelerator, spec.base, spec.cluster, spec.documents, spec.errors, spec.lookup, spec.model, spec.network, spec.plan.
"""

from hethub.spec.job.data import DataSpec, EvalSpec, SourceSpec
from hethub.spec.job.job import (
    PYTHON,
    STRATEGIES,
    TOKENIZER,
    CheckpointSpec,
    CommunicatorSpec,
    ConstraintsSpec,
    EmulationSpec,
    Job,
    JobSpec,
    LogSpec,
    ScheduleKind,
    StragglerSpec,
    TrainSpec,
    check_plan_path,
    load_job,
    load_plan_of,
)

__all__ = [
    "PYTHON",
    "STRATEGIES",
    "TOKENIZER",
    "CheckpointSpec",
    "CommunicatorSpec",
    "ConstraintsSpec",
    "DataSpec",
    "EmulationSpec",
    "EvalSpec",
    "Job",
    "JobSpec",
    "LogSpec",
    "ScheduleKind",
    "SourceSpec",
    "StragglerSpec",
    "TrainSpec",
    "check_plan_path",
    "load_job",
    "load_plan_of",
]
