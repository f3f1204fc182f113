"""hethub plan, predict and diff: what can be known without running anything."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hethub.commands.common import (
    add_job,
    add_json,
    add_profile,
    check_writable,
    command,
    known_cluster,
    model_and_cluster,
    print_json,
    processors,
)
from hethub.spec.errors import BadInput

if TYPE_CHECKING:
    from hethub.planner import HomogeneousPart
    from hethub.predictor.cost.profile import ProfileSpec
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import Job
    from hethub.spec.plan import PlanSpec


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
        help="auto, exhaustive (small spaces), or one system's planner (default: the job's)",
    )
    parser.add_argument("--out", type=Path, metavar="PLAN.yaml", help="write the plan here")
    add_profile(parser)
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many runners-up to show (default 5)")
    parser.add_argument("--explain", action="store_true", help="what every system would have chosen, and what binds")
    parser.add_argument(
        "--robust",
        action="store_true",
        help="loses least where links are 20 %% slower or compute 10 %% off",
    )
    _add_alone(parser, " (default: beside --out)")
    add_json(parser)


def _add_alone(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"write every device type's best plan alone, the parts of the upper bound, into this folder{default}"
    parser.add_argument("--alone", type=Path, metavar="DIR", help=text)


def plan(options: argparse.Namespace) -> None:
    from hethub.planner import plan as make_plan
    from hethub.predictor.cost.profile import profile_for
    from hethub.predictor.predict import with_staging
    from hethub.report.alone import save_alone
    from hethub.report.tables import print_plan
    from hethub.spec.job import load_job
    from hethub.spec.layout.bind import bind
    from hethub.spec.plan import save_plan

    check_writable(options.out, options.alone)
    if options.top < 0:
        raise BadInput(f"--top {options.top}: give the number of runners-up to show, 0 or more.")
    job = load_job(options.job, options.set)
    cluster = known_cluster(job)
    strategy = options.strategy or ("auto" if job.plan_path else job.spec.plan)
    result = make_plan(
        job.model, cluster, job.spec.train.batch, job.spec.constraints, strategy=strategy,
        top=options.top, explain=options.explain, robust=options.robust, profile=profile_for(job, options.profile),
        processes=processors(),
    )  # fmt: skip
    layout = bind(result.plan, job.model, cluster)
    result = replace(result, prediction=with_staging(result.prediction, layout, profile_for(job, options.profile)))
    written = []
    if options.out is not None:
        save_plan(result.plan, options.out)
        written.append(options.out)
    folder = options.alone or (options.out and options.out.with_suffix(".alone"))
    if folder is not None:
        written += save_alone(result.homogeneous_parts, job.model, folder)
    if options.json:
        print_json(result.to_dict())
    else:
        print_plan(result, job.model, cluster, written)


def _add_predict(commands: Any) -> None:
    parser = command(
        commands,
        "predict",
        predict,
        "Says time and memory of a job's plan, with or without the hardware.",
        "hethub predict configs/jobs/laptop-mixed.yaml --plan plan.yaml --trace trace.json",
    )
    add_job(parser)
    parser.add_argument("--plan", type=Path, metavar="PLAN.yaml", help="the plan to predict (default: the job's)")
    add_profile(parser)
    parser.add_argument("--bounds", action="store_true", help="plan every device type alone, for %% of the upper bound")
    _add_alone(parser, "; as --bounds")
    parser.add_argument("--trace", type=Path, metavar="TRACE.json", help="write a timeline that Perfetto opens")
    add_json(parser)


def predict(options: argparse.Namespace) -> None:
    from hethub.predictor import predict as make_prediction
    from hethub.predictor.cost.profile import profile_for
    from hethub.predictor.predict import with_staging
    from hethub.spec.job import load_job
    from hethub.spec.layout.bind import bind

    check_writable(options.trace, options.alone)
    job = load_job(options.job, options.set)
    cluster, profile = known_cluster(job), profile_for(job, options.profile)
    chosen = _chosen(options, job, cluster, profile)
    layout = bind(chosen.plan, job.model, cluster)
    prediction = make_prediction(
        layout,
        reserve=job.spec.constraints.reserve,
        upper_bound_tokens_per_second=chosen.upper_bound_tokens_per_second,
        with_timeline=options.trace is not None,
        profile=profile,
    )
    prediction = with_staging(prediction, layout, profile)
    written = []
    if options.trace is not None:
        from hethub.report.trace import chrome_trace, write_trace

        names = [place.accelerator.name for place in cluster.places]
        write_trace(chrome_trace(prediction.timeline or (), names, "predicted"), options.trace)
        written.append(options.trace)
    if options.alone is not None:
        from hethub.report.alone import save_alone

        written += save_alone(chosen.homogeneous_parts or (), job.model, options.alone)
    if options.json:
        alone = [each.to_dict() for each in chosen.homogeneous_parts or ()]
        print_json({"strategy": chosen.strategy, **prediction.to_dict(), "kinds_alone": alone})
    else:
        from hethub.report.tables import print_predicted

        print_predicted(chosen.strategy, chosen.plan, prediction, chosen.homogeneous_parts, written)


class _Chosen(NamedTuple):
    """The plan to predict and, where they were planned, the device types alone."""

    strategy: str
    plan: "PlanSpec"
    homogeneous_parts: "tuple[HomogeneousPart, ...] | None"  # None: not asked for
    upper_bound_tokens_per_second: float | None


def _chosen(options: argparse.Namespace, job: "Job", cluster: "ClusterSpec", profile: "ProfileSpec | None") -> _Chosen:
    """The plan file that the command or the job names, else what the job's strategy finds."""
    from hethub.spec.job import load_plan_of

    question = (job.model, cluster, job.spec.train.batch, job.spec.constraints)
    file = options.plan or job.plan_path
    if file is None:
        from hethub.planner import plan as make_plan

        result = make_plan(*question, strategy=job.spec.plan, profile=profile, processes=processors())
        bound = result.prediction.upper_bound_tokens_per_second
        return _Chosen(job.spec.plan, result.plan, result.homogeneous_parts, bound)
    plan = load_plan_of(job, file)
    if not options.bounds and options.alone is None:
        return _Chosen("plan file", plan, None, None)
    from hethub.planner.explain.homogeneous_sum import homogeneous_parts, upper_bound_tokens_per_second

    alone = homogeneous_parts(*question, profile, processors())
    return _Chosen("plan file", plan, alone or (), upper_bound_tokens_per_second(alone))


def _add_diff(commands: Any) -> None:
    parser = command(
        commands,
        "diff",
        diff,
        "Says what differs between two plans, and what it costs.",
        "hethub diff one.yaml two.yaml",
    )
    parser.add_argument("first", type=Path, metavar="PLAN.yaml")
    parser.add_argument("second", type=Path, metavar="PLAN.yaml")
    parser.add_argument("--job", type=Path, metavar="JOB.yaml", help="the job the plans were made for")
    add_json(parser)


def diff(options: argparse.Namespace) -> None:
    from hethub.planner import diff as compare
    from hethub.report.tables import print_diff
    from hethub.spec.plan import load_plan

    first, second = load_plan(options.first), load_plan(options.second)
    result = compare(first, second, *model_and_cluster(first, options.first, options.job))
    if options.json:
        print_json(result.to_dict())
    else:
        print_diff(result)
