"""A job's program: traced, planned for its cluster, and what is predicted of it."""

import time
from dataclasses import dataclass

from hethub.runtime.program.subject import Subject
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, asked_by
from hethub.spec.job import Job
from hethub.spec.program import ProgramFor, ProgramPlanSpec
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.graph import Graph
from hethub.synthesis.layout import Layout
from hethub.synthesis.planning import baselines, plan_model, pose, program_of
from hethub.synthesis.program import Execution, Program
from hethub.synthesis.search import Search


@dataclass(frozen=True, kw_only=True)
class PlannedProgram:
    """A program with what it was made for, and the seconds that it took to find."""

    plan: ProgramPlanSpec
    search_seconds: float
    baselines: dict[str, float]  # seconds of what others would run, where that was asked for


def trace_job(job: Job, subject: Subject) -> Graph:
    """The graph of the job's model. Raises BadInput that names the job, its model, and operator and module at fault."""
    try:
        return trace(subject.module, subject.example)
    except BadInput as error:
        raise BadInput(f"{job.path}: model {job.spec.model}: {error}") from error


def plan_program(
    job: Job, subject: Subject, graph: Graph, cluster: ClusterSpec, *, explain: bool = False
) -> PlannedProgram:
    """The best program for the job's traced model, with what others would run where that is to be explained.

    Raises BadInput where none fits the memory of every rank.
    """
    began, limits = time.perf_counter(), job.spec.constraints
    options = Search(time_limit_seconds=limits.time_limit_seconds or Search().time_limit_seconds)
    model = pose(graph, cluster)
    with asked_by(job.path, job.source.place):
        program = plan_model(model, options, reserve=limits.reserve)
    searched = time.perf_counter() - began
    train = job.spec.train
    plan = ProgramPlanSpec(
        strategy="hap", model=subject.name, cluster=cluster.name, global_batch=train.global_batch, seq_len=train.seq_len,
        precision=train.precision, program=program.to_spec(),
        job=ProgramFor(cluster=cluster, reserve=limits.reserve, items=subject.items),
    )  # fmt: skip
    return PlannedProgram(plan=plan, search_seconds=searched, baselines=baselines(model) if explain else {})


def priced(plan: ProgramPlanSpec, graph: Graph, cluster: ClusterSpec) -> ProgramPlanSpec:
    """The plan with what its program takes on another cluster of as many ranks than it was planned for.

    Raises BadInput where the program does not fit together.
    """
    program = Program.from_spec(plan.program)
    Layout.planned(graph, program)
    execution = Execution(pose(graph, cluster), program.rules, program.kept, program.shares)
    return plan.replace(program=program_of(execution, is_optimal=False, rounds=program.rounds).to_spec())
