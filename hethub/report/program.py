"""Programs of strategy hap as tables on the terminal and as a page."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from hethub.predictor.cost.profile import assumed_speeds
from hethub.report.drawing import losses
from hethub.report.page import html_table, section, write_html
from hethub.report.tables import assumed_sentence
from hethub.report.watching import settled_seconds
from hethub.runtime.console import make_console, make_table
from hethub.runtime.run_folder import RunFolder
from hethub.spec.base import show_gib
from hethub.spec.cluster import load_cluster
from hethub.spec.program import (
    ProgramFor,
    ProgramPlanSpec,
    ProgramSpec,
    load_program_plan,
    prediction_of,
    program_notes,
    program_table,
    show_ratios,
)

NO_ROOM = "a rank leaves less of its accelerator's memory free than constraints.reserve asks"


def print_program(
    plan: ProgramPlanSpec,
    prediction: Mapping[str, Any],
    assumed: Sequence[str],
    written: Sequence[Path],
    found: Mapping[str, Any] | None,
) -> None:
    """The program by module, its ratios, the memory of the ranks, and how long it took to find; `assumed`: accelerators
    of unknown speed."""
    console = make_console()
    console.print(f"{plan.model} on {plan.cluster} ({plan.program.ranks} accelerators), strategy hap")
    head, rows = program_table(plan.program)
    table = make_table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in _lines(plan.program, prediction):
        console.print(line)
    if assumed:
        console.print(assumed_sentence(assumed))
    if found is not None:
        for name, seconds in found["baselines"].items():
            console.print(
                f"{name} would take {seconds * 1e3:.3f} ms, {seconds / prediction['step_seconds']:.2f} times as long"
            )
        console.print(f"traced in {found['trace_seconds']:.2f} s, searched in {found['search_seconds']:.2f} s")
    for path in written:
        console.print(f"written to {path}")


def _lines(program: ProgramSpec, prediction: Mapping[str, Any]) -> list[str]:
    fullest = max(prediction["memory"], key=lambda row: row["bytes"] / max(row["limit"], 1))
    tokens = prediction["tokens_per_second"]
    return [
        *(f"{name}: {show_ratios(parts)}" for name, parts in program.ratios.items()),
        *program_notes(program),
        f"{prediction['samples_per_second']:,.1f} samples/s" + ("" if tokens is None else f", {tokens:,.0f} tokens/s"),
        f"memory: rank {fullest['rank']} ({fullest['accelerator']}) is fullest with {show_gib(fullest['bytes'])} of "
        f"{show_gib(fullest['limit'])} GiB",
        "fits" if prediction["fits"] else f"does not fit: {NO_ROOM}",
    ]


def write_program_page(
    plan: ProgramPlanSpec, made_for: ProgramFor, out: Path, title: str, steps: Sequence[dict[str, Any]] = ()
) -> None:
    """The page of a plan, or of a run with the `steps` of its metrics.jsonl."""
    program, prediction = plan.program, prediction_of(plan, made_for)
    assumed = assumed_speeds(made_for.cluster, plan.precision, None)
    about = [
        ["model", plan.model], ["cluster", f"{plan.cluster} ({program.ranks} accelerators)"],
        ["batch", f"{plan.global_batch} samples, {plan.precision}"],
        ["predicted", f"{program.predicted_seconds:.4g} s a step"],
        ["fits", "yes" if prediction["fits"] else "no"],
    ]  # fmt: skip
    if steps:
        own = settled_seconds(steps)
        beside = f"{median(own):.4g} s, {median(own) / program.predicted_seconds:.2f} of the prediction"
        about.append([f"measured (median of the {len(own)} steps under this plan)", beside])
    memory = [
        [str(row["rank"]), row["accelerator"], show_gib(row["bytes"]), show_gib(row["limit"])]
        for row in prediction["memory"]
    ]
    ratios = [[name, show_ratios(own)] for name, own in program.ratios.items()]
    notes = [*program_notes(program), *([f"{assumed_sentence(assumed)}."] if assumed else [])]
    parts = [
        html_table(["", ""], about),
        section("Program", html_table(*program_table(program))),
        "".join(f"<p>{escape(line)}</p>" for line in notes),
        section("Ratios", html_table(["axis", "ranks"], ratios)),
        section("Parameters", html_table(["parameter", "kept"], [*program.parameters.items()])),
        section("Memory", html_table(["rank", "accelerator", "needs GiB", "of GiB"], memory)),
    ]
    if steps:
        parts.append(section("Loss", losses(steps)))
    write_html(out, title, parts)


def report_program_run(folder: Path, out: Path) -> None:
    """Writes the page of a run folder. Raises BadInput."""
    plan = load_program_plan(folder / "plan.yaml")
    made_for = plan.job or ProgramFor(cluster=load_cluster(folder / "cluster.yaml"))
    write_program_page(plan, made_for, out, f"run {folder.name}", RunFolder(folder).rows())
