"""Links from measured collectives, before anything is learned from whole steps, in which much else overlaps with them."""

import numpy as np

from hethub.predictor.calibration.fit.least_squares import link, solve
from hethub.predictor.calibration.sources.collectives import CollectiveRow, log_errors
from hethub.predictor.calibration.validation.families import leave_out
from hethub.predictor.cost.constants import Constants

LINKS = [
    link("in_node_fraction", 0.75, 0.2, upper=1.0),
    link("between_nodes_fraction", 0.75, 0.2, upper=1.0),
    link("collective_latency_seconds", 3e-5, 0.5),
]
LEAST_BYTES = 1e6  # a layer's collectives in training are larger


def rings(rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """What a ring can tell: sums in the switch (NVLS) are another algorithm, which is not priced."""
    return [row for row in rows if row.way != "NVLS" and row.num_bytes >= LEAST_BYTES]


def fit_links(base: Constants, rows: list[CollectiveRow]) -> Constants:
    """The links that price the collectives best; residuals are logarithms."""
    return solve(base, LINKS, lambda constants: log_errors(rows, constants), f_scale=0.1)


def unseen_links(base: Constants, rows: list[CollectiveRow]) -> np.ndarray:
    """Log errors of every row by links fitted without its source."""

    def estimate(train: np.ndarray, out: np.ndarray) -> np.ndarray:
        return log_errors([rows[i] for i in out], fit_links(base, [rows[i] for i in train]))

    return leave_out([row.source for row in rows], estimate)
