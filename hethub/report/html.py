"""A plan, or a run with its plan, as one self-contained HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from hethub.predictor import Prediction, predict
from hethub.predictor.cost.profile import ProfileSpec, assumed_speeds, load_profile
from hethub.predictor.cost.software import HETHUB, Software, hethub_software
from hethub.predictor.pipeline.timeline import Span
from hethub.predictor.predict import with_staging
from hethub.report.drawing import legend, losses, stacked, timeline
from hethub.report.page import html_table, section, write_html
from hethub.report.tables import GIB, STAGE_COLUMNS, assumed_sentence, parameter_count, show_step, stage_rows
from hethub.report.trace import times_are
from hethub.report.watching import settled_seconds, under_last_plan
from hethub.runtime.run_folder import RunFolder
from hethub.spec.cluster import load_cluster
from hethub.spec.documents import read_json
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import bind_file
from hethub.spec.lookup import load_model
from hethub.spec.plan import PlannedFor, load_plan
from hethub.spec.schedule.actions import COMPUTE, UPDATE

MOST_ROWS = 64  # ranks drawn one by one; beyond, ranks that do the same are one row
MOST_MACHINES = 256
_MOST_TRACE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run has left in its folder."""

    steps: list[dict[str, Any]]
    spans: list[Span]  # of the last step

    @property
    def step_seconds(self) -> float:
        return median(settled_seconds(self.steps))


def report_run(folder: Path, out: Path) -> None:
    """Writes the page of a run folder. Raises BadInput where the folder is none."""
    if not (folder / "plan.yaml").exists() or not (folder / "cluster.yaml").exists():
        raise BadInput(
            f"{folder}: there is no run here (plan.yaml and cluster.yaml are missing); name the folder that train printed."
        )
    plan = load_plan(folder / "plan.yaml")
    model, cluster = load_model("model.yaml", folder), load_cluster(folder / "cluster.yaml")
    layout = bind_file(folder / "plan.yaml", plan, model, cluster)
    made_for = plan.job or PlannedFor(model=model, cluster=cluster)
    run = RunFolder(folder)
    measured = Measured(steps=run.rows(), spans=last_step(_read_spans(run.trace)))
    measurements = folder / "profile.json"
    profile = load_profile(measurements) if measurements.exists() else None
    software = hethub_software(made_for.compile)
    shown = measured if measured.steps else None
    write_page(layout, shown, out, f"run {folder.name}", profile, software, made_for.reserve)


def _read_spans(path: Path) -> list[Span]:
    if not path.exists():
        return []
    trace = read_json(path, "trace", _MOST_TRACE_BYTES)
    try:
        return spans_of(trace)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadInput(f"{path}: this is no trace that hethub wrote; delete it.") from None


def spans_of(trace: Mapping[str, Any]) -> list[Span]:
    """The spans of a Chrome trace that hethub wrote."""
    streams = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    return [
        Span(e["pid"], streams[e["pid"], e["tid"]], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]


def last_step(spans: Sequence[Span]) -> list[Span]:
    """Each rank's actions from its last first action on: names repeat from step to step."""
    result: list[Span] = []
    for rank in sorted({span.rank for span in spans}):
        own = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_seconds)
        start = max(index for index, span in enumerate(own) if span.name == own[0].name)
        result += own[start:]
    return result


def write_page(
    layout: Layout,
    measured: Measured | None,
    out: Path,
    title: str,
    profile: ProfileSpec | None = None,
    software: Software = HETHUB,
    reserve: float = 0.06,
) -> None:
    """Writes the page for a layout, with what was measured of it where there is a run; `reserve`: of an accelerator's
    memory, kept free."""
    prediction = predict(layout, reserve=reserve, with_timeline=True, profile=profile, software=software)
    prediction = with_staging(prediction, layout, profile, software)
    assumed = assumed_speeds(layout.cluster, layout.plan.precision, profile, layout.plan.ranks)
    sections = [
        _summary(layout, prediction, measured, assumed),
        section("Cluster", _cluster(layout)),
        section("Plan", _plan(layout)),
        section("One step", _timeline(layout, prediction, measured)),
        section("Parts of the step", _parts(prediction)),
        section("Memory", _memory(layout, prediction, reserve)),
    ]
    if measured is not None:
        sections.append(section("Loss", losses(measured.steps)))
    write_html(out, title, sections)


def _summary(layout: Layout, prediction: Prediction, measured: Measured | None, assumed: Sequence[str]) -> str:
    model, plan = layout.model, layout.plan
    rows = [["step time", show_step(prediction, assumed)]]
    rows += [["tokens/s", f"{prediction.tokens_per_second:,.0f}"]]
    shares = {"MFU": prediction.mfu, "of the ceiling": prediction.percent_of_ceiling}
    percents = {name: percent for name, percent in shares.items() if percent is not None}
    rows += [[name, f"{percent:.1f} %"] for name, percent in percents.items()]
    rows += [["fits", "yes" if prediction.fits else "no"]]
    head = ["", "predicted"]
    if measured is not None:
        faster = prediction.step_seconds / measured.step_seconds
        head.append(f"{times_are(layout.cluster)} ({_steps(measured)})")
        rows[0].append(f"{measured.step_seconds:.4g} s")
        rows[1].append(f"{prediction.tokens_per_second * faster:,.0f}")
        for row, percent in zip(rows[2:], percents.values(), strict=False):
            row.append(f"{percent * faster:.1f} %")
        rows[-1].append("")
    what = (
        f"{model.name}, {parameter_count(model)} parameters, on {layout.cluster.name}, {layout.cluster.size} accelerators; "
        f"global batch {plan.global_batch} × {plan.seq_len} tokens, {plan.precision}, schedule {plan.schedule}."
    )
    notes = [prediction.bottleneck, *([prediction.staging.sentence()] if prediction.staging else [])]
    notes += [host.sentence() for host in prediction.assumed_hosts]
    notes += [f"{assumed_sentence(assumed)}."] if assumed else []
    notes += [] if measured is None else _own_prediction(measured, prediction)
    return f"<p>{escape(what)}</p>{html_table(head, rows)}{''.join(f'<p>{escape(note)}</p>' for note in notes)}"


def _own_prediction(measured: Measured, prediction: Prediction) -> list[str]:
    """What the run was predicted to take, where the plan's own prediction is another: `replan` counts slow ranks as slow."""
    own = measured.steps[-1].get("predicted_step_seconds")
    if own is None or f"{own:.4g}" == f"{prediction.step_seconds:.4g}":
        return []
    return [
        f"The run itself predicted {own:.4g} s a step, by what it knew then: of ranks slower than their device type, say."
    ]


def _steps(measured: Measured) -> str:
    """Which steps count: `median of 38 steps, without the first 2 and the 20 before them under another plan`."""
    counted, own = len(settled_seconds(measured.steps)), len(under_last_plan(measured.steps))
    left_out = [f"the first {own - counted}"] if own > counted else []
    left_out += [f"the {len(measured.steps) - own} before them under another plan"] if own < len(measured.steps) else []
    return f"median of {counted} steps" + (f", without {' and '.join(left_out)}" if left_out else "")


def _cluster(layout: Layout) -> str:
    """Nodes as boxes of accelerators, coloured by stage."""
    machines = [list(places) for _, places in groupby(layout.cluster.places, key=lambda place: place.machine)]
    boxes = []
    for places in machines[:MOST_MACHINES]:
        cells = "".join(_cell(layout, place.rank) for place in places)
        name = f"{places[0].node.name}: {places[0].accelerator.name} ({places[0].island})"
        boxes.append(f'<div class="node">{escape(name)}<div>{cells}</div></div>')
    more = len(machines) - MOST_MACHINES
    rest = f" {more} more nodes are not drawn." if more > 0 else ""
    grey = " What is grey is unused." if layout.plan.unused else ""
    return f'<div class="cluster">{"".join(boxes)}</div><p>A colour is a stage.{grey}{rest}</p>'


def _cell(layout: Layout, rank: int) -> str:
    assignment = layout.assignment_of.get(rank)
    if assignment is None:
        return f'<i style="background:#ddd" title="rank {rank}, unused">{rank}</i>'
    colour, stage = f"hsl({assignment.stage * 67 % 360} 45% 60%)", f"stage {assignment.stage}"
    return f'<i style="background:{colour}" title="rank {rank}, {stage}">{rank}</i>'


def _plan(layout: Layout) -> str:
    return html_table(STAGE_COLUMNS, stage_rows(layout.plan, layout.cluster))


def _timeline(layout: Layout, prediction: Prediction, measured: Measured | None) -> str:
    sides: dict[str, Sequence[Span]] = {"predicted": prediction.timeline or ()}
    how = times_are(layout.cluster)
    if measured is not None and measured.spans:
        sides[how] = measured.spans
    alike = _alike(layout)
    rows = {ranks[0]: _label(layout, ranks) for ranks in alike[:MOST_ROWS]}
    drawn = timeline(sides, rows) + legend([*COMPUTE, *UPDATE]) + _not_drawn(alike)
    return drawn + (_differences(sides, how) if how in sides else "")


def _alike(layout: Layout) -> list[list[int]]:
    """The ranks of each row of a drawing: every rank has its own, or where they are many those that do the same share
    one."""
    assignments = layout.assignments
    if len(assignments) <= MOST_ROWS:
        return [[assignment.rank] for assignment in assignments]
    found: dict[object, list[int]] = {}
    for assignment in assignments:
        replica = layout.replica(assignment.stage, assignment.replica)
        device = layout.cluster.places[assignment.rank].accelerator
        key = (assignment.stage, replica.tp, replica.micro_batch, replica.samples, device.name)
        found.setdefault(key, []).append(assignment.rank)
    return list(found.values())


def _not_drawn(alike: Sequence[Sequence[int]]) -> str:
    left = sum(map(len, alike[MOST_ROWS:]))
    return f"<p>{left} more ranks, which all do something else, are not drawn.</p>" if left else ""


def _label(layout: Layout, ranks: Sequence[int]) -> str:
    """`12 T4`, or `12 T4 x8` for eight that do the same."""
    name = f"{ranks[0]} {layout.cluster.places[ranks[0]].accelerator.name}"
    return name if len(ranks) == 1 else f"{name} x{len(ranks)}"


def _differences(sides: Mapping[str, Sequence[Span]], how: str) -> str:
    """The ten actions whose time in the run (measured or emulated) is furthest from the predicted one."""
    predicted = {(s.rank, s.name): s.stop_seconds - s.start_seconds for s in sides["predicted"]}
    both = [
        (s.rank, s.name, predicted[s.rank, s.name], s.stop_seconds - s.start_seconds)
        for s in sides[how]
        if (s.rank, s.name) in predicted
    ]
    both.sort(key=lambda row: -abs(row[3] - row[2]))
    rows = [[str(r), name, f"{a * 1e3:.2f}", f"{b * 1e3:.2f}", f"{(b - a) * 1e3:+.2f}"] for r, name, a, b in both[:10]]
    table = html_table(["rank", "action", "predicted ms", f"{how} ms", "difference ms"], rows)
    return f"<h3>Largest differences</h3>{table}"


def _parts(prediction: Prediction) -> str:
    return stacked([("step", prediction.breakdown, None)], "s") + legend(list(prediction.breakdown))


def _memory(layout: Layout, prediction: Prediction, reserve: float) -> str:
    """A bar per row, the fullest where they are too many; of ranks that do the same the fullest, since their shares of
    state may differ."""
    known = {entry.rank: entry for entry in prediction.memory}
    fullest = [(max((known[rank] for rank in ranks), key=lambda entry: entry.bytes), ranks) for ranks in _alike(layout)]
    if len(fullest) > MOST_ROWS:
        fullest.sort(key=lambda row: -row[0].bytes / row[0].limit)
    rows = [
        (_label(layout, ranks), {part: size / GIB for part, size in own.parts.items()}, own.limit / GIB)
        for own, ranks in fullest[:MOST_ROWS]
    ]
    free = f"<p>Of every limit {100 * reserve:g} % stay free.</p>"
    return stacked(rows, "GiB") + legend(list(prediction.memory[0].parts)) + free + _not_drawn([r for _, r in fullest])
