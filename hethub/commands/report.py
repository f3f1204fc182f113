"""hethub report and validate: pictures of plans and runs, and how far to trust predictions."""

import argparse
from pathlib import Path
from typing import Any

from hethub.commands.common import add_json, check_writable, command, model_and_cluster, print_json


def add(commands: Any) -> None:
    _add_report(commands)
    _add_validate(commands)


def _add_report(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        report,
        "Draws a run, or a plan, as one self-contained HTML page.",
        "hethub report runs/laptop-mixed-20260101-120000 --out report.html",
    )
    parser.add_argument("what", type=Path, metavar="RUN_DIR|PLAN.yaml")
    parser.add_argument("--job", type=Path, metavar="JOB.yaml", help="the job that a plan file was made for")
    parser.add_argument(
        "--out", type=Path, metavar="REPORT.html", help="default: report.html in the run folder or here"
    )


def report(options: argparse.Namespace) -> None:
    from hethub.report.html import report_run, write_page
    from hethub.report.program import report_program_run, write_program_page
    from hethub.spec.layout.bind import bind
    from hethub.spec.plan import load_plan
    from hethub.spec.program import is_program_plan, load_program_plan

    check_writable(options.out)
    if options.what.is_dir():
        out = options.out or options.what / "report.html"
        (report_program_run if is_program_plan(options.what / "plan.yaml") else report_run)(options.what, out)
    elif is_program_plan(options.what):
        out = options.out or Path("report.html")
        write_program_page(load_program_plan(options.what), out, f"plan {options.what.name}")
    else:
        plan, out = load_plan(options.what), options.out or Path("report.html")
        layout = bind(plan, *model_and_cluster(plan, options.what, options.job))
        write_page(layout, None, out, f"plan {options.what.name}")
    print(f"written to {out}")


def _add_validate(commands: Any) -> None:
    parser = command(
        commands,
        "validate",
        validate,
        "Predicts measured steps and says how far the predictions are off.",
        "hethub validate measured_steps.csv --by accelerator",
    )
    parser.add_argument("what", type=Path, metavar="TABLE.csv|CASES_DIR")
    parser.add_argument("--by", default="source", metavar="COLUMN", help="the column to group by (default source)")
    add_json(parser)


def validate(options: argparse.Namespace) -> None:
    from hethub.predictor.calibration.validation.validate import validate as compare
    from hethub.report.tables import print_validation

    result = compare(options.what, options.by)
    if options.json:
        print_json(result)
    else:
        print_validation(result)
