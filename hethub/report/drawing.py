"""The pictures of a report as inline SVG: timelines, bars and a curve. Pure text from plain numbers."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import Any

from hethub.predictor.pipeline.timeline import Span

WIDTH, ROW, LABEL = 960, 16, 190
MOST_MARKED = 200  # points of a curve, each with its figures
COLOURS = {
    "forward": "#4c78a8", "backward": "#72a0c8", "weight": "#a9c5df", "reduce": "#e39c37", "step": "#6a9f58", "gather": "#c9722f",
    "compute": "#4c78a8", "bubble": "#d3d3d3", "tp": "#b279a2", "pp": "#9d755d", "dp": "#e39c37", "optimizer": "#6a9f58",
    "weights": "#4c78a8", "gradients": "#72a0c8", "activations": "#e39c37", "buffers": "#b279a2", "logits": "#9d755d",
    "framework": "#bab0ac", "loss": "#4c78a8", "held-out loss": "#c9722f",
}  # fmt: skip


def colour(name: str) -> str:
    return COLOURS.get(name, "#888888")


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img">{"".join(parts)}</svg>'


def bar(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    box = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}" fill="{fill}"'
    return f"<rect {box}><title>{escape(title)}</title></rect>"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def timeline(sides: Mapping[str, Sequence[Span]], labels: Mapping[int, str]) -> str:
    """One step, one row per rank of `labels` and side ("predicted", "measured"), all on one scale that starts at 0."""
    ranks = sorted(labels)
    origins = {side: min(span.start_seconds for span in spans) for side, spans in sides.items()}
    end = max(span.stop_seconds - origins[side] for side, spans in sides.items() for span in spans)
    scale = (WIDTH - LABEL) / end
    rows = {(rank, side): index for index, (rank, side) in enumerate((r, s) for r in ranks for s in sides)}
    parts = [
        text(0, (rows[rank, side] + 0.75) * ROW, f"{labels[rank][:24]} {side}"[:36]) for rank in ranks for side in sides
    ]
    for side, spans in sides.items():
        for span in (span for span in spans if span.rank in labels):
            start, seconds = span.start_seconds - origins[side], span.stop_seconds - span.start_seconds
            x, y = LABEL + start * scale, rows[span.rank, side] * ROW + 2
            title = f"{span.name}: {seconds * 1e3:.2f} ms from {start * 1e3:.2f} ms ({side})"
            parts.append(bar(x, y, seconds * scale, ROW - 4, colour(span.name.split()[0]), title))
    height = (len(rows) + 1.5) * ROW
    parts += [text(LABEL, height - 4, "0"), text(WIDTH, height - 4, f"{end:.4g} s", "end")]
    return svg(WIDTH, height, parts)


def stacked(rows: Sequence[tuple[str, Mapping[str, float], float | None]], unit: str) -> str:
    """Bars made of parts, a row each, with a mark where a limit is given."""
    largest = max(max(sum(parts.values()), limit or 0.0) for _, parts, limit in rows)
    scale = (WIDTH - LABEL - 90) / largest
    drawn = []
    for index, (label, parts, limit) in enumerate(rows):
        x, y = float(LABEL), index * ROW + 2
        drawn.append(text(0, y + ROW * 0.65, label[:28]))
        for name, value in parts.items():
            drawn.append(bar(x, y, value * scale, ROW - 4, colour(name), f"{name}: {value:.4g} {unit}"))
            x += value * scale
        drawn.append(text(x + 4, y + ROW * 0.65, f"{sum(parts.values()):.4g} {unit}"))
        if limit is not None:
            drawn.append(bar(LABEL + limit * scale, y - 2, 1.5, ROW, "#c00000", f"limit: {limit:.4g} {unit}"))
    return svg(WIDTH, len(rows) * ROW + 6, drawn)


def legend(names: Sequence[str]) -> str:
    spots = "".join(f'<span><i style="background:{colour(name)}"></i>{escape(name)}</span>' for name in names)
    return f'<p class="legend">{spots}</p>'


def losses(rows: Sequence[Mapping[str, Any]]) -> str:
    """The loss of every step that had one and, where there is one, the held-out loss; nothing where there is none."""
    kept = {
        name: [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        for name, key in (("loss", "loss"), ("held-out loss", "eval_loss"))
    }
    lines = {name: points for name, points in kept.items() if points}
    return curve(lines) + legend(list(lines)) if lines else "<p>No step had a loss.</p>"


def curve(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Lines of (step, value) on one scale; points of a line with few are marked. First and last step stand below,
    smallest and largest value beside."""
    steps, values = zip(*(point for points in lines.values() for point in points), strict=True)
    height, first, low, high = 180, min(steps), min(values), max(values)
    bottom = height - 20
    across, up = (WIDTH - LABEL - 12) / (max(steps) - first or 1), (bottom - 16) / (high - low or 1.0)
    drawn = []
    for name, points in lines.items():
        places = [(LABEL + (step - first) * across, 8 + (high - value) * up) for step, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(places))
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour(name)}" stroke-width="2"/>')
        if len(points) <= MOST_MARKED:
            for (x, y), (step, value) in zip(places, points, strict=True):
                title = f"<title>{escape(name)} {value:.4g} behind step {step}</title>"
                drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour(name)}">{title}</circle>')
    ends = [text(LABEL - 8, 14, f"{high:.4g}", "end"), text(LABEL - 8, bottom - 4, f"{low:.4g}", "end")]
    below = [text(LABEL, height - 4, f"step {first}"), text(WIDTH, height - 4, f"step {max(steps)}", "end")]
    return svg(WIDTH, height, [*drawn, *ends, *below])


def _thinned(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the highest and the lowest point of each pixel's width, since a long run has a million points."""
    columns = [list(column) for _, column in groupby(places, key=lambda place: int(place[0]))]
    ends = [{min(column, key=itemgetter(1)), max(column, key=itemgetter(1))} for column in columns]
    return [place for both in ends for place in sorted(both)]


def scatter(points: Sequence[tuple[float, float, str, bool]], across: str, up: str) -> str:
    """Points (x, y, name, whether it is on the frontier) with axes from 0; the frontier's are joined and named."""
    height, right = 360, 1.1 * max(point[0] for point in points) or 1.0
    top = 1.1 * max(point[1] for point in points) or 1.0
    x, y = (
        (lambda value: LABEL + value / right * (WIDTH - LABEL - 120)),
        (lambda value: (1 - value / top) * (height - 40) + 8),
    )
    front = sorted(point for point in points if point[3])
    path = " ".join(f"{x(point[0]):.1f},{y(point[1]):.1f}" for point in front)
    drawn = [f'<polyline points="{path}" fill="none" stroke="{COLOURS["optimizer"]}" stroke-width="2"/>']
    for days, price, name, on_frontier in points:
        fill = COLOURS["optimizer"] if on_frontier else "#999999"
        title = f"<title>{escape(name)}: {days:.4g} {escape(across)}, {price:,.0f} {escape(up)}</title>"
        drawn.append(f'<circle cx="{x(days):.1f}" cy="{y(price):.1f}" r="4" fill="{fill}">{title}</circle>')
        if on_frontier:
            drawn.append(text(x(days) + 6, y(price) - 4, name))
    for part in (0.0, 0.5, 1.0):
        drawn.append(text(x(part * right), height - 18, f"{part * right:.4g}", "middle"))
        drawn.append(text(LABEL - 10, y(part * top) + 4, f"{part * top:,.0f}", "end"))
    axes = f'<path d="M{LABEL} {y(top):.1f}V{y(0):.1f}H{x(right):.1f}" fill="none" stroke="#888"/>'
    return svg(WIDTH, height, [axes, *drawn, text(x(right / 2), height - 2, across, "middle"), text(0, 14, up)])
