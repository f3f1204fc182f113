"""hethub train."""

import argparse
import shlex
import signal
from pathlib import Path
from typing import Any

from hethub.commands.common import add_job, add_profile, command, need_torch, path
from hethub.commands.program import runs_program
from hethub.spec.errors import BadInput, RunFailed


def add(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        run,
        "Trains the job on the ranks that the launcher started.",
        "mpirun -n 4 --oversubscribe --bind-to none --continuous hethub train configs/jobs/laptop-mixed.yaml",
    )
    add_job(parser)
    add_run(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    """What to run and where, which `hethub launch` takes too and hands on."""
    parser.add_argument("--plan", type=path, metavar="PLAN.yaml", help="run this plan instead of the job's")
    add_profile(parser)
    parser.add_argument("--run-dir", type=path, metavar="DIR", help="the run folder (default: runs/NAME-TIME)")
    parser.add_argument(
        "--resume",
        type=path,
        metavar="DIR|auto",
        help="continue the run in this folder, or from one of its checkpoints, DIR/checkpoints/step-N; auto: the newest checkpoint of this "
        "job's, else a new run",
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume though the job has changed since the run began"
    )


AGAIN = 75  # EX_TEMPFAIL of sysexits.h: what failed may be gone, and the same command goes on
STOPPED = 3  # exit code of a run that a signal has ended, with a checkpoint


def run(options: argparse.Namespace) -> int:
    from hethub.runtime.launch.launcher_environment import end_unmet, launch_info, one_voice_per_node

    signal.signal(signal.SIGUSR1, end_unmet)  # until the ranks have met, who listen to it themselves
    need_torch("train")
    from hethub.communicator.joining import watch
    from hethub.runtime.going_on import goes_on_by_itself

    by_itself = goes_on_by_itself(options.resume)
    watch.failed_code = AGAIN if by_itself else 1
    try:
        is_program = runs_program(options.job, options.set, options.plan)
        with one_voice_per_node(launch_info()):
            check_given(options, by_itself=by_itself, is_program=is_program)
        stopped = _run_program(options) if is_program else _run_plan(options)
    except RunFailed as error:
        error.again = by_itself
        raise
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # all is saved, or what has failed is about to be said
    return STOPPED if stopped else 0


def check_given(options: argparse.Namespace, *, by_itself: bool, is_program: bool) -> None:
    """Raises BadInput where what was given does not go together."""
    from hethub.runtime.run_folder import run_and_step

    if options.resume is not None and options.run_dir is not None and not by_itself:
        raise BadInput("--resume names the run folder already, in which the run goes on; leave out --run-dir.")
    if options.run_dir is not None and run_and_step(options.run_dir)[1] is not None:
        raise BadInput(
            f"--run-dir {options.run_dir}: names a checkpoint, with which all that lies in it goes. Name a folder for the run, or go on "
            f"from the checkpoint with --resume {shlex.quote(str(options.run_dir))}."
        )
    if is_program and options.profile is not None:
        raise BadInput("--profile is not taken by strategy hap, whose times are estimates; leave it out.")
    for named in (options.job, options.run_dir or options.resume or Path("runs")):
        try:
            str(named.absolute()).encode()
        except UnicodeEncodeError:
            raise BadInput(f"{named}: a run's files name this path in UTF-8, which it is not in; rename it.") from None


def _run_plan(options: argparse.Namespace) -> bool:
    """Whether a signal has stopped the run early; rank 0 knows."""
    from hethub.report.run import finish_run
    from hethub.runtime.loop.train import train

    summary = train(
        options.job,
        overrides=options.set,
        plan_path=options.plan,
        profile_path=options.profile,
        run_dir=options.run_dir,
        resume=options.resume,
        accept_changes=options.accept_changes,
    )
    if summary is not None:
        finish_run(summary)
    return summary is not None and summary.stopped_early


def _run_program(options: argparse.Namespace) -> bool:
    from hethub.report.run import finish_program_run
    from hethub.runtime.program.train import train_program

    summary = train_program(
        options.job, overrides=options.set, plan_path=options.plan, run_dir=options.run_dir, resume=options.resume,
        accept_changes=options.accept_changes,
    )  # fmt: skip
    if summary is not None:
        finish_program_run(summary)
    return summary is not None and summary.stopped_early
