"""hethub size: which cluster to buy or rent."""

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

from hethub.commands.common import add_job, add_json, command, print_json
from hethub.spec.errors import BadInput

SECONDS_PER_CLUSTER = 3.0  # of search, unless the job's constraints say otherwise


def add(commands: Any) -> None:
    parser = command(
        commands,
        "size",
        size,
        "Says which cluster trains so many tokens by a date or for a budget, or which node to add next.",
        "hethub size configs/jobs/joint-16.yaml --tokens 1e12 --deadline 30",
    )
    add_job(parser)
    parser.add_argument("--tokens", type=float, required=True, metavar="N", help="tokens to train on")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--deadline", type=float, metavar="DAYS")
    limit.add_argument("--budget", type=float, metavar="MONEY", help="in the catalogue's currency")
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="node types, availability and prices")
    parser.add_argument("--have", type=Path, metavar="CLUSTER.yaml", help="nodes owned, which cost nothing")
    parser.add_argument("--add", action="store_true", help="rank what to add next to the nodes owned")
    add_json(parser)


def size(options: argparse.Namespace) -> None:
    from hethub.predictor.capacity import Assumptions, load_catalogue, rank_additions
    from hethub.predictor.capacity import size as look
    from hethub.report.capacity import print_additions, print_options
    from hethub.spec.cluster import load_cluster
    from hethub.spec.job import load_job

    _check(options)
    job, have = load_job(options.job, options.set), None if options.have is None else load_cluster(options.have)
    packaged = Path(str(files("hethub.spec").joinpath("catalogue/nodes.yaml")))
    catalogue = load_catalogue(options.catalogue or packaged)
    judge, assumptions = _judge(job), Assumptions()
    if options.add:
        assert have is not None
        additions = rank_additions(catalogue, judge, have)
        if options.json:
            print_json({"additions": [vars(addition) for addition in additions], "assumptions": assumptions.to_dict()})
        else:
            print_additions(additions, catalogue)
        return
    found = look(
        catalogue, judge, options.tokens, have=have, deadline_days=options.deadline, budget=options.budget,
        assumptions=assumptions,
    )  # fmt: skip
    if options.json:
        print_json(
            {
                "options": [option.to_dict() for option in found],
                "currency": catalogue.currency,
                "date": catalogue.date,
                "assumptions": assumptions.to_dict(),
            }
        )
    else:
        print_options(found, catalogue, assumptions)


def _check(options: argparse.Namespace) -> None:
    for name, value in (("--tokens", options.tokens), ("--deadline", options.deadline), ("--budget", options.budget)):
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"{name} is {value:g}; give a positive number.")
    if options.add and options.have is None:
        raise BadInput("--add ranks what to add to nodes owned; name them with --have CLUSTER.yaml.")
    if options.budget is not None and options.catalogue is None:
        raise BadInput(
            "--budget needs prices, and hethub invents none; give --catalogue FILE with price_per_hour, currency and date."
        )


def _judge(job: Any) -> Any:
    """What a cluster's best plan delivers for the job's model and batch; None where none fits."""
    from hethub.planner import plan

    constraints = job.spec.constraints
    if constraints.time_limit_seconds is None:
        constraints = constraints.replace(time_limit_seconds=SECONDS_PER_CLUSTER)

    def judge(cluster: Any) -> Any:
        try:
            return plan(job.model, cluster, job.spec.train.batch, constraints, with_bounds=False).prediction
        except BadInput:  # no plan fits: one of the answers, not a fault
            return None

    return judge
