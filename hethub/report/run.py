"""The end of a run: its trace and report in the run folder and its summary on the terminal."""

import shlex
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hethub.report.html import report_run
from hethub.report.program import report_program_run
from hethub.report.trace import chrome_trace, times_are, write_trace
from hethub.runtime.console import make_console, make_table
from hethub.runtime.loop.steps import Ended, RunSummary
from hethub.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from hethub.runtime.program.train import ProgramSummary


def finish_run(summary: RunSummary) -> None:
    """Writes trace.json and report.html and prints predicted and measured (or emulated) side by side."""
    folder, plan, cluster = RunFolder(summary.folder), summary.layout.plan, summary.layout.cluster
    how = times_are(cluster)
    write_trace(chrome_trace(summary.spans, cluster, how), folder.trace)
    report_run(summary.folder, folder.path / "report.html")
    console = make_console()
    console.print(_summary_table(summary, how, "tokens", plan.global_batch * plan.seq_len))
    if summary.emulation is not None:
        overrun, scale = summary.emulation["overrun_percent"], summary.emulation["time_scale"]
        console.print(
            f"emulated: times are emulated (1 s took {scale:g} s); real computing came late by {overrun:.2f} % of them"
        )
    _print_end(console, summary)


def finish_program_run(summary: "ProgramSummary") -> None:
    """Writes report.html into the run folder and prints predicted and measured side by side."""
    report_program_run(summary.folder, summary.folder / "report.html")
    console = make_console()
    console.print(_summary_table(summary, "measured", summary.items, summary.items_per_step))
    _print_end(console, summary)


def _summary_table(summary: Ended, how: str, items: str, items_per_step: int) -> Table:
    """Step time and items per second, predicted beside measured."""
    table = make_table("", "predicted", f"{how} (median)", f"{how} / predicted")
    predicted, measured = summary.predicted_step_seconds, summary.measured_step_seconds
    table.add_row("step time", f"{predicted:.4g} s", f"{measured:.4g} s", f"{measured / predicted:.2f}")
    rates = (f"{items_per_step / seconds:,.0f}" for seconds in (predicted, measured))
    table.add_row(f"{items}/s", *rates, f"{predicted / measured:.2f}")
    return table


def _print_end(console: Console, summary: Ended) -> None:
    """How a run goes on where it was stopped, and what it has come to."""
    if summary.stopped_early:
        console.print(
            f"stopped on request at step {summary.last_step}; continue with --resume {shlex.quote(str(summary.folder))}"
        )
    console.print(f"loss {summary.first_loss:.4f} → {summary.last_loss:.4f}; run folder {summary.folder}")
