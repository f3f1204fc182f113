"""The report of a run or a plan is one self-contained page that shows both sides of every action."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hethub.planner import plan
from hethub.planner.explain.homogeneous_sum import homogeneous_parts
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.planner.result import RunnerUp
from hethub.predictor import predict
from hethub.predictor.memory.ranks import check_memory, shortage
from hethub.predictor.pipeline.timeline import Span
from hethub.report.diff import Side, diff, print_diff, side_of_layout
from hethub.report.drawing import losses
from hethub.report.explanation import print_alone, print_explanation, save_alone, shape
from hethub.report.html import Measured, last_step, report_run, spans_of, write_page
from hethub.report.tables import whether_it_fits
from hethub.report.trace import chrome_trace
from hethub.runtime.console import make_console
from hethub.runtime.run_folder import RunFolder
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec, load_job
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlannedFor, PlanSpec, load_plan
from tests.predictor.plans import TINY, cluster, uniform
from tests.support.job_files import write_job
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
    """Whatever a rank's clock says when it begins; Perfetto reads microseconds."""
    own = spans(1.0)
    later = [Span(*span[:3], span.start_seconds + 50, span.stop_seconds + 50) for span in own]
    trace = chrome_trace(later, LAYOUT.cluster, "measured")
    read = spans_of(trace)
    assert [span[:3] for span in read] == [span[:3] for span in own]
    for was, now in zip(own, read, strict=True):
        assert now[3:] == pytest.approx(was[3:], abs=1e-9)
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert drawn[0]["dur"] == pytest.approx(1e6 * (own[0].stop_seconds - own[0].start_seconds), rel=1e-3)


def test_only_the_last_step_of_a_trace_is_drawn() -> None:
    first = spans(1.0)
    later = [Span(*span[:3], span.start_seconds + 100, span.stop_seconds + 100) for span in first]
    assert last_step(first + later) == later


def test_the_page_stands_alone_and_shows_both_sides(tmp_path: Path) -> None:
    steps = [
        {"step": 1, "loss": 2.0, "step_seconds": 0.5},
        {"step": 2, "loss": None, "step_seconds": 0.7},
        {"step": 3, "loss": 1.0, "step_seconds": 0.6},
    ]
    write_page(LAYOUT, Measured(steps=steps, spans=spans(2.0)), tmp_path / "page.html", "run <one>")
    tags = Tags()
    tags.feed((tmp_path / "page.html").read_text())
    assert tags.open == []
    assert tags.outside == []
    assert tags.titles[0] == "run <one>"
    forward = [title for title in tags.titles if title.startswith("forward s0 [0, 2)")]
    assert {title.rsplit("(")[-1] for title in forward} == {"predicted)", "measured)"}
    table = (tmp_path / "page.html").read_text().split("<h3>Largest differences</h3>")[1].split("</table>")[0]
    rows = [
        [float(cell) for cell in row]
        for row in re.findall(r"<td>([\d.]+)</td><td>([\d.]+)</td><td>([+-][\d.]+)</td>", table)
    ]
    assert len(rows) == 10
    assert [row[2] for row in rows] == pytest.approx([row[1] - row[0] for row in rows], abs=0.02)
    assert rows[0][2] > 0  # twice as long
    assert [row[2] for row in rows] == sorted([row[2] for row in rows], reverse=True)


def test_a_page_has_the_measured_rates_beside_the_predicted_ones(tmp_path: Path) -> None:
    """MFU had an empty cell, though metrics.jsonl has it; of CPU cores, whose peak is assumed, 102 % was said."""
    nodes = [node.replace(accelerator=node.device.replace(source="a data sheet")) for node in LAYOUT.cluster.nodes]
    layout = bind(LAYOUT.plan, LAYOUT.model, LAYOUT.cluster.replace(nodes=tuple(nodes)))
    predicted = predict(layout)
    assert predicted.mfu is not None
    steps = [{"step": 1, "loss": 2.0, "step_seconds": 4 * predicted.step_seconds}]
    write_page(LAYOUT, Measured(steps=steps, spans=[]), tmp_path / "page.html", "run")
    assert "MFU" not in (tmp_path / "page.html").read_text()
    write_page(layout, Measured(steps=steps, spans=[]), tmp_path / "page.html", "run")
    page = (tmp_path / "page.html").read_text()
    assert f"<td>MFU</td><td>{predicted.mfu:.1f} %</td><td>{predicted.mfu / 4:.1f} %</td>" in page
    ceiling = predicted.percent_of_ceiling
    assert f"<td>of the ceiling</td><td>{ceiling:.1f} %</td><td>{ceiling / 4:.1f} %</td>" in page


def test_a_page_says_where_the_run_was_predicted_otherwise(tmp_path: Path) -> None:
    """Behind a plan for a slow rank it predicted less than log.txt and metrics.jsonl say, without a word."""
    predicted = predict(LAYOUT).step_seconds
    for own, said in ((1.5 * predicted, 1), (predicted, 0)):
        steps = [{"step": 1, "loss": 2.0, "step_seconds": 1.0, "predicted_step_seconds": own}]
        write_page(LAYOUT, Measured(steps=steps, spans=[]), tmp_path / "page.html", "run")
        page = (tmp_path / "page.html").read_text()
        assert page.count(f"The run itself predicted {own:.4g} s a step") == said


@pytest.mark.parametrize(("source", "has_interval"), [("published", True), ("assumed", False)])
def test_a_page_gives_no_interval_around_a_speed_that_nobody_has_measured(
    source: str, has_interval: bool, tmp_path: Path
) -> None:
    """As the terminal does: times may be several times off, and `80 %` said that four of five lay within a quarter."""
    made = cluster(("A100-SXM4-80GB", 1, 2))
    device = made.nodes[0].device.replace(name="card", source=source)
    made = made.replace(nodes=tuple(node.replace(accelerator=device) for node in made.nodes))
    layout = uniform(TINY, made, tp=1, pp=1, micro_batch=1, batch=4, seq=64)
    write_page(layout, None, tmp_path / "page.html", "t")
    page = (tmp_path / "page.html").read_text()
    assert ("80 %: " in page) == has_interval
    assert ("several times off" in page) != has_interval


def test_the_held_out_loss_is_drawn_beside_the_loss(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [{"step": step, "loss": 4.0 - step, "step_seconds": 0.5} for step in (1, 2, 3, 4)]
    steps[1]["eval_loss"], steps[3]["eval_loss"] = 3.5, 2.5
    write_page(LAYOUT, Measured(steps=steps, spans=[]), tmp_path / "page.html", "evaluated")
    page = (tmp_path / "page.html").read_text()
    assert "<title>held-out loss 3.5 behind step 2</title>" in page
    assert "<title>held-out loss 2.5 behind step 4</title>" in page
    assert ">step 1</text>" in page
    assert ">step 4</text>" in page
    places = {  # of the points: the eye must find them in order
        title: tuple(map(float, place))
        for *place, title in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^<]*)</title>', page)
    }
    first, last = places["held-out loss 3.5 behind step 2"], places["held-out loss 2.5 behind step 4"]
    assert first[0] == places["loss 2 behind step 2"][0]
    assert first[1] < last[1]  # SVG counts downwards


def test_the_curve_of_a_long_run_is_small_and_keeps_its_spike() -> None:
    """Every step was a point: three megabytes for 200,000 of them."""
    rows = [{"step": step, "loss": 9.0 if step == 70_001 else 1.0 + step % 2} for step in range(1, 100_001)]
    rows[30_000]["loss"] = 0.5
    drawn = losses(rows)
    assert len(drawn) < 50_000
    path = re.search(r'points="([^"]*)"', drawn)
    assert path is not None
    heights = [float(place.split(",")[1]) for place in path[1].split()]
    assert heights.count(min(heights)) == 1
    assert (min(heights), max(heights)) == (8.0, 152.0)  # the top and the bottom
    assert "9</text>" in drawn


def test_only_steps_of_the_plan_that_is_drawn_are_held_against_its_prediction(tmp_path: Path) -> None:
    """A run that went on under another plan: its first steps took ten times as long, as that plan said."""
    steps = [
        {
            "step": step,
            "loss": 1.0,
            "step_seconds": 5.0 if step < 8 else 0.5,
            "predicted_step_seconds": 4.0 if step < 8 else 0.4,
        }
        for step in range(1, 13)
    ]
    steps[7]["step_seconds"], steps[8]["step_seconds"] = (
        9.0,
        8.0,
    )  # the first two warm up, as the summary of train says too
    steps[10]["step_seconds"] = 0.51
    assert Measured(steps=steps, spans=[]).step_seconds == 0.5
    write_page(LAYOUT, Measured(steps=steps, spans=[]), tmp_path / "page.html", "resumed")
    page = (tmp_path / "page.html").read_text()
    assert "median of 3 steps, without the first 2 and the 7 before them under another plan" in page
    assert "<td>0.5 s</td>" in page


def test_a_comparison_says_how_much_faster_and_by_which_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """As a rate: four fifths of the time are 25 % faster; less than a twentieth of a percent is nothing."""
    one = Side({"digits": (0.12341, "0.1234")}, 1.0, {"compute": 0.9, "bubble": 0.1}, 2**30, None, 1000.0, ())
    two = Side(
        {"digits": (0.12342, "0.1234")}, 0.8, {"compute": 0.75, "bubble": 0.05}, 2**31, "rank 0 is full.", 1250.0, ()
    )

    def said(*sides: Side) -> str:
        print_diff(diff(*sides))
        return " ".join(capsys.readouterr().out.split())

    assert "the second is 25.0 % faster" in said(one, two)
    assert "the second is 25.0 % slower" in said(two, one)
    assert "compute -0.15 s, bubble -0.05 s" in said(one, two)
    assert "0.12341" in said(one, two)
    assert "0.12342" in said(one, two)
    assert "the second does not fit: rank 0 is full." in said(one, two)
    assert "the fullest rank needs 1.00 and 2.00 GiB" in said(one, two)
    assert "the second is 0.1 % faster" in said(one, one._replace(tokens_per_second=1001.0))
    assert "both are as fast" in said(one, one._replace(tokens_per_second=1000.4))


def test_the_fullest_rank_of_a_plan_is_compared() -> None:
    sizes = [entry.bytes for entry in predict(LAYOUT).memory]
    assert min(sizes) < side_of_layout(LAYOUT, None, 0.06).memory_bytes == max(sizes)


def test_a_plan_in_a_line_counts_equal_stages_and_leaves_out_the_rest() -> None:
    def of(rank: int, layers: int, recompute: str) -> dict[str, Any]:
        replicas = [
            {"ranks": [rank], "micro_batch": 1, "samples": 4},
            {"ranks": [rank + 1], "micro_batch": 2, "samples": 4},
        ]
        return {"layers": [[layers, layers + 1]], "recompute": recompute, "replicas": replicas}

    kinds = ["none", "none", "full", "none", "full", "none", "full"]
    stages = [of(2 * index, index, recompute) for index, recompute in enumerate(kinds)]
    said = shape(LAYOUT.plan.replace(stages=stages))
    both = "1 layer on 1 x TP 1 of micro-batch 1 and 1 x TP 1 of micro-batch 2, ZeRO 0, recompute"
    assert said == f"2 x ({both} none) | {both} full | {both} none | {both} full | 2 more"


def test_a_shorter_step_that_is_shown_alike_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` named "the shortest step as predicted" with the figure of the plan that it chose."""
    job = load_job(write_job(tmp_path))
    assert job.cluster is not None
    found = plan(job.model, job.cluster, job.spec.train.batch, job.spec.constraints, with_bounds=False)
    for factor, is_named in ((1 - 1e-9, False), (0.9, True)):
        seconds = factor * found.prediction.step_seconds
        other = RunnerUp(
            step_seconds=seconds, objective_seconds=None, slower_percent=0.0, within_interval=True, plan=found.plan
        )
        print_explanation(replace(found, best_on_point=other), make_console())
        assert ("the shortest step as predicted" in capsys.readouterr().out) == is_named


def test_a_page_and_predict_agree_on_what_fits(tmp_path: Path) -> None:
    """`reserve` of the job is kept free; the page said "fits" where `hethub predict` said that it does not."""
    most = max(entry.bytes / entry.limit for entry in predict(LAYOUT).memory)
    for reserve, fits in ((0.999 * (1 - most), "yes"), (1.001 * (1 - most), "no")):
        write_page(LAYOUT, None, tmp_path / "page.html", "plan", reserve=reserve)
        assert f"<td>fits</td><td>{fits}</td>" in (tmp_path / "page.html").read_text()


def test_a_plan_that_nearly_fills_a_rank_says_what_to_do() -> None:
    prediction = predict(LAYOUT)
    assert whether_it_fits(prediction) == "fits"
    nearly = prediction.memory[1]._replace(bytes=int(0.93 * prediction.memory[1].limit))
    text = whether_it_fits(replace(prediction, memory=(prediction.memory[0], nearly)))
    assert text.startswith("fits, by a prediction that leaves rank 1 7.0 % of its memory. Raise constraints.reserve")


def test_a_plan_that_does_not_fit_is_said_to_need_what_it_needs() -> None:
    """It said "a rank needs more than its accelerator has": not which, how much, nor what to do; `diff` gave two reasons at
    once. Both say now what `train` refuses such a plan with."""
    prediction = predict(LAYOUT)
    fullest = max(prediction.memory, key=lambda entry: entry.bytes / entry.limit)
    reserve = 1.001 * (1 - fullest.bytes / fullest.limit)
    told = shortage(LAYOUT, prediction.memory, reserve)
    assert told is not None
    assert f"rank {fullest.rank} ({fullest.accelerator}) would need {fullest.bytes / 2**30:.2f} GiB of its" in told
    assert whether_it_fits(prediction, told) == f"does not fit: {told}"
    with pytest.raises(BadInput, match=re.escape(told)):
        check_memory(LAYOUT, reserve)
    assert shortage(LAYOUT, prediction.memory, 0.999 * (1 - fullest.bytes / fullest.limit)) is None


def test_accelerators_too_few_for_a_degree_are_not_called_a_batch_too_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 16 samples each type has some, and the second has two accelerators for tp 4."""
    on = cluster(("A100-SXM4-80GB", 1, 4), ("MI250X-GCD", 1, 2))
    alone = homogeneous_parts(pose(TINY, on, Batch(16, 64, "bf16"), ConstraintsSpec(tp=4)))
    assert alone is None
    print_alone((), make_console())
    assert "for want of a sample or of accelerators for the constraints" in " ".join(capsys.readouterr().out.split())


def test_no_accelerators_name_leads_out_of_the_folder_of_what_each_does_alone(tmp_path: Path) -> None:
    [part] = homogeneous_parts(pose(TINY, cluster(("A100-SXM4-80GB", 1, 2)), Batch(8, 64, "bf16"))) or ()
    named = replace(part, accelerator="a/../../../out")
    [written] = save_alone([named], PlannedFor(model=TINY, cluster=part.cluster), tmp_path / "alone")
    assert [*tmp_path.iterdir()] == [tmp_path / "alone"]
    assert (written.parent, load_plan(written / "plan.yaml").ranks) == (tmp_path / "alone", part.plan.ranks)


def test_a_trace_of_another_plan_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path / "job"))
    assert job.cluster is not None
    assert job.plan_path is not None
    layout = bind(load_plan(job.plan_path), job.model, job.cluster)
    run = RunFolder(tmp_path / "run")
    run.start(job, layout, {}, {})
    run.trace.write_text("{}")
    run.start(job, layout, {}, {})
    assert run.trace.exists()
    other = layout.plan.replace(schedule="gpipe")
    run.write_plan(job, bind(other, job.model, job.cluster), {})
    assert not run.trace.exists()
    made_for = load_plan(run.plan).job
    assert made_for is not None
    assert made_for.cluster == job.cluster  # the plan file of a run that replans itself stands alone too


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


def test_ranks_that_are_not_drawn_are_counted_and_the_fullest_is_drawn(tmp_path: Path) -> None:
    """Eighty ranks that all do something else: the page drew the first 64 without a word, and the last is the fullest."""
    on = cluster(("A100-SXM4-80GB", 10, 8))
    replicas = [{"ranks": [rank], "micro_batch": 1, "samples": rank + 1} for rank in range(80)]
    stages = [{"layers": [[0, TINY.layers]], "replicas": replicas}]
    plan = {"version": 1, "model": TINY.name, "cluster": on.name, "global_batch": 81 * 40, "seq_len": 64}
    spec = PlanSpec.model_validate({**plan, "precision": "bf16", "schedule": "gpipe", "stages": stages})
    write_page(bind(spec, TINY, on), None, tmp_path / "page.html", "unlike")
    text = (tmp_path / "page.html").read_text()
    assert text.count("16 more ranks, which all do something else, are not drawn") == 2
    memory = text.split("<h2>Memory</h2>")[1]
    assert ">79 A100-SXM4-80GB<" in memory


def test_the_page_says_what_staging_costs_and_whose_figure_it_is(tmp_path: Path) -> None:
    on = cluster(("MI250X-GCD", 1, 1), ("A100-SXM4-80GB", 1, 1))
    said = {}
    for rate in (None, 1e-4):
        links = on.links.replace(staging=on.links.staging.replace(gbytes_per_second=rate))
        layout = uniform(TINY, on.replace(links=links), tp=1, pp=2, micro_batch=1, batch=8, seq=64)
        write_page(layout, None, tmp_path / f"{rate}.html", "staged")
        said[rate] = (tmp_path / f"{rate}.html").read_text()
    assert "through host memory at 1.2 GB/s per accelerator (a guess" in said[None]
    assert "at 0.0001 GB/s per accelerator (the cluster&#x27;s links.staging), which limits this plan" in said[1e-4]
    assert "straight between devices the step would be" in said[1e-4]
    assert "hethub has no such relay" in said[1e-4]
