"""Progress off a terminal: lines where they are due, and nothing where another rank shows them."""

import io

import pytest
from rich.console import Console

from hethub.runtime.data.tokenise import _shown
from hethub.runtime.progress import ProgressDisplay, counted


@pytest.mark.parametrize(("shows", "printed"), [(True, "first\nsaid\n"), (False, "")])
def test_lines_are_printed_where_they_are_due(shows, printed):
    out = io.StringIO()
    with ProgressDisplay("work", console=Console(file=out), total=3, shows=shows) as display:
        display.update(1, "first")
        display.update(2)
        display.say("said")
    assert out.getvalue() == printed


@pytest.mark.parametrize(("rank", "printed"), [("0", "profiling 1/2: layers\nprofiling 2/2: links\n"), ("1", "")])
def test_only_the_first_rank_counts_aloud(monkeypatch, capsys, rank, printed):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    with counted("profiling") as progress:
        progress(0, 2, "layers")
        progress(1, 2, "links")
    assert capsys.readouterr().out == printed


def test_tokenising_prints_a_line_every_tenth_of_the_way(capsys):
    with _shown(200, shows=True) as advance:
        for _ in range(40):
            advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "tokenise: 20 of 200 bytes (10 %)"
