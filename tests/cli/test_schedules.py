"""Plans of every schedule as users train them: the same losses, and a trace of what was planned."""

import json
from pathlib import Path
from typing import Any

import pytest

from hethub.spec.cluster import load_cluster
from hethub.spec.layout.bind import bind
from hethub.spec.layout.execution import actions
from hethub.spec.lookup import load_model
from hethub.spec.plan import load_plan
from tests.support.command import one, ranks
from tests.support.job_files import plan, write_job

FIRST = {"replicas": [{"ranks": [0, 1], "micro_batch": 2, "samples": 8}]}
SECOND = {
    "replicas": [{"ranks": [2], "micro_batch": 2, "samples": 5}, {"ranks": [3], "micro_batch": 1, "samples": 3}],
    "zero": 2,
}


def stages(schedule: str) -> list[dict[str, Any]]:
    """TP 2, then unlike replicas that reduce every round, in two chunks where the schedule has them."""
    if schedule in ("interleaved", "ministages"):
        chunks: list[list[list[int]]] = [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]
    else:
        chunks = [[[0, 2]], [[2, 4]]]
    return [{"layers": layers, **rest} for layers, rest in zip(chunks, (FIRST, SECOND), strict=True)]


def trained(folder: Path, schedule: str) -> tuple[list[float], dict[int, list[str]]]:
    """The losses of two steps and, by rank, the names of its actions in the trace."""
    job = write_job(folder, plan_file=plan(stages(schedule), schedule=schedule), train={"steps": 2})
    for ended in ranks(4, "train", job, "--run-dir", folder / "run", cwd=folder):
        assert ended.exit_code == 0, ended.stderr
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    events = json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]
    names: dict[int, list[str]] = {}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        names.setdefault(event["pid"], []).append(event["name"])
    return [row["loss"] for row in rows], names


@pytest.fixture(scope="module")
def losses_of_1f1b(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained(tmp_path_factory.mktemp("reference"), "1f1b")[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "ministages", "layered", "zero_bubble"])
def test_every_schedule_trains_as_it_was_planned(tmp_path: Path, schedule: str, losses_of_1f1b: list[float]) -> None:
    folder = tmp_path
    losses, names = trained(folder, schedule)
    assert losses == pytest.approx(losses_of_1f1b, rel=1e-5)
    layout = bind(
        load_plan(folder / "run" / "plan.yaml"), load_model("model.yaml", folder), load_cluster(folder / "cluster.yaml")
    )
    for assignment in layout.assignments:
        planned = [action.name for action in actions(layout, assignment.stage, assignment.replica)]
        steps = len(names[assignment.rank]) // len(planned)
        assert names[assignment.rank] == planned * steps


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "zero_bubble", "stages": [{**stages("1f1b")[0], "recompute": "full"}, stages("1f1b")[1]]}, "recompute: full"),
        ({"schedule": "layered", "stages": stages("ministages")}, "schedule layered takes one chunk of layers per stage; got 2"),
        ({"schedule": "interleaved", "stages": stages("1f1b")}, "interleaved takes two or more chunks"),
        ({"schedule": "ministages", "stages": [{"layers": [[0, 4], [4, 4]], **FIRST}]}, "2 chunks are more than this stage's layers fill"),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    job = write_job(tmp_path, plan_file=plan(**changes))
    ended = one(ranks(1, "predict", job, cwd=tmp_path))
    assert ended.exit_code == 2
    assert expected in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
