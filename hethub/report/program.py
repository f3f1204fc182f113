"""Programs of strategy hap as tables on the terminal and as a page, and the end of a run under one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hethub.report.drawing import curve
from hethub.report.page import html_table, write_html
from hethub.runtime.console import make_console
from hethub.spec.program import (
    ProgramPlanSpec,
    ProgramSpec,
    load_program_plan,
    program_notes,
    program_table,
    show_ratios,
)

if TYPE_CHECKING:
    from hethub.runtime.program.train import ProgramSummary

GIB = 2**30


def print_program(
    plan: ProgramPlanSpec, prediction: Mapping[str, Any], written: Sequence[Path], found: Mapping[str, Any] | None
) -> None:
    """The program by module, its ratios, the memory of the ranks, and how long it took to find."""
    console = make_console()
    console.print(f"{plan.model} on {plan.cluster} ({plan.program.ranks} accelerators), strategy hap")
    head, rows = program_table(plan.program)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in _lines(plan.program, prediction):
        console.print(line)
    if found is not None:
        for name, seconds in found["baselines"].items():
            console.print(
                f"{name} would take {seconds * 1e3:.3f} ms, {seconds / prediction['step_seconds']:.2f} times as long"
            )
        console.print(f"traced in {found['trace_seconds']:.2f} s, searched in {found['search_seconds']:.2f} s")
    for path in written:
        console.print(f"wrote {path}")


def _lines(program: ProgramSpec, prediction: Mapping[str, Any] | None) -> list[str]:
    lines = [f"{name}: {show_ratios(parts)}" for name, parts in program.ratios.items()]
    lines += program_notes(program)
    if prediction is not None:
        rows = prediction["memory"]
        fullest = max(rows, key=lambda row: row["bytes"] / max(row["limit"], 1))
        lines.append(f"{prediction['samples_per_second']:,.1f} samples/s")
        lines.append(
            f"memory: rank {fullest['rank']} ({fullest['accelerator']}) is fullest with {fullest['bytes'] / GIB:.2f} of"
            f" {fullest['limit'] / GIB:.2f} GiB"
        )
    return lines


def write_program_page(plan: ProgramPlanSpec, out: Path, title: str, steps: Sequence[Mapping[str, Any]] = ()) -> None:
    """The page of a plan, or of a run with the `steps` of its metrics.jsonl."""
    program = plan.program
    about = [
        ["model", plan.model], ["cluster", f"{plan.cluster} ({program.ranks} accelerators)"],
        ["batch", f"{plan.global_batch} samples, {plan.precision}"],
        ["predicted", f"{program.predicted_seconds:.4g} s a step"],
    ]  # fmt: skip
    if steps:
        measured = median(step["step_seconds"] for step in steps)
        about.append(
            ["measured (median)", f"{measured:.4g} s, {measured / program.predicted_seconds:.2f} of the prediction"]
        )
    memory = [[str(rank), f"{used / GIB:.3f}"] for rank, used in enumerate(program.memory_bytes)]
    parts = [
        html_table(["", ""], about),
        "<h2>Program</h2>" + html_table(*program_table(program)),
        "".join(f"<p>{_escaped(line)}</p>" for line in program_notes(program)),
        "<h2>Ratios</h2>"
        + html_table(["axis", "ranks"], [[name, show_ratios(own)] for name, own in program.ratios.items()]),
        "<h2>Parameters</h2>" + html_table(["parameter", "kept"], [list(pair) for pair in program.parameters.items()]),
        "<h2>Memory</h2>" + html_table(["rank", "GiB"], memory),
    ]
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    if losses:
        parts.append("<h2>Loss</h2>" + curve(losses))
    write_html(out, title, parts)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def report_program_run(folder: Path, out: Path) -> None:
    """Writes the page of a run folder."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    plan = load_program_plan(folder / "plan.yaml")
    write_program_page(plan, out, f"run {folder.name}", [json.loads(line) for line in lines])


def finish_program_run(summary: "ProgramSummary") -> None:
    """Writes report.html into the run folder and prints predicted and measured side by side."""
    report_program_run(summary.folder, summary.folder / "report.html")
    console = make_console()
    table = Table("", "predicted", "measured (median)", "measured / predicted")
    predicted, measured, items = summary.predicted_step_seconds, summary.measured_step_seconds, summary.items_per_step
    table.add_row("step time", f"{predicted:.4g} s", f"{measured:.4g} s", f"{measured / predicted:.2f}")
    rates = f"{items / predicted:,.0f}", f"{items / measured:,.0f}", f"{predicted / measured:.2f}"
    table.add_row(f"{summary.items}/s", *rates)
    console.print(table)
    if summary.stopped_early:
        console.print(f"stopped on request at step {summary.last_step}; continue with --resume {summary.folder}")
    console.print(f"loss {summary.first_loss:.4f} → {summary.last_loss:.4f}; run folder {summary.folder}")
