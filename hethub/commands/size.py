"""hethub size: which cluster to buy or rent."""

import argparse
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hethub.commands.common import (
    a_number,
    add_calibrate,
    add_job,
    add_json,
    check_writable,
    command,
    count,
    path,
    print_json,
    refuse_overwriting,
    refuse_profile_beside_calibrate,
    strategy_of,
)
from hethub.spec.errors import BadInput, asked_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hethub.capacity.catalogue import CatalogueSpec
    from hethub.capacity.sizing import Evaluator
    from hethub.predictor import Prediction
    from hethub.spec.cluster import ClusterSpec, NodeSpec
    from hethub.spec.job import Job

SECONDS_PER_CLUSTER = 10.0  # of search, unless the job's constraints say otherwise


def add(commands: Any) -> None:
    parser = command(
        commands,
        "size",
        size,
        "Says which cluster trains so many tokens by a date or for a budget, or which node to add next.",
        "hethub size configs/jobs/joint-16.yaml --tokens 1e12 --deadline 30",
    )
    add_job(parser)
    parser.add_argument("--tokens", metavar="N", help="tokens to train on: 1e12, 300B, 1T (needed without --add)")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--deadline", metavar="DAYS", help="days from the first step to the last")
    limit.add_argument("--budget", metavar="MONEY", help="in the catalogue's currency")
    parser.add_argument(
        "--catalogue",
        type=path,
        metavar="FILE",
        help="node types, how many can be had, prices (default: 16 nodes each of five types, without prices)",
    )
    parser.add_argument("--have", type=path, metavar="CLUSTER.yaml", help="nodes owned, which cost nothing")
    add_calibrate(parser)
    parser.add_argument("--add", action="store_true", help="rank what to add next to the nodes owned")
    parser.add_argument("--nodes", type=count, metavar="N", help="with --add: so many nodes at once (default 1)")
    parser.add_argument(
        "--out", type=path, metavar="SIZE.html", help="write a page with the table and a plot of the frontier"
    )
    add_json(parser)


def size(options: argparse.Namespace) -> None:
    from hethub.capacity.catalogue import load_catalogue
    from hethub.capacity.options import Question
    from hethub.capacity.sizing import size as look
    from hethub.report.capacity import assumed_speeds_of, print_sizing, write_sizing
    from hethub.runtime.progress import counted
    from hethub.spec.cluster import load_cluster
    from hethub.spec.job import load_job

    if options.tokens is None and not options.add:
        raise BadInput("how many tokens to train on is not said; give --tokens, for example 1e12, 300B or 1.5T.")
    tokens = None if options.tokens is None else a_number("--tokens", options.tokens, "1e12, 300B or 1.5T (K, M, B, T)")
    deadline = None if options.deadline is None else a_number("--deadline", options.deadline, "60")
    budget = None if options.budget is None else a_number("--budget", options.budget, "250000 or 250K")
    if options.nodes is not None and not options.add:
        raise BadInput("--nodes says how many nodes --add adds at once; give --add too.")
    if options.add and options.have is None:
        raise BadInput("--add ranks what to add to nodes owned; name them with --have CLUSTER.yaml.")
    ignored = [name for name in ("deadline", "budget", "out") if options.add and getattr(options, name) is not None]
    if ignored:
        raise BadInput(f"--add ranks what more nodes of each type bring, and takes no --{ignored[0]}; leave one out.")
    check_writable(options.out, reads=options.job)
    job, have = load_job(options.job, options.set), None if options.have is None else load_cluster(options.have)
    refuse_overwriting(options.out, *job.files, options.catalogue, options.have, options.calibrate)
    packaged = Path(str(files("hethub.spec").joinpath("catalogue/nodes.yaml")))
    catalogue = load_catalogue(options.catalogue or packaged)
    evaluate, measured = _evaluator(job, options.calibrate, [*catalogue.nodes, *(have.nodes if have else ())])
    if budget is not None and all(node.price_per_hour is None for node in catalogue.nodes):
        raise BadInput(
            f"--budget needs prices, and {options.catalogue or 'hethub'} has none; give --catalogue FILE with price_per_hour, "
            "currency and date."
        )
    if options.add:
        return _add(options, catalogue, evaluate, have, measured)
    assert tokens is not None
    question = Question(catalogue=catalogue, tokens=tokens, have=have, deadline_days=deadline, budget=budget)
    with (
        asked_by(job.path, job.source.place),
        nullcontext() if options.json else counted("sizing", only_on_terminal=True) as progress,
    ):
        found = look(question, evaluate, progress=progress)
    if options.out is not None:
        write_sizing(found, question, options.out, measured)
    if options.json:
        assumed = assumed_speeds_of(found.node_types, catalogue, have, measured)
        print_json({**found.to_dict(), **_terms(catalogue), "assumed_speeds": assumed})
    else:
        print_sizing(found, question, options.out, measured)


def _add(
    options: argparse.Namespace, catalogue: "CatalogueSpec", evaluate: "Evaluator", have: "ClusterSpec | None",
    measured: frozenset[str],
) -> None:  # fmt: skip
    from hethub.capacity.additions import rank_additions
    from hethub.report.capacity import assumed_speeds_of, print_additions
    from hethub.runtime.progress import counted

    assert have is not None
    with nullcontext() if options.json else counted("sizing", only_on_terminal=True) as progress:
        additions, left_out = rank_additions(catalogue, evaluate, have, options.nodes or 1, progress)
    assumed = assumed_speeds_of({addition.node for addition in additions}, catalogue, have, measured)
    if options.json:
        lists = {"additions": list(map(vars, additions)), "left_out": list(map(vars, left_out))}
        print_json({**lists, **_terms(catalogue), "assumed_speeds": assumed})
    else:
        print_additions(additions, left_out, catalogue, assumed)


def _terms(catalogue: "CatalogueSpec") -> dict[str, Any]:
    """What the figures rest on, for JSON."""
    date = None if catalogue.date is None else str(catalogue.date)
    return {"currency": catalogue.currency, "date": date, "assumptions": catalogue.assumptions.model_dump()}


def _evaluator(job: "Job", calibrate: Path | None, nodes: "Sequence[NodeSpec]") -> "tuple[Evaluator, frozenset[str]]":
    """What a cluster's best plan delivers for the job's model and batch, by what it says of speeds; and the accelerators
    that were measured. Raises BadInput where that is not of the job's model, or not of the nodes that there may be."""
    from hethub.planner import plan
    from hethub.predictor.calibration.calibrate import Calibration, is_of_run
    from hethub.predictor.cost.profile import profile_for, profile_of
    from hethub.predictor.cost.software import hethub_software

    strategy = strategy_of(job)
    if strategy == "hap":
        raise BadInput(
            "hethub size plans layers, and strategy 'hap' plans operators; leave it out with --set plan=auto"
            f"{'' if job.described else ', and name a model file, since Python is cut operator by operator alone'}."
        )
    table, measured, train = None, profile_for(job, None), job.spec.train
    if measured is not None:
        with asked_by(job.source.at(("profile",))):
            measured.check_compiled(nodes, train.precision, train.compile)
    if calibrate is not None:
        refuse_profile_beside_calibrate(None, job)
        if is_of_run(calibrate):
            measured = profile_of(calibrate, job.model, nodes, train.precision, train.compile)
        else:
            table = Calibration(calibrate)
    model, batch, constraints = job.model, job.spec.train.batch, job.spec.constraints
    software = hethub_software(job.spec.train.compile)
    if constraints.time_limit_seconds is None:
        constraints = constraints.replace(time_limit_seconds=SECONDS_PER_CLUSTER)

    def evaluate(cluster: "ClusterSpec") -> "Prediction":
        profile = measured if table is None else table.profile(model, cluster, batch, software)
        found = plan(
            model, cluster, batch, constraints, strategy=strategy, with_bounds=False, profile=profile, software=software
        )  # fmt: skip
        return found.prediction

    devices = () if measured is None else measured.devices
    return evaluate, frozenset(device.accelerator for device in devices if device.precision == train.precision)
