"""hethub launch, doctor and profile: starting jobs, and what machines have and do."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hethub.commands.common import (
    add_job,
    add_job_if_any,
    add_json,
    check_writable,
    command,
    known_cluster,
    need_torch,
    path,
    print_json,
    refuse_overwriting,
)
from hethub.commands.program import is_program_job
from hethub.commands.train import AGAIN, STOPPED, add_run, check_given
from hethub.spec.errors import BadInput, RunFailed, asked_by

if TYPE_CHECKING:
    from hethub.runtime.doctor.machine import Finding
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import Job


_REFUSED = 2  # exit code of ranks that were given bad input, and have said so


def add(commands: Any) -> None:
    _add_launch(commands)
    _add_doctor(commands)
    _add_profile(commands)
    _add_bench(commands)


def _add_launch(commands: Any) -> None:
    from hethub.runtime.launch.launcher_command import LAUNCHERS

    parser = command(
        commands,
        "launch",
        launch,
        "Starts a job on its cluster, every node in its own environment.",
        "hethub launch configs/jobs/laptop-mixed.yaml --dry-run",
    )
    add_job(parser)
    add_run(parser)
    parser.add_argument("--with", dest="launcher", choices=LAUNCHERS, default="mpirun", help="default: mpirun")
    parser.add_argument("--dry-run", action="store_true", help="print the command and run nothing")


def launch(options: argparse.Namespace) -> int:
    from hethub.report.tables import makers_not_started
    from hethub.runtime.launch.launcher_command import launch_commands, run_here
    from hethub.runtime.run_folder import AUTO, has_finished, logs_written
    from hethub.spec.job import load_job

    job = load_job(options.job, options.set)
    cluster = known_cluster(job)
    _check_named(options, job, cluster)
    extra = [word for override in options.set for word in ("--set", override)]
    named = {
        "--plan": options.plan, "--profile": options.profile, "--run-dir": options.run_dir, "--resume": options.resume,
    }  # fmt: skip
    extra += [word for name, path in named.items() if path is not None for word in (name, str(path))]
    extra += ["--accept-changes"] * options.accept_changes + ["--debug"] * options.debug
    with asked_by(job.base / job.spec.cluster):
        if strange := makers_not_started(cluster, range(cluster.size)):
            raise BadInput(
                f"hethub starts a rank on every accelerator, used or not, and none on {', '.join(strange)}; leave these nodes out "
                "of the cluster file."
            )
        starts = launch_commands(options.job, cluster, options.launcher, extra)
    if options.dry_run:
        print("\n".join(map(str, starts)))
        return 0
    before = logs_written(job, options.run_dir, options.resume)
    code, asked = run_here(starts)
    now = logs_written(job, options.run_dir, options.resume)
    # `mpirun --continuous` (Open MPI 5.0) ends with 0 where signals have killed all of its ranks.
    silent = code < 0 or (code == 0 and options.launcher == "mpirun" and not has_finished(job, before, now))
    if not silent and code in (0, _REFUSED, STOPPED, AGAIN):
        return code
    error = RunFailed(
        "the job ended before its last step, and no rank could say why: all were killed or told to end."
        if silent
        else f"the job ended with exit code {code}; what failed is said above."
    )
    was_killed = silent or 128 < code < 128 + signal.NSIG  # as srun and shells count
    error.again = was_killed and not asked and options.resume == AUTO
    raise error


def _check_named(options: argparse.Namespace, job: "Job", cluster: "ClusterSpec") -> None:
    """Raises BadInput where the plan, the profile or the run that the ranks are to take is not there, or is for another
    job: once, before any of them starts."""
    from hethub.runtime.run_folder import AUTO, RunFolder, run_and_step

    check_given(options, by_itself=options.resume == AUTO, is_program=is_program_job(job, options.plan))
    if options.resume not in (None, AUTO) and not (folder := run_and_step(options.resume)[0]).is_dir():
        RunFolder(folder).check_resumable()
    _check_trainable(job, cluster, options.plan, options.profile)


def _check_trainable(job: "Job", cluster: "ClusterSpec | None", given: Path | None, profile: Path | None) -> None:
    """Raises BadInput where hethub does not train the job's model, or not as the job asks, or plan or profile, given or the
    job's, are not there or are for another job."""
    from hethub.predictor.cost.profile import profile_for
    from hethub.spec.job import load_plan_of
    from hethub.spec.layout.state import bind_file
    from hethub.spec.program import check_plannable, load_program_plan

    file, is_program = given or job.plan_path, is_program_job(job, given)
    if job.described is not None:
        job.described.check_trained(job.source, in_program=is_program)
    if is_program:
        check_plannable(job)
        if file is not None:
            load_program_plan(file)
        return
    profile_for(job, profile)
    if file is not None:
        plan = load_plan_of(job, file)
        if cluster is not None:
            bind_file(file, plan, job.model, cluster)


def _add_doctor(commands: Any) -> None:
    parser = command(
        commands,
        "doctor",
        doctor,
        "Says what this machine has, or each rank under a launcher, what is missing and what to do.",
        "mpirun -n 4 hethub doctor",
    )
    add_job_if_any(parser, "also check this job and the files that it names")
    text = "measure too, in up to ten minutes: communication, staging, every operator against fp64, memory, speed"
    parser.add_argument("--acceptance", action="store_true", help=text)
    text = "with --acceptance: write the results, to be sent in"
    parser.add_argument("--out", type=path, metavar="ACCEPTANCE.json", help=text)
    add_json(parser)


def doctor(options: argparse.Namespace) -> None:
    if options.acceptance:
        return _accept(options)
    from hethub.report.tables import print_findings, print_ranks
    from hethub.runtime.doctor.machine import examine
    from hethub.runtime.launch.launcher_environment import launch_info, one_voice_per_node

    info = launch_info()
    with one_voice_per_node(info):
        if options.out is not None:
            raise BadInput(f"--out {options.out} is where --acceptance writes its results; add --acceptance.")
        job = _job(options)
        checked = [] if job is None else [_check_files(job)]
    if info.launcher == "alone":
        findings = [*examine(), *checked]
        if options.json:
            print_json({"findings": [finding.to_dict() for finding in findings]})
        else:
            print_findings(findings)
        return None
    need_torch("doctor")
    from hethub.runtime.doctor.ranks import examine_ranks
    from hethub.spec.job import CommunicatorSpec

    spec = CommunicatorSpec() if job is None else job.spec.communicator
    examined = examine_ranks(info, None if job is None else job.cluster, spec)
    if examined is None:
        return None
    examined.findings.extend(checked)
    if options.json:
        print_json(examined.to_dict())
    else:
        print_ranks(examined)
        print_findings(examined.findings)
    return None


def _check_files(job: "Job") -> "Finding":
    """That everything which the job names is there. Raises BadInput where it is not."""
    from hethub.runtime.data.opening import check_files
    from hethub.runtime.doctor.machine import Finding

    _check_trainable(job, job.cluster, None, None)
    check_files(job)
    return Finding(what="job", state="ok", found=f"{job.path}, and the files that it names")


def _job(options: argparse.Namespace, writes: Path | None = None) -> "Job | None":
    """The job that the command names, if it names one. Raises BadInput where one of its files is the one to write; its
    profile may be, which `hethub profile` measures anew."""
    from hethub.spec.job import load_job

    if options.job is None and options.set:
        raise BadInput(f"--set {options.set[0]} overrides a key of a job, and no job is named; add JOB.yaml.")
    if options.job is None:
        return None
    job = load_job(options.job, options.set)
    job_file, model, cluster, *_ = job.files
    refuse_overwriting(writes, job_file, model, cluster)
    return job


def _accept(options: argparse.Namespace) -> None:
    """Measures on the ranks of a launcher, or starts some here, which then come this way."""
    need_torch("doctor")
    from hethub.report.acceptance import print_acceptance, write_acceptance
    from hethub.runtime.acceptance.acceptance import accept
    from hethub.runtime.acceptance.start import start_here
    from hethub.runtime.launch.launcher_environment import launch_info, one_voice_per_node

    info = launch_info()
    with one_voice_per_node(info):
        check_writable(options.out)
        job = _job(options, options.out)
        if job is not None:
            job.model.check_trained(job.source)
    if info.launcher == "alone":
        words = [*([] if job is None else [str(options.job)]), *(["--json"] if options.json else [])]
        words += [word for override in options.set for word in ("--set", override)] + ["--debug"] * options.debug
        return start_here(
            "doctor", "--acceptance", *words, *([] if options.out is None else ["--out", str(options.out)])
        )

    def progress(what: str) -> None:
        if info.rank == 0:
            print(f"acceptance: {what}", file=sys.stderr, flush=True)

    accepted = accept(job, progress)
    if accepted is None:
        return None
    if options.out is not None:
        write_acceptance(accepted, options.out)
    if options.json:
        print_json(accepted.to_dict())
    else:
        print_acceptance(accepted)
    if accepted.failed:
        raise RunFailed(
            f"{len(accepted.failed)} of {len(accepted.rows)} checks failed: {', '.join(r.what for r in accepted.failed)}."
        )
    return None


def _add_profile(commands: Any) -> None:
    parser = command(
        commands,
        "profile",
        profile,
        "Measures the accelerators it is started on, and under a launcher the links between them.",
        "mpirun -n 4 --oversubscribe --bind-to none hethub profile configs/jobs/laptop-mixed.yaml --out profile.json",
    )
    add_job_if_any(parser, "measure this job's model (default: a layer of usual size)")
    text = "measure nothing; put the profiles of several nodes together (of equal points the slower counts)"
    parser.add_argument("--merge", type=path, nargs="+", metavar="PROFILE.json", help=text)
    parser.add_argument(
        "--out", type=path, default=Path("profile.json"), metavar="PROFILE.json", help="default: profile.json"
    )


def profile(options: argparse.Namespace) -> None:
    if options.merge is not None:
        return _merge(options)
    need_torch("profile")
    from hethub.predictor.cost.profile import save_profile
    from hethub.runtime.launch.launcher_environment import launch_info, one_voice_per_node
    from hethub.runtime.measure.profile_run import profile_ranks
    from hethub.runtime.progress import counted

    with one_voice_per_node(launch_info()):
        check_writable(options.out)
        job = _job(options, options.out)
        if job is not None:
            job.model.check_trained(job.source)  # it measures what hethub trains
    with counted("profiling") as progress:
        measured, speaks = profile_ranks(job, progress)
    if speaks:
        save_profile(measured, options.out)
        print(f"written to {options.out}")


def _merge(options: argparse.Namespace) -> None:
    from hethub.predictor.cost.profile import load_profile, merge, save_profile

    check_writable(options.out)
    if (given := options.job or next(iter(options.set), None)) is not None:
        raise BadInput(f"--merge puts measured profiles together and measures no job; leave out {given}.")
    refuse_overwriting(options.out, *options.merge)
    merged, *others = map(load_profile, options.merge)
    for file, other in zip(options.merge[1:], others, strict=True):
        with asked_by(file):
            merged = merge((merged, other))
    save_profile(merged, options.out)
    print(f"written to {options.out}")


def _add_bench(commands: Any) -> None:
    parser = command(
        commands,
        "bench",
        bench,
        "Times communication between the ranks it is started on: bridged, native and flat.",
        'HETHUB_ISLANDS="0,1|2,3" mpirun -n 4 --oversubscribe --bind-to none hethub bench comm --sizes 4096',
    )
    parser.add_argument("what", choices=("comm",), help="all-reduce, all-gather, reduce-scatter and messages")
    text = "take this job's cluster (islands, network) and communicator (relay, wire, lanes, timeout)"
    add_job_if_any(parser, text)
    parser.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="connections per pair of ranks and way for the gloo relay (default: the job's, or 1)",
    )
    parser.add_argument("--sizes", metavar="BYTES,…", help="message sizes (default 4 KiB to 64 MiB)")
    add_json(parser)


def bench(options: argparse.Namespace) -> None:
    need_torch("bench")
    from hethub.communicator.measuring.bench import DEFAULT_SIZES, run
    from hethub.report.tables import print_communication
    from hethub.runtime.launch.launcher_environment import launch_info, one_voice_per_node
    from hethub.runtime.launch.session import session

    with one_voice_per_node(launch_info()):
        if options.lanes is not None and options.lanes < 1:
            raise BadInput(f"--lanes {options.lanes}: give the number of connections, 1 or more.")
        job = _job(options)
        sizes = DEFAULT_SIZES if options.sizes is None else _sizes(options.sizes)
    with session(job, None if job is None else job.spec.communicator, options.lanes) as (world, _):
        rows, relays, speaks = run(world, sizes), world.relays, world.rank == 0
    if speaks and options.json:
        print_json({"rows": rows, "relays": relays})
    elif speaks:
        print_communication(rows, relays)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise BadInput(f"--sizes {text}: give positive numbers of bytes between commas, for example 4096,1048576.")
    return sizes
