"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hethub.predictor.pipeline.timeline import Span
from hethub.spec.cluster import ClusterSpec
from hethub.spec.documents import write_text


def times_are(cluster: ClusterSpec) -> str:
    """What a run's times on this cluster are: measured, or emulated where the accelerators are emulated."""
    return "emulated" if cluster.emulated else "measured"


def chrome_trace(spans: Iterable[Span], cluster: ClusterSpec, label: str) -> dict[str, Any]:
    """The trace with one process per rank and one row per stream; times in microseconds from the first span.

    `label` says where the times come from (predicted, measured, emulated).
    """
    spans = list(spans)
    origin = min((span.start_seconds for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        name = f"rank {rank} ({cluster.places[rank].accelerator.name}), {label}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
    streams = {key: row for row, key in enumerate(sorted({(span.rank, span.stream) for span in spans}))}
    for (rank, stream), row in streams.items():
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": stream}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": label,
                "pid": span.rank,
                "tid": streams[span.rank, span.stream],
                "ts": (span.start_seconds - origin) * 1e6,
                "dur": (span.stop_seconds - span.start_seconds) * 1e6,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(trace: dict[str, Any], path: Path) -> None:
    write_text(json.dumps(trace, allow_nan=False) + "\n", path)
