"""The judge of predictions: families left out, the baseline beside them, order, anchors and intervals."""

import csv
from pathlib import Path

import numpy as np
import pytest

from hethub.predictor.calibration.sources.training_steps import Case, read_table
from hethub.predictor.calibration.validation.families import (
    anchored,
    assignment,
    baseline,
    family_of,
    inside,
    interval_score,
    leave_out,
    macro,
    order,
    percent,
    quantile,
)
from hethub.predictor.calibration.validation.goals import family_out
from tests.predictor.calibration.test_validate import DATA, table


def cases(folder: Path, *changes: dict[str, object]) -> list[Case]:
    found, skipped = read_table(table(folder, *changes))
    assert not skipped
    return found


@pytest.mark.skipif(not DATA.exists(), reason="needs the measured tables in ../shared/data")
def test_every_source_is_of_one_family() -> None:
    names = {
        row["source"]
        for name in ("measured_steps.csv", "measured_steps_2.csv")
        for row in csv.DictReader((DATA / name).open())
    }
    for source in names:
        assert sum(source.startswith(tuple(begins)) for begins in assignment().values()) == 1, source
    assert {family_of(source) for source in names} == assignment().keys()


def test_a_source_that_the_file_does_not_name_is_a_family_of_its_own() -> None:
    assert family_of("MLPerf Training v9") == "NVIDIA"
    assert family_of("mine") == "mine"


def test_nothing_learns_from_the_rows_that_it_is_asked_for() -> None:
    groups = ["a", "b", "a", "c"]
    asked: list[tuple[list[int], list[int]]] = []

    def estimate(train: np.ndarray, out: np.ndarray) -> np.ndarray:
        asked.append((train.tolist(), out.tolist()))
        return out.astype(float)

    assert leave_out(groups, estimate).tolist() == [0, 1, 2, 3]
    assert asked == [([1, 3], [0, 2]), ([0, 2, 3], [1]), ([0, 1, 2], [3])]


def test_the_baseline_is_one_utilisation_and_falls_back_on_generation_maker_and_all(tmp_path: Path) -> None:
    seconds = [0.2, 0.4, 0.8]
    rows: list[dict[str, object]] = [{"step_seconds": each} for each in seconds]
    others = [{"accelerator": name} for name in ("A100-SXM4-40GB", "H100-SXM5-80GB", "MI300X")]
    found = cases(tmp_path, *rows, *others)
    predicted = np.exp(baseline(found)(np.arange(3), np.arange(6)))
    assert predicted[:4] == pytest.approx([0.4] * 4)  # the median; the other A100 has the same peak
    assert predicted[4] == pytest.approx(0.4 * 312 / 989)
    assert predicted[5] == pytest.approx(0.4 * 312 / 1307)


def test_families_count_alike() -> None:
    mean, each = macro(np.log([1.1, 1.1, 1.1, 0.7]), ["a", "a", "a", "b"])
    assert each == pytest.approx({"a": 10.0, "b": 30.0})
    assert mean == pytest.approx(20.0)


def test_only_pairs_that_differ_by_more_than_a_tenth_are_asked_for_their_order(tmp_path: Path) -> None:
    found = cases(tmp_path, *({"step_seconds": each} for each in (1.0, 1.05, 1.5, 2.0, 3.0)))
    right = order(found, np.zeros(5))
    assert (right["pairs"], right["right"], right["regret"]) == (9, 100.0, 0.0)
    swapped = order(found, np.log([1.0, 1.0, 0.6, 1.0, 1.0]))  # the third is predicted best
    assert swapped["right"] == pytest.approx(100 * 7 / 9)
    assert swapped["regret"] == pytest.approx(50.0)


def test_an_anchor_takes_away_what_all_rows_of_a_source_share() -> None:
    errors = np.log([1.5, 1.5, 1.5, 1.5, 1.5, 1.2])
    assert {source: own.tolist() for source, own in anchored(errors, ["a"] * 5 + ["b"], 1).items()} == {
        "a": [0.0] * 20  # each of five rows known, four left
    }
    uneven = np.log([1.0, 1.0, 1.0, 1.0, 1.1])
    one, three = (percent(anchored(uneven, ["a"] * 5, count)["a"]).mean() for count in (1, 3))
    assert one == pytest.approx((4 * 10 + 4 * 100 * (1 - 1 / 1.1)) / 20)  # the odd one left by four, known by one
    assert three < one


def test_interval_widths_count_families_alike() -> None:
    tens = [str(row % 10) for row in range(100)]
    assert quantile(np.arange(1, 101) / 100, tens) == pytest.approx(
        0.8, abs=0.011
    )  # the width that 80 or 81 of 100 reach
    errors = np.array([0.1] * 98 + [0.5] * 2)
    groups = ["many"] * 98 + ["few"] * 2
    assert quantile(errors, groups) == pytest.approx(0.5)
    widths = np.full(100, 0.2)
    assert inside(errors, widths, groups) == pytest.approx(50.0)
    assert interval_score(errors, widths, groups) == pytest.approx(0.4 + (0.0 + 10 * 0.3) / 2)


def test_the_worst_family_is_named() -> None:
    figures = {"family out": 15.0, "family out, baseline": 25.0, "family out: A": 10.0, "family out: B": 20.0}
    found = family_out(figures)
    assert found is not None
    assert found.sentence().endswith("Worst: B, 20.0 %.")
    assert family_out({"coverage": 80.0}) is None
