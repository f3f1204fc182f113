"""How far a prediction may be off: an 80 % interval from rows of families of sources that the fit had not seen."""

from collections.abc import Sequence
from math import ceil, exp

COVERAGE = 0.8


def half_width(log_errors: Sequence[float]) -> float:
    """Return the half width, in logarithms, that covers 80 % of the errors: the finite-sample quantile of conformal
    intervals."""
    errors = sorted(abs(error) for error in log_errors)
    return float(errors[min(len(errors), ceil(COVERAGE * (len(errors) + 1))) - 1])


def width_of(table: dict[str, float], known_stack: bool, known_accelerators: bool) -> float:
    """Return the half width for users who measured nothing themselves. For a known software stack it is that of errors on other
    sources' rows, for an unknown one that of families of sources left out. It is wider if an accelerator was not measured."""
    width = table["known" if known_stack else "unseen stack"]
    return width if known_accelerators else max(width, table["unseen accelerator"])


def interval(seconds: float, width: float) -> tuple[float, float]:
    """Return the 80 % interval around a prediction, given its half width in logarithms."""
    return seconds * exp(-width), seconds * exp(width)
