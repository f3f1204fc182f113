"""hethub plan, predict and diff: what can be known without running anything."""

import argparse
from pathlib import Path
from typing import Any

from hethub.commands.common import (
    add_job,
    add_json,
    add_profile,
    check_writable,
    command,
    known_cluster,
    model_and_cluster,
    print_json,
)


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
    parser.add_argument("--strategy", metavar="NAME", help="auto, or one system's own planner (default: the job's)")
    parser.add_argument("--out", type=Path, metavar="PLAN.yaml", help="write the plan here")
    add_profile(parser)
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many runners-up to show (default 5)")
    parser.add_argument("--explain", action="store_true", help="what every system would have chosen, and what binds")
    parser.add_argument("--robust", action="store_true", help="best worst case over links -20 %% and compute -10 %%")
    add_json(parser)


def plan(options: argparse.Namespace) -> None:
    from hethub.planner import plan as make_plan
    from hethub.predictor.profile import profile_for
    from hethub.report.tables import print_plan
    from hethub.spec.job import load_job
    from hethub.spec.plan import save_plan

    check_writable(options.out)
    job = load_job(options.job, options.set)
    cluster = known_cluster(job)
    strategy = options.strategy or ("auto" if job.plan_path else job.spec.plan)
    result = make_plan(
        job.model, cluster, job.spec.train.batch, job.spec.constraints, strategy=strategy,
        top=options.top, explain=options.explain, robust=options.robust, profile=profile_for(job, options.profile),
    )  # fmt: skip
    if options.out is not None:
        save_plan(result.plan, options.out)
    if options.json:
        print_json(result.to_dict())
    else:
        print_plan(result, job.model, cluster, options.out)


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
    parser.add_argument("--bounds", action="store_true", help="plan every kind alone, for %% of the upper bound")
    parser.add_argument("--trace", type=Path, metavar="TRACE.json", help="write a timeline that Perfetto opens")
    add_json(parser)


def predict(options: argparse.Namespace) -> None:
    from hethub.predictor import predict as make_prediction
    from hethub.predictor.profile import profile_for
    from hethub.spec.job import load_job, load_plan_of
    from hethub.spec.layout import bind

    check_writable(options.trace)
    job = load_job(options.job, options.set)
    cluster, plan_file, bound = known_cluster(job), options.plan or job.plan_path, None
    profile = profile_for(job, options.profile)
    if plan_file is not None:
        strategy, chosen = "plan file", load_plan_of(job, plan_file)
        if options.bounds:
            from hethub.planner.bounds import upper_bound

            bound = upper_bound(job.model, cluster, job.spec.train.batch, job.spec.constraints, profile)
    else:
        from hethub.planner import plan as make_plan

        strategy = job.spec.plan
        result = make_plan(
            job.model, cluster, job.spec.train.batch, job.spec.constraints, strategy=strategy, profile=profile
        )
        chosen, bound = result.plan, result.prediction.upper_bound_tokens_per_second
    prediction = make_prediction(
        bind(chosen, job.model, cluster),
        reserve=job.spec.constraints.reserve,
        upper_bound_tokens_per_second=bound,
        with_timeline=options.trace is not None,
        profile=profile,
    )
    if options.trace is not None:
        from hethub.report.trace import chrome_trace, write_trace

        names = [place.accelerator.name for place in cluster.places]
        write_trace(chrome_trace(prediction.timeline or (), names, "predicted"), options.trace)
    if options.json:
        print_json({"strategy": strategy, **prediction.to_dict()})
    else:
        from hethub.report.tables import print_prediction

        print_prediction(strategy, prediction)


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
