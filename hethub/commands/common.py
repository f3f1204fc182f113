"""What several commands share: their parsers' form, and the checks that come before any work."""

import argparse
import errno
import gc
import importlib
import importlib.util
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hethub.spec.errors import BadInput

if TYPE_CHECKING:
    from hethub.predictor.cost.profile import ProfileSpec
    from hethub.spec.accelerator import Precision
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import Job
    from hethub.spec.plan import PlannedFor, PlanSpec
    from hethub.spec.program import ProgramFor, ProgramPlanSpec


_EXAMPLE = "example: "


class _Help(argparse.HelpFormatter):
    """Help as wide as the terminal; an example that is longer goes on behind a backslash, so that it can be pasted."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if not text.startswith(_EXAMPLE):
            return super()._fill_text(text, width, indent)
        whole = text.replace("hethub ", "hethub\0")  # a command's two words stay on one line
        lines = textwrap.wrap(
            whole, width - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        return " \\\n".join(lines).replace("\0", " ")


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], text: str, example: str
) -> argparse.ArgumentParser:
    """A command's parser, with its help, an example and --debug."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=f"{_EXAMPLE}{example}", formatter_class=_Help
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.set_defaults(command=run)
    return parser


def path(text: str) -> Path:
    """A path of the command line. An empty one, as of a variable that is not set, is not the folder one stands in."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give one (. is the folder you are in)")
    return Path(text)


def another_speaks() -> bool:
    """Whether another rank says what every rank of the launcher finds alike, a wrong command line above all."""
    from hethub.runtime.launch.launcher_environment import is_first_rank

    return not is_first_rank()


def add_job(parser: argparse.ArgumentParser, *, or_plan: bool = False) -> None:
    """The job file and what overrides its keys."""
    metavar, text = ("JOB.yaml|PLAN.yaml", "a job, or a plan file alone") if or_plan else ("JOB.yaml", "the job file")
    parser.add_argument("job", type=path, metavar=metavar, help=text)
    _add_set(parser)


def add_job_if_any(parser: argparse.ArgumentParser, text: str) -> None:
    """A job file that may be left out, and what overrides its keys."""
    parser.add_argument("job", type=path, nargs="?", metavar="JOB.yaml", help=text)
    _add_set(parser)


def _add_set(parser: argparse.ArgumentParser) -> None:
    text = "override a key of the job; can be given again and again"
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value", help=text)


def add_profile(parser: argparse.ArgumentParser) -> None:
    text = "measurements made by `hethub profile`, which count instead of estimates (default: the job's)"
    parser.add_argument("--profile", type=path, metavar="PROFILE.json", help=text)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    text = "correct estimates by measured steps: a table as `hethub validate` reads it, or a run's calibration.json"
    parser.add_argument("--calibrate", type=path, metavar="FILE", help=text)


def measured_for(options: argparse.Namespace, job: "Job") -> "ProfileSpec | None":
    """What counts instead of estimates for a job: --calibrate's corrections, else --profile's or the job's own
    measurements. Raises BadInput where both are given."""
    from hethub.predictor.cost.profile import profile_for

    if options.calibrate is None:
        return profile_for(job, options.profile)
    refuse_profile_beside_calibrate(options.profile, job)
    from hethub.predictor.calibration.calibrate import Calibration, is_of_run
    from hethub.predictor.cost.software import hethub_software

    train, cluster = job.spec.train, known_cluster(job)
    if is_of_run(options.calibrate):
        return profile_for(job, options.calibrate)
    return Calibration(options.calibrate).profile(job.model, cluster, train.batch, hethub_software(train.compile))


def measured_beside(
    options: argparse.Namespace, made_for: "PlannedFor", precision: "Precision"
) -> "ProfileSpec | None":
    """Do what `measured_for` does for a plan file, whose job `--job` may name. Raises BadInput if the profile given is not for
    it."""
    from hethub.spec.job import load_job

    if options.job is not None:
        return measured_for(options, load_job(options.job))
    if options.calibrate is not None:
        raise BadInput(f"--calibrate {options.calibrate}: it needs the plans' job file; name it with --job JOB.yaml.")
    return profile_beside(options.profile, made_for, precision)


def profile_beside(path: Path | None, made_for: "PlannedFor", precision: "Precision") -> "ProfileSpec | None":
    """The profile given beside a plan file, if any. Raises BadInput where it is not for the plan."""
    from hethub.predictor.cost.profile import profile_of

    return (
        None if path is None else profile_of(path, made_for.model, made_for.cluster.nodes, precision, made_for.compile)
    )


def refuse_profile_beside_calibrate(profile: Path | None, job: "Job") -> None:
    """Raises BadInput where a profile is given, on the command line or by the job."""
    if profile is not None or job.spec.profile is not None:
        given = "--profile" if profile is not None else f"{job.path}: profile"
        raise BadInput(f"--calibrate and {given} both say how fast accelerators are; leave one of them out.")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def print_json(data: Any) -> None:
    print(json.dumps(data, allow_nan=False))


def need_torch(name: str) -> None:
    """Imports torch, quickly, and before that notes who has started this process. Raises BadInput where torch is not
    installed."""
    from hethub.runtime.launch.launcher_environment import launcher_of

    launcher_of(os.getpid())
    if importlib.util.find_spec("torch") is None:
        raise BadInput(
            f"hethub {name} needs torch, which is not installed; install it with `pip install 'hethub[train]'`."
        )
    if "torch" in sys.modules:
        return
    # A rank that ends while another talks to its store is told of in hethub's words; torch's own are pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # What it makes stays: a collector that looks at all of it again and again takes a quarter of its time, and of what
    # is imported next.
    gc.disable()
    try:
        importlib.import_module("torch")
        gc.freeze()
    finally:
        gc.enable()


def check_writable(*files: Path | None, folder: Path | None = None, reads: Path | None = None) -> None:
    """Raises BadInput where a file or folder to write has no folder to lie in or may not be written, a file is a folder or
    a folder a file, or a file is the one that the command `reads`: before the work, not after it."""
    given = [path for path in files if path is not None]
    for path in given if folder is None else [*given, folder]:
        check_link(path)
        if not path.parent.is_dir():
            raise BadInput(f"{path}: there is no folder {path.parent} to write to; create it or name another file.")
        if not os.access(path if path.exists() else path.parent, os.W_OK, effective_ids=True):
            raise BadInput(f"{path}: this user may not write there; allow it or name another.")
    for path in given:
        if path.is_dir():
            raise BadInput(f"{path}: this is a folder, and a file is to be written; name a file in it.")
        refuse_overwriting(path, reads)
    if folder is not None:
        if folder in given:
            raise BadInput(f"{folder}: a file and a folder of this name are to be written; name another for one.")
        check_folder(folder)


def check_link(path: Path) -> None:
    """Raises BadInput where a file or folder to write is a link that leads to itself."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"{path}: this link leads in a circle; remove it or name another.") from None


def refuse_overwriting(file: Path | None, *reads: Path | None) -> None:
    """Raises BadInput where a file to write is one of those that the command reads."""
    for read in reads:
        if file is not None and read is not None and file.exists() and read.exists() and file.samefile(read):
            raise BadInput(f"{file}: this is the file to read, and would be overwritten; name another file.")


def check_folder(path: Path) -> None:
    """Raises BadInput where a folder to write is a file."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path}: this is a file, and a folder is to be written; name another.")


def known_cluster(job: "Job") -> "ClusterSpec":
    """The job's cluster. Raises BadInput where only the ranks of a run could tell it."""
    if job.cluster is None:
        raise BadInput(
            f"{job.path}: cluster is `detect`, which only the ranks of a run can answer (hethub train, alone or under "
            "mpirun, takes it); name a cluster file there (with --set cluster=FILE, where the command takes --set)."
        )
    return job.cluster


def is_plan(path: Path) -> bool:
    """Whether the file is a plan, not a job. Raises BadInput where it is neither, as far as can be read."""
    from hethub.spec.base import describe
    from hethub.spec.documents import read_yaml

    data, _ = read_yaml(path, "job or plan file")
    if not isinstance(data, dict):
        raise BadInput(f"{path}: a job or plan file is a mapping of keys to values; got {describe(data)}.")
    return "stages" in data or "program" in data


def made_for(plan: "PlanSpec", path: Path, job_path: Path | None) -> "PlannedFor":
    """What a plan file is for.

    From the job where one is given; else as the plan itself describes it; else, for a plan without `job`, from
    model.yaml and cluster.yaml beside it, or from the files of those names in a configs folder above the plan or the
    current folder. Raises BadInput.
    """
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import load_job, load_plan_of
    from hethub.spec.lookup import find_named
    from hethub.spec.model import ModelSpec
    from hethub.spec.plan import PlannedFor

    if job_path is not None:
        job = load_job(job_path)
        load_plan_of(job, path)  # refused where it is for another batch
        return planned_for(job)
    if plan.job is not None:
        return plan.job
    return PlannedFor(
        model=find_named(ModelSpec, "model", plan.model, path),
        cluster=find_named(ClusterSpec, "cluster", plan.cluster, path),
    )


def program_made_for(plan: "ProgramPlanSpec", path: Path, job_path: Path | None) -> "ProgramFor":
    """Do what `made_for` does for a program. Raises BadInput."""
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import load_job
    from hethub.spec.lookup import find_named
    from hethub.spec.program import ProgramFor

    if job_path is not None:
        return program_for(plan, path, load_job(job_path))
    return plan.job or ProgramFor(cluster=find_named(ClusterSpec, "cluster", plan.cluster, path))


def program_for(plan: "ProgramPlanSpec", path: Path, job: "Job") -> "ProgramFor":
    """What a job given beside the plan file of a program says. Raises BadInput where the program is not for it."""
    from hethub.spec.program import ProgramFor, is_for_cluster

    cluster = known_cluster(job)
    if plan.program.ranks != cluster.size:
        raise BadInput(f"{path}: the program is for {plan.program.ranks} ranks, the cluster has {cluster.size}.")
    train, model = job.spec.train, job.factory or job.model.name
    for key, now in (
        ("model", model),
        *((key, getattr(train, key)) for key in ("global_batch", "seq_len", "precision")),
    ):
        before = getattr(plan, key)
        if before != now:
            raise BadInput(f"{path}: the program is for {key} {before}, {job.path} has {now}; plan again.")
    if not is_for_cluster(plan, cluster):
        raise BadInput(
            f"{path}: its times are those of cluster '{plan.cluster}' as it was when the program was planned, and {job.path} has another;"
            " plan again, or give the plan without the job."
        )
    items = plan.job.items if plan.job is not None else "samples" if job.described is None else "tokens"
    return ProgramFor(cluster=cluster, reserve=job.spec.constraints.reserve, items=items)


def planned_for(job: "Job") -> "PlannedFor":
    """What plans of a job are made for. Raises BadInput where only the ranks of a run could tell."""
    return job.planned_for(job.model, known_cluster(job))


def strategy_of(job: "Job") -> str:
    """The strategy that a job's plans are found with: `auto`, and a word on stderr, where it names a plan file. Raises
    BadInput where that is neither."""
    if job.plan_path is None:
        return job.spec.plan
    from hethub.spec.job import check_plan_path

    check_plan_path(job)
    print(
        f"{job.plan_path}, the job's plan, is left aside and another one looked for; `hethub predict {job.path}` predicts it.",
        file=sys.stderr,
    )
    return "auto"


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def a_number(option: str, text: str, example: str) -> float:
    """A positive figure as people write it: 1e12, 300B, 1.5T. Raises BadInput with an example."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1.0)
    digits = text[:-1] if text[-1:].upper() in _SUFFIXES else text
    try:  # a comma that parts no thousands stays, and is no number: 1,5T is 1.5T or 15T
        number = float(_THOUSANDS.sub("", digits)) * factor
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise BadInput(f"{option} {text}: give a positive number, for example {example}.")
    return number


_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?:[,.]|$))")
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
