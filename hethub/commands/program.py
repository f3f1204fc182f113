"""Strategy hap in the commands: which jobs it is for, and `hethub plan` and `predict` of them."""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hethub.commands.common import (
    known_cluster,
    need_torch,
    print_json,
    program_for,
    program_made_for,
)
from hethub.spec.errors import BadInput

if TYPE_CHECKING:
    from hethub.spec.job import Job
    from hethub.spec.program import ProgramFor, ProgramPlanSpec


def runs_program(job_path: Path, overrides: list[str], plan_path: Path | None) -> bool:
    """Whether a job is for strategy hap; False where it cannot be read, which whoever reads it next will say."""
    from hethub.spec.job import load_job

    try:
        job = load_job(job_path, overrides)
    except BadInput:
        return False
    return is_program_job(job, plan_path)


def is_program_job(job: "Job", plan_path: Path | None = None, strategy: str | None = None) -> bool:
    """Whether strategy hap has the job: its model is Python, its plan file is a program, or it asks for it."""
    from hethub.spec.program import is_program_plan

    file = plan_path or job.plan_path
    if strategy is not None:
        return strategy == "hap" or (strategy == "auto" and job.factory is not None)
    if file is not None and job.factory is None:
        return is_program_plan(file)
    return job.factory is not None or job.spec.plan == "hap"


def plan_program_job(options: argparse.Namespace, job: "Job") -> None:
    """`hethub plan` of a program; nothing is run, so no device is needed."""
    from hethub.spec.program import save_program_plan

    refuse_with_programs(options, "robust", "alone", "top", "profile", "calibrate")
    plan, found = _planned(job, explain=options.explain)
    written = []
    if options.out is not None:
        save_program_plan(plan, options.out)
        written.append(options.out)
    _show(options, plan, plan.job, written, found)


def predict_program_job(options: argparse.Namespace, job: "Job") -> None:
    """`hethub predict` of a program: of the plan file given, else of the best found."""
    from hethub.spec.program import load_program_plan

    refuse_with_programs(options, *_NOT_PREDICTED)
    file = options.plan or job.plan_path
    if file is None:
        plan, found = _planned(job)
        return _show(options, plan, plan.job, [], found)
    plan = load_program_plan(file)
    _show(options, plan, program_for(plan, file, job), [], None)


def predict_program_alone(options: argparse.Namespace) -> None:
    """`hethub predict` of a program's plan file, for what it was made for."""
    from hethub.spec.program import load_program_plan

    refuse_with_programs(options, *_NOT_PREDICTED)
    plan = load_program_plan(options.job)
    _show(options, plan, program_made_for(plan, options.job, None), [], None)


_NOT_PREDICTED = ("trace", "bounds", "alone", "profile", "calibrate")


def refuse_with_programs(options: argparse.Namespace, *names: str) -> None:
    """Raises BadInput where one of these options is given, which plans of layers alone have: a program holds its own times."""
    if any(getattr(options, name) is not None and getattr(options, name) is not False for name in names):
        *others, last = [f"--{name}" for name in names]
        raise BadInput(f"{', '.join(others)} and {last} are for plans of layers; leave them out with strategy hap.")


def _planned(job: "Job", *, explain: bool = False) -> "tuple[ProgramPlanSpec, dict[str, Any]]":
    """The best program, and how it was found: seconds of tracing and search, of baselines."""
    need_torch("plan --strategy hap")
    import time

    from hethub.runtime.program.planned import plan_program, trace_job
    from hethub.runtime.program.subject import open_subject
    from hethub.spec.program import check_plannable

    check_plannable(job)
    cluster = known_cluster(job)
    with redirect_stdout(sys.stderr):  # what the model's own code prints is no part of the answer
        subject = open_subject(job, with_values=False)
        began = time.perf_counter()
        graph = trace_job(job, subject)
    traced = time.perf_counter() - began
    best = plan_program(job, subject, graph, cluster, explain=explain)
    return best.plan, {"trace_seconds": traced, "search_seconds": best.search_seconds, "baselines": best.baselines}


def _show(
    options: argparse.Namespace, plan: "ProgramPlanSpec", made_for: "ProgramFor | None", written: list[Path],
    found: dict[str, Any] | None,
) -> None:  # fmt: skip
    from hethub.predictor.cost.profile import assumed_speeds
    from hethub.report.program import print_program
    from hethub.spec.program import modules_json, prediction_of

    assert made_for is not None
    prediction, assumed = prediction_of(plan, made_for), assumed_speeds(made_for.cluster, plan.precision, None)
    if options.json:
        own = {"plan": plan.model_dump(mode="json", by_alias=True), "modules": modules_json(plan.program)}
        searched: dict[str, Any] = {"candidates": None, "runners_up": [], "not_searched": [], **(found or {})}
        print_json({**prediction, **own, **searched, "assumed_speeds": assumed})
    else:
        print_program(plan, prediction, assumed, written, found)
