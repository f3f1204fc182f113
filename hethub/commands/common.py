"""What several commands share: their parsers' form, and the checks that come before any work."""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hethub.spec.errors import BadInput

if TYPE_CHECKING:
    from hethub.spec.base import Spec
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import Job
    from hethub.spec.model import ModelSpec
    from hethub.spec.plan import PlanSpec

NamedT = TypeVar("NamedT", bound="Spec")


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
    from hethub.spec.model import ModelSpec

    if job_path is not None:
        job = load_job(job_path)
        return job.model, known_cluster(job)
    return _named(ModelSpec, "model", plan.model, path), _named(ClusterSpec, "cluster", plan.cluster, path)


def _named(cls: type[NamedT], kind: str, name: str, plan_path: Path) -> NamedT:
    from hethub.spec.base import build, read_yaml

    for file in _candidates(kind, plan_path.resolve()):
        data, source = read_yaml(file, f"{kind} file")
        if isinstance(data, dict) and data.get("name") == name:
            return build(cls, data, source, f"{kind} file")
    raise BadInput(
        f"{plan_path}: the plan is for {kind} '{name}', which is described neither beside it ({kind}.yaml) nor in a configs/{kind}s "
        "folder above it or here; add --job JOB.yaml, the job it was made for."
    )


def _candidates(kind: str, plan_path: Path) -> Iterator[Path]:
    if (beside := plan_path.parent / f"{kind}.yaml").exists():
        yield beside
    for folder in dict.fromkeys((*plan_path.parents, Path.cwd(), *Path.cwd().parents)):
        yield from sorted((folder / "configs" / f"{kind}s").glob("*.yaml"))
