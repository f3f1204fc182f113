"""hethub report, watch and validate: pictures of plans and runs, and how far to trust predictions."""

import argparse
import time
from pathlib import Path
from typing import Any

from hethub.commands.common import (
    add_calibrate,
    add_json,
    add_profile,
    check_writable,
    command,
    made_for,
    measured_beside,
    path,
    print_json,
    program_made_for,
    refuse_overwriting,
)
from hethub.commands.program import refuse_with_programs
from hethub.spec.errors import BadInput


def add(commands: Any) -> None:
    _add_report(commands)
    _add_watch(commands)
    _add_validate(commands)


def _add_report(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        report,
        "Draws a run, or a plan, as one self-contained HTML page.",
        "hethub report runs/laptop-mixed-20260101-120000 --out report.html",
    )
    parser.add_argument("what", type=path, metavar="RUN_DIR|PLAN.yaml", help="a run folder, or a plan file")
    parser.add_argument(
        "--job", type=path, metavar="JOB.yaml", help="what a plan file was made for (default: as it says)"
    )
    add_profile(parser)
    add_calibrate(parser)
    parser.add_argument(
        "--out", type=path, metavar="REPORT.html", help="default: report.html in the run folder or here"
    )


def report(options: argparse.Namespace) -> None:
    from hethub.predictor.cost.software import hethub_software
    from hethub.report.html import report_run, write_page
    from hethub.report.program import report_program_run, write_program_page
    from hethub.runtime.run_folder import FILES
    from hethub.spec.job import load_job
    from hethub.spec.layout.state import bind_file
    from hethub.spec.plan import load_plan
    from hethub.spec.program import is_program_plan, load_program_plan

    check_writable(options.out, reads=options.what)
    kept = (options.what / name for name in FILES if name != "report.html")  # of a run, where that is what to draw
    refuse_overwriting(options.out, options.job, options.profile, options.calibrate, *kept)
    if not options.what.exists():
        raise BadInput(f"{options.what}: there is no such run folder or plan file. Check the path.")
    for name in ("job", "profile", "calibrate"):
        if options.what.is_dir() and (file := getattr(options, name)) is not None:
            raise BadInput(
                f"--{name} {file}: it goes with a plan file; the run folder {options.what} says what ran. Leave it out."
            )
    if options.job is not None and options.out is not None:
        refuse_overwriting(options.out, *load_job(options.job).files)
    if options.what.is_dir():
        out = options.out or options.what / "report.html"
        check_writable(out)
        (report_program_run if is_program_plan(options.what / "plan.yaml") else report_run)(options.what, out)
    elif is_program_plan(options.what):
        refuse_with_programs(options, "profile", "calibrate")
        program, out = load_program_plan(options.what), options.out or Path("report.html")
        made_for_program = program_made_for(program, options.what, options.job)
        write_program_page(program, made_for_program, out, f"plan {options.what.name}")
    else:
        plan, out = load_plan(options.what), options.out or Path("report.html")
        job = made_for(plan, options.what, options.job)
        layout = bind_file(options.what, plan, job.model, job.cluster)
        title, software = f"plan {options.what.name}", hethub_software(job.compile)
        profile = measured_beside(options, job, plan.precision)
        write_page(layout, None, out, title, profile=profile, software=software, reserve=job.reserve)
    print(f"written to {out}")


def _add_watch(commands: Any) -> None:
    parser = command(
        commands,
        "watch",
        watch,
        "Shows how far a run has come, from the files in its folder; on a terminal until it ends or you interrupt.",
        "hethub watch runs/laptop-mixed-20260101-120000",
    )
    parser.add_argument("run", type=path, metavar="RUN_DIR", help="the folder that train printed")
    parser.add_argument("--once", action="store_true", help="show it once")


def watch(options: argparse.Namespace) -> None:
    from rich.live import Live

    from hethub.report.watching import look
    from hethub.runtime.console import make_console

    console, seen = make_console(), look(options.run)
    if options.once or not console.is_terminal:
        console.print(seen.text)
        return
    with Live(seen.text, console=console, auto_refresh=False) as live:
        while seen.goes_on:
            time.sleep(_WATCHING_SECONDS)
            seen = look(options.run)
            live.update(seen.text, refresh=True)


_WATCHING_SECONDS = 2.0


def _add_validate(commands: Any) -> None:
    parser = command(
        commands,
        "validate",
        validate,
        "Predicts measured steps and says how far the predictions are off.",
        "hethub validate measured_steps.csv --by accelerator",
    )
    text = "a table of measured steps or layers, a JSON list of plans on mixed clusters, or a folder of cases (docs/plans.md)"
    parser.add_argument("what", type=path, metavar="TABLE.csv|CASES_DIR", help=text)
    parser.add_argument("--by", default="source", metavar="COLUMN", help="the column to group by (default source)")
    add_calibrate(parser)
    add_json(parser)


def validate(options: argparse.Namespace) -> None:
    from hethub.predictor.calibration.validation.validate import validate as compare
    from hethub.report.tables import print_validation

    constants = None
    if options.calibrate is not None:
        from hethub.predictor.calibration.calibrate import calibrated

        constants = calibrated(options.calibrate)
    result = compare(options.what, options.by, constants)
    if options.json:
        print_json(result)
    else:
        print_validation(result)
