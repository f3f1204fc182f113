"""A whole run on one rank, in a line: read, meet, agree, compare, plan, build, restore, loop."""

from collections.abc import Sequence
from pathlib import Path

from hethub.kernels.bodies import choose
from hethub.runtime.going_on import folder_to_resume
from hethub.runtime.launch.consensus import consensus
from hethub.runtime.launch.launcher_environment import launch_info, one_voice_per_node
from hethub.runtime.launch.preflight import agree, folder_asked_for, own_facts
from hethub.runtime.launch.rendezvous import meet
from hethub.runtime.launch.session import watched, watched_meeting
from hethub.runtime.loop.build import build, connect_ranks
from hethub.runtime.loop.plan import choose_plan
from hethub.runtime.loop.read import check_job, file_contents, read_data, read_job
from hethub.runtime.loop.restore import restore
from hethub.runtime.loop.steps import RunSummary, TrainingLoop
from hethub.runtime.parity.makers import check_makers
from hethub.runtime.run_claim import RunClaim


def train(
    job_path: Path,
    *,
    overrides: Sequence[str],
    plan_path: Path | None,
    profile_path: Path | None,
    run_dir: Path | None,
    resume: Path | None,
    accept_changes: bool,
) -> RunSummary | None:
    """Runs the job on this rank; the summary on rank 0, None elsewhere and where no step was left to train.

    Raises BadInput (on all ranks, quiet on all but one) before anything is written, RunFailed afterwards.
    """
    info = launch_info()
    with one_voice_per_node(info):
        read = read_job(job_path, overrides, info)
        meeting = meet(info, read.cluster, read.timeout_seconds)
    with watched_meeting(meeting), RunClaim() as claim:
        job, device = consensus(meeting, "job", lambda: check_job(read.job, info))
        choose(job.spec.train.compile)
        data = read_data(meeting, job, info, job.model.vocab)
        asked = folder_asked_for(run_dir, resume)
        facts = own_facts(info, device, read=file_contents(job), tokens=data.fingerprint, run_folder=asked)
        agreed = agree(meeting, facts, job.cluster)
        compared = check_makers(meeting, job, device, agreed.facts)
        resume = folder_to_resume(
            meeting, job, run_dir, resume, restarted=agreed.restarted, accept_changes=accept_changes
        )
        planned = choose_plan(
            meeting, job, device, agreed.cluster, agreed.facts,
            plan_path=plan_path, profile_path=profile_path, run_dir=run_dir, resume=resume, claim=claim,
            accept_changes=accept_changes,
        )  # fmt: skip
        layout, profile, resumes = planned.layout, planned.profile, planned.resumes
        world = connect_ranks(meeting, job.spec.communicator, device, layout.cluster, profile, planned.relays)
        with watched(world, "train"):
            seconds = planned.prediction["step_seconds"]
            trainer = build(meeting, world, job, data.training, layout, profile, seconds, fills=not resumes)
            store, done = restore(
                meeting, world, trainer, job.spec.checkpoint, planned.folder, resumes=resumes, behind=planned.behind
            )
            loop = TrainingLoop(world, job, data, planned, trainer, store, done)
            warnings = [*data.warnings, *agreed.warnings, *compared, *trainer.warnings]
            del trainer  # the loop alone keeps it: it may build another, and two need not fit on a device
            return loop.run(warnings)
