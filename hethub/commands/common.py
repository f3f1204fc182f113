"""What several commands share: their parsers' form, and the checks that come before any work."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hethub.spec.errors import BadInput

if TYPE_CHECKING:
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import Job
    from hethub.spec.model import ModelSpec
    from hethub.spec.plan import PlanSpec


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str, example: str
) -> argparse.ArgumentParser:
    """A command's parser, with its help, an example and --debug."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=f"example: {example}", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.set_defaults(command=run)
    return parser


def add_job(parser: argparse.ArgumentParser) -> None:
    """The job file and what overrides its keys."""
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key.path=value", help="override a key of the job"
    )


def add_profile(parser: argparse.ArgumentParser) -> None:
    text = "measurements made by `hethub profile`, which count instead of estimates (default: the job's)"
    parser.add_argument("--profile", type=Path, metavar="PROFILE.json", help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def print_json(data: Any) -> None:
    print(json.dumps(data, allow_nan=False))


def need_torch(name: str) -> None:
    """Raises BadInput where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise BadInput(
            f"hethub {name} needs torch, which is not installed; install it with `pip install 'hethub[train]'`."
        )


def check_writable(*paths: Path | None) -> None:
    """Raises BadInput where a file to write has no folder: before the work, not after it."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise BadInput(f"{path}: there is no folder {path.parent} to write to; create it or name another file.")


def known_cluster(job: "Job") -> "ClusterSpec":
    """The job's cluster. Raises BadInput where only the ranks of a run could tell it."""
    if job.cluster is None:
        raise BadInput(
            f"{job.path}: cluster is `detect`, which only the ranks of a run can answer; name a cluster file to plan or predict."
        )
    return job.cluster


def model_and_cluster(plan: "PlanSpec", path: Path, job_path: Path | None) -> "tuple[ModelSpec, ClusterSpec]":
    """The model and cluster that a plan file names.

    From the job where one is given; else from model.yaml and cluster.yaml beside the plan (a run folder has them); else
    from the files of those names in a configs folder above the plan or the current folder. Raises BadInput.
    """
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import load_job
    from hethub.spec.lookup import find_named
    from hethub.spec.model import ModelSpec

    if job_path is not None:
        job = load_job(job_path)
        return job.model, known_cluster(job)
    return find_named(ModelSpec, "model", plan.model, path), find_named(ClusterSpec, "cluster", plan.cluster, path)
