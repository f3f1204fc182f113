"""hethub train."""

import argparse
from pathlib import Path
from typing import Any

from hethub.commands.common import add_job, add_profile, command, need_torch
from hethub.commands.program import runs_program
from hethub.spec.errors import BadInput


def add(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        run,
        "Trains the job on the ranks that the launcher started.",
        "mpirun -n 4 hethub train configs/jobs/laptop-mixed.yaml",
    )
    add_job(parser)
    add_run(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    """What to run and where, which `hethub launch` takes too and hands on."""
    parser.add_argument("--plan", type=Path, metavar="PLAN.yaml", help="run this plan instead of the job's")
    add_profile(parser)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run folder (default: runs/NAME-TIME)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this folder")


def run(options: argparse.Namespace) -> None:
    need_torch("train")
    if options.resume is not None and options.run_dir is not None:
        raise BadInput(
            "--resume and --run-dir name two run folders; a resumed run goes on in its own. Give one of them."
        )
    if runs_program(options.job, options.set, options.plan):
        return _run_program(options)
    from hethub.report.run import finish_run
    from hethub.runtime.loop.train import train

    summary = train(
        options.job,
        overrides=options.set,
        plan_path=options.plan,
        profile_path=options.profile,
        run_dir=options.run_dir,
        resume=options.resume,
    )
    if summary is not None:
        finish_run(summary)


def _run_program(options: argparse.Namespace) -> None:
    from hethub.report.program import finish_program_run
    from hethub.runtime.program.train import train_program

    if options.profile is not None:
        raise BadInput("--profile is not taken by strategy hap, whose times are estimates; leave it out.")
    summary = train_program(
        options.job, overrides=options.set, plan_path=options.plan, run_dir=options.run_dir, resume=options.resume
    )
    if summary is not None:
        finish_program_run(summary)
