"""How far a prediction may be off: an 80 % interval from residuals of rows that the fit had not seen."""

from collections.abc import Sequence
from math import ceil, exp

COVERAGE = 0.8
ENOUGH_ROWS = 10  # of one stack, for a width of its own


def half_width(log_errors: Sequence[float]) -> float:
    """The half width, in logarithms, that covers 80 % of the errors; the finite-sample quantile of conformal
    intervals."""
    errors = sorted(abs(error) for error in log_errors)
    return float(errors[min(len(errors), ceil(COVERAGE * (len(errors) + 1))) - 1])


def widths(
    log_errors: Sequence[float],
    stacks: Sequence[str],
    unseen_stack: Sequence[float],
    unseen_accelerator: Sequence[float],
) -> dict[str, float]:
    """The widths by software stack, of all known ones, and what an unmeasured stack or accelerator adds."""
    found = {"known": half_width(log_errors)}
    for stack in sorted(set(stacks)):
        own = [error for error, name in zip(log_errors, stacks, strict=True) if name == stack]
        if len(own) >= ENOUGH_ROWS:
            found[f"stack {stack}"] = half_width(own)
    found["unseen stack"] = half_width(unseen_stack)
    found["unseen accelerator"] = half_width(unseen_accelerator)
    return found


def interval(
    seconds: float, table: dict[str, float], stack: str, known_stack: bool, known_accelerators: bool
) -> tuple[float, float]:
    """The 80 % interval around a prediction; independent sources of error add in squares."""
    width = table.get(f"stack {stack}", table["known"]) if known_stack else table["unseen stack"]
    if not known_accelerators:
        width = (width**2 + table["unseen accelerator"] ** 2) ** 0.5
    return seconds * exp(-width), seconds * exp(width)
