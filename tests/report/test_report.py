"""The report of a run or a plan is one self-contained page that shows both sides of every action."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from hethub.predictor import predict
from hethub.predictor.pipeline.timeline import Span
from hethub.report.html import Measured, last_step, report_run, spans_of, write_page
from hethub.report.trace import chrome_trace
from hethub.spec.errors import BadInput
from tests.predictor.plans import TINY, cluster, uniform
from tests.support.layouts import Case, replica, stage

LAYOUT = Case(name="pp2", stages=[stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]).layout()


class Tags(HTMLParser):
    """Counts what opens and closes, and remembers every reference to something outside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "html"):
            self.open.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        if tag != "html":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def spans(seconds: float) -> list[Span]:
    timeline = predict(LAYOUT, with_timeline=True).timeline
    assert timeline is not None
    return [Span(*span[:3], span.start_seconds * seconds, span.stop_seconds * seconds) for span in timeline]


def test_a_trace_read_back_holds_the_same_spans() -> None:
    read = spans_of(chrome_trace(spans(1.0), ["a", "b"], "measured"))
    assert [span[:3] for span in read] == [span[:3] for span in spans(1.0)]


def test_only_the_last_step_of_a_trace_is_drawn() -> None:
    first = spans(1.0)
    later = [Span(*span[:3], span.start_seconds + 100, span.stop_seconds + 100) for span in first]
    assert last_step(first + later) == later


def test_the_page_stands_alone_and_shows_both_sides(tmp_path: Path) -> None:
    steps = [
        {"loss": 2.0, "step_seconds": 0.5},
        {"loss": None, "step_seconds": 0.7},
        {"loss": 1.0, "step_seconds": 0.6},
    ]
    write_page(LAYOUT, Measured(steps=steps, spans=spans(2.0)), tmp_path / "page.html", "run <one>")
    tags = Tags()
    tags.feed((tmp_path / "page.html").read_text())
    assert tags.open == []
    assert tags.outside == []
    assert tags.titles[0] == "run <one>"
    forward = [title for title in tags.titles if title.startswith("forward s0 [0, 2)")]
    assert {title.rsplit("(")[-1] for title in forward} == {"predicted)", "measured)"}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run here"):
        report_run(tmp_path, tmp_path / "page.html")


def test_a_large_cluster_is_drawn_whole_with_a_row_for_those_that_do_the_same(tmp_path: Path) -> None:
    """600 accelerators in two stages of unlike makes: neither make is cut off, and the page stays small."""
    on = cluster(("MI250X-GCD", 35, 8), ("A100-SXM4-80GB", 40, 8))
    layout = uniform(TINY.replace(layers=2), on, tp=4, pp=1, micro_batch=1, batch=150, seq=64, zero=1)
    write_page(layout, None, tmp_path / "page.html", "many")
    text = (tmp_path / "page.html").read_text()
    assert "0 MI250X-GCD x280 predicted" in text
    assert "280 A100-SXM4-80GB x320 " in text
    assert text.count('<div class="node">') == 75
    assert len(text) < 300_000
