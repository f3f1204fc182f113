"""`--strategy exhaustive`: the answer of a small space, and how a larger one is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hethub.cli import run
from hethub.planner import plan
from hethub.planner.exhaustive.shapes import excess
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from tests.cli.test_plan_input import node, write_job
from tests.oracle.question import MODEL, random_cluster

WORST = 1.02  # times the optimum, as is asked
SMALL = [(seed, 2, 6, {}) for seed in range(6)] + [
    (0, 3, 6, {}),
    (1, 3, 8, {"pp": 2}),
    (2, 3, 6, {"micro_batch": 2}),
    # The best has more microbatches in flight than by default, and does not lead by default.
    pytest.param(5, 4, 6, {}, marks=pytest.mark.slow),
    pytest.param(4, 4, 6, {"schedule": "1f1b"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seed", "size", "batch", "given"), SMALL)
def test_autos_answer_is_near_it_or_beyond_its_space(seed: int, size: int, batch: int, given: dict[str, Any]) -> None:
    asked = MODEL, random_cluster(seed, size), Batch(batch, 512, "bf16"), ConstraintsSpec.model_validate(given)
    auto = plan(*asked, with_bounds=False)
    exhaustive = plan(*asked, "exhaustive", with_bounds=False)
    assert exhaustive.strategy == "exhaustive"
    shortest = auto.best_on_point or auto.prediction  # auto's answer is the best in the mean over scenarios
    assert shortest.step_seconds <= WORST * exhaustive.prediction.step_seconds
    assert exhaustive.space_bound_seconds is not None


def answer(job: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["plan", str(job), "--strategy", strategy, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, [node(accelerators=1), node("amd", "MI250X-GCD")], 6, {})
    found, auto = (answer(job, strategy, capsys) for strategy in ("exhaustive", "auto"))
    assert found["strategy"] == "exhaustive"
    assert auto["step_seconds"] <= WORST * found["step_seconds"]
    assert found["space_bound_seconds"] is not None


def test_the_command_refuses_a_larger_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, [node(count=4), node("amd", "MI250X-GCD")], 16, {})
    assert run(["plan", str(job), "--strategy", "exhaustive"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert "10 accelerators, of at most 6" in err
    assert "Take strategy 'auto', or leave fewer plans" in err


# Layers, accelerators, batch, constraints, and what is beyond which limit.
LARGER: list[tuple[int, int, int, dict[str, Any], str]] = [
    (6, 7, 6, {}, "7 accelerators, of at most 6"),
    (6, 3, 96, {}, "global_batch 96, of at most 64"),
    (32, 4, 32, {}, "plans, of at most 3e+07"),
    (64, 6, 8, {"micro_batch": 1}, "of at most 150,000"),
    (6, 3, 6, {"schedule": "layered"}, "no plan of a schedule that is searched to its end"),
    (6, 6, 6, {"tp": 2}, "no plan that uses all accelerators"),
]


@pytest.mark.parametrize(("layers", "size", "batch", "given", "words"), LARGER)
def test_a_larger_space_is_refused_by_its_size(
    layers: int, size: int, batch: int, given: dict[str, Any], words: str
) -> None:
    asked = MODEL.replace(layers=layers), random_cluster(1, size), Batch(batch, 512, "bf16")
    constraints = ConstraintsSpec.model_validate(given)
    beyond = excess(pose(*asked, constraints))
    assert beyond is not None
    assert words in beyond
    with pytest.raises(BadInput, match="strategy 'exhaustive' times every plan of a small space") as refused:
        plan(*asked, constraints, "exhaustive")
    assert beyond in str(refused.value)
