"""Progress off a terminal: lines where they are due, and nothing where another rank shows them."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from hethub.predictor.memory.ranks import RankMemory
from hethub.report.tables import memory_table
from hethub.runtime.data.tokenise import _shown
from hethub.runtime.loop.display import TrainingDisplay, describe
from hethub.runtime.metrics import StepMetrics
from hethub.runtime.progress import ProgressDisplay, counted
from hethub.spec.base import show_gib


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


def test_under_mpirun_a_terminal_gets_lines_since_it_would_see_a_bar_at_the_end_only(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None)
    with ProgressDisplay("work", console=console, total=3) as display:
        display.update(1, "step 1")
        assert out.getvalue() == "step 1\n"


def test_a_line_for_so_many_steps_says_everything_of_one(monkeypatch):
    out = io.StringIO()
    display = TrainingDisplay(1, 10, every=3, num_ranks=4, console=Console(file=out, width=300))
    with display:
        lines = [display.step(metrics(step)) for step in range(1, 11)]
    assert [step for step, line in enumerate(lines, 1) if line] == [3, 6, 9, 10]
    assert out.getvalue().splitlines() == [line for line in lines if line]
    assert lines[2] == (
        "step 3/10  loss 2.5000  lr 1.00e-03  grad norm 0.750  0.500 s (predicted 0.400)  2,048 tokens/s (512 each)  "
        "MFU 31.2 %  tensors 2.00 GiB"
    )


def test_steps_of_milliseconds_are_told_apart():
    """Emulated 4.53 ms beside as many predicted stood as `0.004 s (predicted 0.005)`."""
    line = describe(replace(metrics(3), step_seconds=0.00449, predicted_step_seconds=0.00453), 10, 4)
    assert "  0.00449 s (predicted 0.00453)  " in line


def test_a_few_bytes_are_not_none():
    """`tensors 0.00 GiB` stood behind every step of a small module."""
    assert describe(replace(metrics(3), memory_bytes=20_772), 10, 4).endswith("tensors 1.9e-05 GiB")
    assert [show_gib(size) for size in (0, 2**20, 2**27, 2**30, 1.5 * 2**40)] == [
        "0.00",
        "0.00098",
        "0.12",
        "1.00",
        "1536.00",
    ]


def metrics(step):
    return StepMetrics(
        step=step, loss=2.5, tokens=1024, step_seconds=0.5, predicted_step_seconds=0.4, tokens_per_second=2048.0,
        grad_norm=0.75, lr=1e-3, memory_bytes=2**31, mfu=31.2,
    )  # fmt: skip


def test_tokenising_prints_a_line_every_tenth_of_the_way(capsys):
    with _shown(200, shows=True) as advance:
        for _ in range(40):
            advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "tokenise: 20 of 200 bytes (10 %)"


def test_ranks_that_are_shown_alike_are_one_row_of_memory():
    """Each stage of 64 ranks had seven lines of its own, for differences of a thousandth."""
    parts = [{"weights": size, "logits": 2**12} for size in (12_235 * 2**20, 12_236 * 2**20, 2**34)]
    entries = [RankMemory(rank, "A100", sum(own.values()), 2**36, own, 0, {}) for rank, own in enumerate(parts)]
    table = memory_table(SimpleNamespace(memory=entries))
    assert [next(iter(column.cells)) for column in table.columns[:5]] == [
        "0, 1",
        "A100",
        "11.95",
        "64.00",
        "weights 11.9\nlogits 3.81e-06",
    ]
    assert table.row_count == 2
