"""The packaged constants are what the fit's command writes today: prices have not changed behind them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hethub.predictor.calibration.fit.__main__ import read_cases, repricers_of
from hethub.predictor.calibration.fit.links import LINKS, fit_links, rings, unseen_links
from hethub.predictor.calibration.fit.steps import price
from hethub.predictor.calibration.sources.collectives import log_errors, read_collectives
from hethub.predictor.calibration.validation.families import log_measured, macro, percent
from hethub.predictor.cost.constants import packaged

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="needs the measured tables in ../shared/data")


def test_links_are_those_that_price_measured_collectives_best() -> None:
    fitted = fit_links(packaged(), rings(read_collectives(DATA / "microbenchmarks.csv"))).links
    for parameter in LINKS:
        assert packaged().links[parameter.key] == pytest.approx(fitted[parameter.key], rel=1e-3)


def test_collectives_of_a_source_left_out_are_nearer_than_by_data_sheets() -> None:
    rows = rings(read_collectives(DATA / "microbenchmarks.csv"))
    assert len(rows) == 128
    sheet = {**packaged().links, "in_node_fraction": 1.0, "between_nodes_fraction": 1.0}
    plain = percent(log_errors(rows, replace(packaged(), links=sheet)))
    unseen = percent(unseen_links(packaged(), rows))
    assert unseen.mean() == pytest.approx(packaged().residuals["collectives, source out"], abs=0.2)
    assert unseen.mean() < plain.mean()


def test_steps_are_priced_as_when_the_constants_were_fitted() -> None:
    """A change of what a plan costs changes what the constants should be: fit them again."""
    cases = read_cases(DATA)
    errors = price(repricers_of(cases, packaged()), packaged(), range(len(cases))) - log_measured(cases)
    assert np.isfinite(errors).all()
    mean, _ = macro(errors, [case.source for case in cases])
    assert mean == pytest.approx(packaged().residuals["steps, in the fit"], abs=0.1)
