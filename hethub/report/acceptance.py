"""What `hethub doctor --acceptance` found: a table, and a file to send in."""

import json
from collections import Counter
from pathlib import Path

from hethub.runtime.acceptance.acceptance import Acceptance
from hethub.runtime.console import make_console, make_table
from hethub.spec.documents import write_text


def print_acceptance(accepted: Acceptance) -> None:
    """A row for each check, and how many passed."""
    table = make_table("check", "where", "", "found", "reason")
    for row in accepted.rows:
        table.add_row(row.what, row.where, row.state, row.found, row.reason)
    console = make_console()
    console.print(table)
    counts = Counter(row.state for row in accepted.rows)
    console.print(", ".join(f"{counts[state]} {state}" for state in ("pass", "fail", "note", "skipped")))


def write_acceptance(accepted: Acceptance, path: Path) -> None:
    """Everything of it as JSON."""
    write_text(json.dumps(accepted.to_dict(), indent=1) + "\n", path)
