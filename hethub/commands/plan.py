"""hethub plan, predict and diff: what can be known without running anything."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hethub.commands.common import (
    add_calibrate,
    add_job,
    add_json,
    add_profile,
    check_writable,
    command,
    is_plan,
    known_cluster,
    made_for,
    measured_beside,
    measured_for,
    path,
    planned_for,
    print_json,
    processors,
    profile_beside,
    program_made_for,
    refuse_overwriting,
    strategy_of,
)
from hethub.commands.program import (
    is_program_job,
    plan_program_job,
    predict_program_alone,
    predict_program_job,
    refuse_with_programs,
)
from hethub.spec.errors import BadInput, asked_by, suggest

if TYPE_CHECKING:
    from hethub.planner import HomogeneousPart
    from hethub.predictor import Prediction
    from hethub.predictor.cost.profile import ProfileSpec
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import Job
    from hethub.spec.layout.bind import Layout
    from hethub.spec.plan import PlannedFor, PlanSpec


def add(commands: Any) -> None:
    _add_plan(commands)
    _add_predict(commands)
    _add_diff(commands)


def _add_plan(commands: Any) -> None:
    parser = command(
        commands,
        "plan",
        plan,
        "Finds the plan for a job on its cluster.",
        "hethub plan configs/jobs/laptop-mixed.yaml --explain --out plan.yaml",
    )
    add_job(parser)
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        help="auto, exhaustive (small spaces), hap, or one system's planner: hethub, poplar, cephalo, zorse, uniform (default: the job's)",
    )
    parser.add_argument("--out", type=path, metavar="PLAN.yaml", help="write the plan here")
    add_profile(parser)
    add_calibrate(parser)
    parser.add_argument("--top", type=int, metavar="N", help="how many runners-up to show (default 5)")
    parser.add_argument("--explain", action="store_true", help="what every system would have chosen, and what binds")
    parser.add_argument(
        "--robust",
        action="store_true",
        help="has no effect: every plan is chosen by its mean step over what links and compute may really do",
    )
    _add_alone(parser, " (default: beside --out)")
    add_json(parser)


def _add_alone(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"write every device type's best plan alone into this folder{default}"
    parser.add_argument("--alone", type=path, metavar="DIR", help=text)


def plan(options: argparse.Namespace) -> None:
    from hethub.planner import plan as make_plan
    from hethub.predictor.cost.profile import assumed_speeds
    from hethub.predictor.cost.software import hethub_software
    from hethub.predictor.predict import with_staging
    from hethub.report.explanation import save_alone
    from hethub.report.tables import not_trained, print_plan
    from hethub.spec.job import STRATEGIES, load_job
    from hethub.spec.layout.bind import bind
    from hethub.spec.plan import save_plan

    check_writable(options.out, reads=options.job)  # a folder, `.` say, has no suffix to take another for
    folder = options.alone or (options.out and options.out.with_suffix(".alone"))
    check_writable(options.out, folder=folder)
    if options.top is not None and options.top < 0:
        raise BadInput(f"--top {options.top}: give the number of runners-up to show, 0 or more.")
    if options.robust:
        print("--robust: every plan is chosen so now; the option can be left out.", file=sys.stderr)
    job = load_job(options.job, options.set)
    refuse_overwriting(options.out, *job.files, options.profile, options.calibrate)
    if options.strategy not in (None, *STRATEGIES):
        raise BadInput(f"--strategy '{options.strategy}' is not known; {suggest(options.strategy, STRATEGIES)}")
    strategy = strategy_of(job) if options.strategy is None else options.strategy
    if is_program_job(job, strategy=options.strategy):
        return plan_program_job(options, job)
    model, cluster, profile = job.model, known_cluster(job), measured_for(options, job)
    software = hethub_software(job.spec.train.compile)
    with asked_by(job.path, job.source.place):
        result = make_plan(
            model, cluster, job.spec.train.batch, job.spec.constraints, strategy=strategy,
            top=5 if options.top is None else options.top, explain=options.explain, profile=profile, software=software,
            processes=processors(),
        )  # fmt: skip
    layout = bind(result.plan, model, cluster)
    result = replace(result, prediction=with_staging(result.prediction, layout, profile, software))
    written = []
    if options.out is not None:
        save_plan(result.plan, options.out, planned_for(job))
        written.append(options.out)
    if folder is not None:
        written += save_alone(result.homogeneous_parts, planned_for(job), folder)
    assumed = assumed_speeds(cluster, result.plan.precision, profile, result.plan.ranks)
    if options.json:
        reasons = not_trained(result.plan, model, cluster)
        print_json({**result.to_dict(), "assumed_speeds": assumed, "not_trained": reasons})
    else:
        print_plan(result, model, cluster, assumed, written)


def _add_predict(commands: Any) -> None:
    parser = command(
        commands,
        "predict",
        predict,
        "Says time and memory of a job's plan, with or without the hardware.",
        "hethub predict configs/jobs/laptop-mixed.yaml --plan plan.yaml --trace trace.json",
    )
    add_job(parser, or_plan=True)
    parser.add_argument("--plan", type=path, metavar="PLAN.yaml", help="the plan to predict (default: the job's)")
    add_profile(parser)
    add_calibrate(parser)
    parser.add_argument(
        "--bounds", action="store_true", help="plan every device type of a job alone, for %% of the device types alone"
    )
    _add_alone(parser, "; as --bounds")
    parser.add_argument("--trace", type=path, metavar="TRACE.json", help="write a timeline that Perfetto opens")
    add_json(parser)


def predict(options: argparse.Namespace) -> None:
    from hethub.predictor import predict as make_prediction
    from hethub.predictor.cost.software import hethub_software
    from hethub.predictor.predict import with_staging
    from hethub.spec.job import load_job
    from hethub.spec.layout.state import bind_file
    from hethub.spec.plan import load_plan
    from hethub.spec.program import is_program_plan

    check_writable(options.trace, folder=options.alone, reads=options.job)
    refuse_overwriting(options.trace, options.plan, options.profile, options.calibrate)
    if is_plan(options.job):
        _check_alone(options)
        if is_program_plan(options.job):
            return predict_program_alone(options)
        chosen, file = _Chosen("plan file", load_plan(options.job), None, None), options.job
        job = made_for(chosen.plan, options.job, None)
        profile = profile_beside(options.profile, job, chosen.plan.precision)
    else:
        given = load_job(options.job, options.set)
        refuse_overwriting(options.trace, *given.files, given.plan_path)
        if is_program_job(given, options.plan):
            return predict_program_job(options, given)
        profile, job = measured_for(options, given), planned_for(given)
        chosen, file = _chosen(options, given, job.cluster, profile), options.plan or given.plan_path
    layout, software = bind_file(file, chosen.plan, job.model, job.cluster), hethub_software(job.compile)
    prediction = make_prediction(
        layout, reserve=job.reserve, with_timeline=options.trace is not None, profile=profile, software=software
    )
    prediction = prediction.beside_makers_alone(chosen.makers_alone_tokens_per_second)
    prediction = with_staging(prediction, layout, profile, software)
    _give(options, chosen, job, layout, prediction, profile)


def _give(
    options: argparse.Namespace, chosen: "_Chosen", job: "PlannedFor", layout: "Layout", prediction: "Prediction",
    profile: "ProfileSpec | None",
) -> None:  # fmt: skip
    """Writes the files that were asked for, and says what is predicted."""
    from hethub.predictor.cost.profile import assumed_speeds
    from hethub.predictor.memory.ranks import shortage

    short, written = shortage(layout, prediction.memory, job.reserve), []
    if options.trace is not None:
        from hethub.report.trace import chrome_trace, write_trace

        write_trace(chrome_trace(prediction.timeline or (), job.cluster, "predicted"), options.trace)
        written.append(options.trace)
    if options.alone is not None:
        from hethub.report.explanation import save_alone

        written += save_alone(chosen.homogeneous_parts or (), job, options.alone)
    assumed = assumed_speeds(job.cluster, chosen.plan.precision, profile, chosen.plan.ranks)
    if options.json:
        alone = [each.to_dict() for each in chosen.homogeneous_parts or ()]
        print_json(
            {
                "strategy": chosen.strategy,
                **prediction.to_dict(),
                "shortage": short,
                "kinds_alone": alone,
                "assumed_speeds": assumed,
            }
        )
    else:
        from hethub.report.tables import print_predicted

        print_predicted(chosen.strategy, chosen.plan, prediction, chosen.homogeneous_parts, assumed, written, short)


def _check_alone(options: argparse.Namespace) -> None:
    """Raises BadInput for what needs a job beside a plan file that stands alone."""
    named = {
        "--set": options.set,
        "--calibrate": options.calibrate,
        "--plan": options.plan,
        "--bounds": options.bounds,
        "--alone": options.alone,
    }
    given = [name for name, value in named.items() if value]
    if given:
        raise BadInput(
            f"{options.job}: this is a plan, predicted for what its `job` describes; {given[0]} needs the job file: "
            f"`hethub predict JOB.yaml --plan {options.job}`."
        )


class _Chosen(NamedTuple):
    """The plan to predict and, where they were planned, the device types alone."""

    strategy: str
    plan: "PlanSpec"
    homogeneous_parts: "tuple[HomogeneousPart, ...] | None"  # None: not asked for
    makers_alone_tokens_per_second: float | None


def _chosen(options: argparse.Namespace, job: "Job", cluster: "ClusterSpec", profile: "ProfileSpec | None") -> _Chosen:
    """The plan file that the command or the job names, else what the job's strategy finds."""
    from hethub.predictor.cost.software import hethub_software
    from hethub.spec.job import load_plan_of

    question = (job.model, cluster, job.spec.train.batch, job.spec.constraints)
    software = hethub_software(job.spec.train.compile)
    file = options.plan or job.plan_path
    if file is None:
        from hethub.planner import plan as make_plan

        with asked_by(job.path, job.source.place):
            result = make_plan(
                *question, strategy=job.spec.plan, profile=profile, software=software, processes=processors()
            )
        bound = result.prediction.makers_alone_tokens_per_second
        return _Chosen(job.spec.plan, result.plan, result.homogeneous_parts, bound)
    plan = load_plan_of(job, file)
    if not options.bounds and options.alone is None:
        return _Chosen("plan file", plan, None, None)
    from hethub.planner import Batch
    from hethub.planner.explain.homogeneous_sum import homogeneous_parts, makers_alone_tokens_per_second
    from hethub.planner.problem.pose import pose

    batch = Batch(*job.spec.train.batch)
    with asked_by(job.path, job.source.place):
        problem = pose(job.model, cluster, batch, job.spec.constraints, profile, software)
    alone = homogeneous_parts(problem, processors())
    return _Chosen("plan file", plan, alone or (), makers_alone_tokens_per_second(alone))


def _add_diff(commands: Any) -> None:
    parser = command(
        commands,
        "diff",
        diff,
        "Says what differs between two plans, and what it costs.",
        "hethub diff one.yaml two.yaml",
    )
    parser.add_argument("first", type=path, metavar="PLAN.yaml", help="the plan to compare with")
    parser.add_argument("second", type=path, metavar="PLAN.yaml", help="the plan compared, of layers or of hap")
    text = "the job both were made for (default: what each plan file says itself)"
    parser.add_argument("--job", type=path, metavar="JOB.yaml", help=text)
    add_profile(parser)
    add_calibrate(parser)
    add_json(parser)


def diff(options: argparse.Namespace) -> None:
    from hethub.report.diff import diff as compare
    from hethub.report.diff import print_diff, side_of_layout, side_of_program
    from hethub.spec.job import load_job
    from hethub.spec.layout.state import bind_file
    from hethub.spec.plan import load_plan
    from hethub.spec.program import is_program_plan, load_program_plan

    files = (options.first, options.second)
    programs = [is_program_plan(file) for file in files]
    if any(programs):
        refuse_with_programs(options, "profile", "calibrate")
    by_job = options.job is not None and not all(programs)
    of_both = measured_for(options, load_job(options.job)) if by_job else None  # read once

    def side(path: Path, is_program: bool) -> Any:
        if is_program:
            program = load_program_plan(path)
            return side_of_program(program, program_made_for(program, path, options.job))
        plan = load_plan(path)
        job = made_for(plan, path, options.job)
        layout = bind_file(path, plan, job.model, job.cluster)
        profile = of_both if by_job else measured_beside(options, job, plan.precision)
        return side_of_layout(layout, job.compile, job.reserve, profile)

    result = compare(*map(side, files, programs))
    if options.json:
        print_json(result.to_dict())
    else:
        print_diff(result)
