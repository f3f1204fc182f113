"""The end of a run: its trace and report in the run folder and its summary on the terminal."""

import shlex

from rich.table import Table

from hethub.report.html import report_run
from hethub.report.trace import chrome_trace, times_are, write_trace
from hethub.runtime.console import make_console, make_table
from hethub.runtime.loop.steps import RunSummary
from hethub.runtime.run_folder import RunFolder


def finish_run(summary: RunSummary) -> None:
    """Writes trace.json and report.html and prints predicted and measured (or emulated) side by side."""
    folder = RunFolder(summary.folder)
    names = [place.accelerator.name for place in summary.layout.cluster.places]
    write_trace(chrome_trace(summary.spans, names, times_are(summary.layout.cluster)), folder.trace)
    report_run(summary.folder, folder.path / "report.html")
    console = make_console()
    console.print(summary_table(summary))
    if summary.emulation is not None:
        overrun, scale = summary.emulation["overrun_percent"], summary.emulation["time_scale"]
        console.print(
            f"emulated: times are emulated (1 s took {scale:g} s); real computing came late by {overrun:.2f} % of them"
        )
    if summary.stopped_early:
        console.print(
            f"stopped on request at step {summary.last_step}; continue with --resume {shlex.quote(str(summary.folder))}"
        )
    console.print(f"loss {summary.first_loss:.4f} → {summary.last_loss:.4f}; run folder {summary.folder}")


def summary_table(summary: RunSummary) -> Table:
    """Step time and tokens per second, predicted beside measured."""
    plan = summary.layout.plan
    tokens = plan.global_batch * plan.seq_len
    how = times_are(summary.layout.cluster)
    table = make_table("", "predicted", f"{how} (median)", f"{how} / predicted")
    predicted, measured = summary.predicted_step_seconds, summary.measured_step_seconds
    table.add_row("step time", f"{predicted:.4g} s", f"{measured:.4g} s", f"{measured / predicted:.2f}")
    table.add_row("tokens/s", f"{tokens / predicted:,.0f}", f"{tokens / measured:,.0f}", f"{predicted / measured:.2f}")
    return table
