"""The commands: thin, each a few calls into the room that does the work."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hethub
from hethub.spec.errors import BadInput, RunFailed


def main() -> int:
    """The program: `run`, and where that failed an end that no thread can hold up.

    After a failure the communicator's threads may be stuck in native calls; finalising the interpreter under them
    would wait for them, or abort.
    """
    try:
        code = run()
    except Exception:  # noqa: BLE001  nobody is left to handle it, so it is shown as Python itself would
        sys.excepthook(*sys.exc_info())
        code = 1
    if code == 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="hethub: %(message)s")
    try:
        options.command(options)
    except BadInput as error:
        return _ended(error, 2, quiet=error.quiet, debug=options.debug)
    except RunFailed as error:
        return _ended(error, 1, quiet=error.quiet, debug=options.debug)
    except KeyboardInterrupt:
        print("hethub: interrupted", file=sys.stderr)
        return 1
    return 0


def _ended(error: Exception, code: int, *, quiet: bool, debug: bool) -> int:
    """One paragraph on stderr; the traceback only with --debug."""
    if debug and not quiet:
        import traceback

        traceback.print_exception(error)
    elif not quiet:
        print(f"hethub: {error}", file=sys.stderr)
    return code


def _print_json(data: Any) -> None:
    print(json.dumps(data, allow_nan=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hethub", description=hethub.__doc__)
    parser.add_argument("--version", action="version", version=hethub.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_train, _add_plan, _add_predict, _add_launch, _add_doctor, _add_report, _add_tokenise, _add_export):
        add(commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str, example: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=f"example: {example}", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.set_defaults(command=run)
    return parser


# -- train -------------------------------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    parser = _command(
        commands,
        "train",
        _train,
        "Trains the job on the ranks that the launcher started.",
        "mpirun -n 4 hethub train configs/jobs/laptop-mixed.yaml",
    )
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--plan", type=Path, metavar="PLAN.yaml", help="run this plan instead of the job's")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run folder (default: runs/NAME-TIME)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this folder")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key.path=value", help="override a key of the job"
    )


def _train(options: argparse.Namespace) -> None:
    _need_torch("train")
    from hethub.report.run import finish_run
    from hethub.runtime.train import TrainRequest, train

    if options.resume is not None and options.run_dir is not None:
        raise BadInput(
            "--resume and --run-dir name two run folders; a resumed run goes on in its own. Give one of them."
        )
    request = TrainRequest(
        job_path=options.job,
        plan_path=options.plan,
        run_dir=options.run_dir,
        resume=options.resume,
        overrides=options.set,
    )
    summary = train(request)
    if summary is not None:
        finish_run(summary)


def _need_torch(command: str) -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise BadInput(
            f"hethub {command} needs torch, which is not installed; install it with `pip install 'hethub[train]'`."
        )


# -- plan and predict --------------------------------------------------------------------------------------------------


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands,
        "plan",
        _plan,
        "Finds the plan for a job on its cluster.",
        "hethub plan configs/jobs/laptop-mixed.yaml --out plan.yaml",
    )
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--strategy", metavar="NAME", help="auto, or one system's own planner (default: the job's)")
    parser.add_argument("--out", type=Path, metavar="PLAN.yaml", help="write the plan here")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key.path=value", help="override a key of the job"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _plan(options: argparse.Namespace) -> None:
    from hethub.planner import plan
    from hethub.report.tables import print_plan
    from hethub.spec.job import load_job
    from hethub.spec.plan import save_plan

    job = load_job(options.job, options.set)
    cluster = _known_cluster(job)
    strategy = options.strategy or ("auto" if job.plan_path else job.spec.plan)
    result = plan(job.model, cluster, job.spec.train.batch, job.spec.constraints, strategy=strategy)
    if options.out is not None:
        save_plan(result.plan, options.out)
    if options.json:
        _print_json(result.to_dict())
    else:
        print_plan(result, job.model, cluster, options.out)


def _known_cluster(job: Any) -> Any:
    if job.cluster is None:
        raise BadInput(
            f"{job.path}: cluster is `detect`, which only the ranks of a run can answer; name a cluster file to plan or predict."
        )
    return job.cluster


def _add_predict(commands: Any) -> None:
    parser = _command(
        commands,
        "predict",
        _predict,
        "Says time and memory of a job's plan, with or without the hardware.",
        "hethub predict configs/jobs/laptop-mixed.yaml --plan plan.yaml --trace trace.json",
    )
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--plan", type=Path, metavar="PLAN.yaml", help="the plan to predict (default: the job's)")
    parser.add_argument("--trace", type=Path, metavar="TRACE.json", help="write a timeline that Perfetto opens")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key.path=value", help="override a key of the job"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _predict(options: argparse.Namespace) -> None:
    from hethub.predictor import predict
    from hethub.report.tables import print_prediction
    from hethub.report.trace import chrome_trace, write_trace
    from hethub.spec.job import load_job, load_plan_of
    from hethub.spec.layout import bind

    job = load_job(options.job, options.set)
    cluster, constraints = _known_cluster(job), job.spec.constraints
    plan_file = options.plan or job.plan_path
    if plan_file is not None:
        strategy, plan, bound = "plan file", load_plan_of(job, plan_file), None
    else:
        from hethub.planner import plan as make_plan

        strategy = job.spec.plan
        result = make_plan(job.model, cluster, job.spec.train.batch, constraints, strategy=strategy)
        plan, bound = result.plan, result.prediction.upper_bound_tokens_per_second
    prediction = predict(
        bind(plan, job.model, cluster),
        reserve=constraints.reserve,
        upper_bound_tokens_per_second=bound,
        with_timeline=options.trace is not None,
    )
    if options.trace is not None:
        names = [place.accelerator.name for place in cluster.places]
        write_trace(chrome_trace(prediction.timeline or (), names, "predicted"), options.trace)
    if options.json:
        _print_json({"strategy": strategy, **prediction.to_dict()})
    else:
        print_prediction(strategy, prediction)


# -- starting ----------------------------------------------------------------------------------------------------------


def _add_launch(commands: Any) -> None:
    parser = _command(
        commands,
        "launch",
        _launch,
        "Starts a job on its cluster, every node in its own environment.",
        "hethub launch configs/jobs/laptop-mixed.yaml --dry-run",
    )
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--with", dest="launcher", choices=("mpirun", "torchrun", "srun"), default="mpirun")
    parser.add_argument("--dry-run", action="store_true", help="print the command and run nothing")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key.path=value", help="override a key of the job"
    )


def _launch(options: argparse.Namespace) -> None:
    from hethub.runtime.launcher import launch_commands, run_here
    from hethub.spec.job import load_job

    job = load_job(options.job, options.set)
    extra = [word for override in options.set for word in ("--set", override)]
    commands = launch_commands(options.job, _known_cluster(job), options.launcher, extra)
    if options.dry_run:
        print("\n".join(map(str, commands)))
    elif code := run_here(commands):
        raise RunFailed(f"the job ended with exit code {code}; what failed is said above.")


def _add_doctor(commands: Any) -> None:
    parser = _command(
        commands, "doctor", _doctor, "Says what this machine has, what is missing and what to do.", "hethub doctor"
    )
    parser.add_argument("job", type=Path, nargs="?", metavar="JOB.yaml", help="also check this job's files")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _doctor(options: argparse.Namespace) -> None:
    from hethub.report.tables import print_findings
    from hethub.runtime.doctor import examine
    from hethub.spec.job import load_job

    findings = examine()
    if options.job is not None:
        load_job(options.job)
    if options.json:
        _print_json({"findings": [finding.to_dict() for finding in findings]})
    else:
        print_findings(findings)


# -- looking -----------------------------------------------------------------------------------------------------------


def _add_report(commands: Any) -> None:
    parser = _command(
        commands,
        "report",
        _report,
        "Draws a run, or a plan, as one self-contained HTML page.",
        "hethub report runs/laptop-mixed-20260101-120000 --out report.html",
    )
    parser.add_argument("what", type=Path, metavar="RUN_DIR|PLAN.yaml")
    parser.add_argument(
        "--job", type=Path, metavar="JOB.yaml", help="the job a plan file belongs to (model and cluster)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="REPORT.html", help="default: report.html in the run folder or here"
    )


def _report(options: argparse.Namespace) -> None:
    from hethub.report.html import report_run, write_page
    from hethub.spec.job import load_job, load_plan_of
    from hethub.spec.layout import bind

    if options.what.is_dir():
        out = options.out or options.what / "report.html"
        report_run(options.what, out)
    elif options.job is None:
        raise BadInput(
            f"{options.what}: a plan names its model and cluster but does not hold them; add --job JOB.yaml, the job it was made for."
        )
    else:
        job, out = load_job(options.job), options.out or Path("report.html")
        layout = bind(load_plan_of(job, options.what), job.model, _known_cluster(job))
        write_page(layout, None, out, f"plan {options.what.name}")
    print(f"written to {out}")


# -- data and weights --------------------------------------------------------------------------------------------------


def _add_tokenise(commands: Any) -> None:
    parser = _command(
        commands,
        "tokenise",
        _tokenise,
        "Turns text into a token file that jobs read with `source: tokens`.",
        "hethub tokenise corpus/ --tokenizer tokenizer.json --out corpus.bin",
    )
    parser.add_argument("text", type=Path, nargs="+", metavar="TEXT", help="files or folders (.jsonl: the key `text`)")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="a tokenizer.json, or `bytes`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def _tokenise(options: argparse.Namespace) -> None:
    from hethub.runtime.tokenise import tokenise

    print(tokenise(options.text, options.tokenizer, options.out))


def _add_export(commands: Any) -> None:
    parser = _command(
        commands,
        "export",
        _export,
        "Writes the newest checkpoint of a run as a Hugging Face folder.",
        "hethub export runs/laptop-mixed-20260101-120000 --to my-llama",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--to", type=Path, required=True, metavar="HF_DIR")


def _export(options: argparse.Namespace) -> None:
    _need_torch("export")
    from hethub.runtime.export import export

    print(f"exported {export(options.run, options.to)} to {options.to}")
