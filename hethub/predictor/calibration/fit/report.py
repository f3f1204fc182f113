"""What a fit prints: families, sources and accelerators that it had not seen, beside one utilisation per accelerator."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from hethub.predictor.calibration.evaluate import Repricer
from hethub.predictor.calibration.fit.steps import Linear, price, refit_without
from hethub.predictor.calibration.sources.training_steps import Case
from hethub.predictor.calibration.validation.families import (
    anchored,
    baseline,
    family_of,
    inside,
    interval_score,
    leave_out,
    log_measured,
    macro,
    order,
    percent,
    quantile,
    repeated,
)
from hethub.predictor.calibration.validation.goals import OF_FAMILY
from hethub.predictor.cost.constants import Constants

FINEST_WIDTHS = 60  # constant widths tried, from a hundredth of the widest error


def unseen(
    base: Constants, linear: Linear, cases: Sequence[Case], repricers: Sequence[Repricer], groups: Sequence[str]
) -> np.ndarray:
    """Log errors of every row by a fit without its group."""

    def estimate(_: np.ndarray, out: np.ndarray) -> np.ndarray:
        return price(repricers, refit_without(base, linear, cases, out), out)

    return leave_out(groups, estimate) - log_measured(cases)


def report_unseen(cases: Sequence[Case], by_family: np.ndarray, by_source: np.ndarray) -> dict[str, float]:
    """Prints all figures of errors with families and with sources left out; returns those that stay on record."""
    sources = [case.source for case in cases]
    families = [family_of(source) for source in sources]
    even = leave_out(families, baseline(cases)) - log_measured(cases)
    even_source = leave_out(sources, baseline(cases)) - log_measured(cases)
    mean, each = macro(by_family, families)
    even_mean, even_each = macro(even, families)
    print("a family of sources left out, nothing anchored: mean |error|, one utilisation beside it")
    for name in each:
        members = sorted({source for source, own in zip(sources, families, strict=True) if own == name})
        print(
            f"  {name:<15} {families.count(name):4} rows {each[name]:6.1f} % {even_each[name]:6.1f} %   "
            f"{'; '.join(member[:40] for member in members)}"
        )
    worst = max(each, key=lambda name: each[name])
    print(f"  families alike {mean:.1f} %, one utilisation {even_mean:.1f} %, ratio {mean / even_mean:.2f}; rows alike "
          f"{percent(by_family).mean():.1f} %, {percent(even).mean():.1f} %; worst family {worst}")  # fmt: skip
    by_accelerator(cases, by_family, even)
    source_mean, source_each = macro(by_source, sources)
    print(f"a source left out: {source_mean:.1f} %, one utilisation {macro(even_source, sources)[0]:.1f} %, "
          f"worst {max(source_each, key=lambda name: source_each[name])} {max(source_each.values()):.1f} %")  # fmt: skip
    figures = {
        "family out": mean,
        "family out, baseline": even_mean,
        "family out, ratio": mean / even_mean,
        "source out": source_mean,
        "source out, baseline": macro(even_source, sources)[0],
    }
    figures |= {f"{OF_FAMILY}{name}": value for name, value in each.items()}
    for count in (1, 3):
        own, plain = (
            fmean(float(percent(left).mean()) for left in anchored(errors, sources, count).values())
            for errors in (by_source, even_source)
        )
        figures |= {f"anchored by {count}": own, f"anchored by {count}, baseline": plain}
        print(f"anchored by {count}: {own:.1f} %, one utilisation {plain:.1f} %")
    figures["repeated"] = repeated(cases)
    print(f"rows that are alike in all but their time differ by {figures['repeated']:.1f} %: the floor")
    ranked = order(cases, by_family)
    print(f"order of plans in sweeps: {ranked['right']:.1f} % of {ranked['pairs']} pairs right (one utilisation "
          f"{order(cases, even)['right']:.1f} %), regret {ranked['regret']:.1f} % at worst")  # fmt: skip
    return figures | {"pairs in order": ranked["right"], "regret, worst": ranked["regret"]}


def by_accelerator(cases: Sequence[Case], errors: np.ndarray, even: np.ndarray) -> None:
    """Prints the errors with families left out by accelerator, and of AMD's together."""
    devices = [case.accelerator for case in cases]
    groups: dict[str, list[int]] = {}
    for row, device in enumerate(devices):
        groups.setdefault(device.name, []).append(row)
    amd = [row for row, device in enumerate(devices) if device.vendor == "amd"]
    for name, rows in (*sorted(groups.items()), ("all of AMD", amd)):
        print(f"    {name:<22} n {len(rows):4} {percent(errors[rows]).mean():6.1f} %, one utilisation {percent(even[rows]).mean():6.1f} %, "
              f"bias {100 * np.expm1(np.median(errors[rows])):+.0f} %")  # fmt: skip


def report_intervals(errors: np.ndarray, families: Sequence[str]) -> dict[str, float]:
    """Prints how 80 % intervals hold on families that did not set their width, beside the best constant width."""
    widths, names = np.zeros(len(errors)), np.array(families)
    for name in sorted(set(families)):
        others = names != name
        widths[names == name] = quantile(errors[others], names[others].tolist())
    covered, score = inside(errors, widths, families), interval_score(errors, widths, families)
    tried = np.linspace(0.01, 1.0, FINEST_WIDTHS) * np.abs(errors).max()
    best = min(interval_score(errors, np.full(len(errors), one), families) for one in tried)
    median = 100.0 * float(np.expm1(np.median(widths)))
    print(f"80 % intervals, widths from the other families: {covered:.0f} % of rows inside, median half width "
          f"{median:.0f} %, interval score {score:.2f} (best constant width {best:.2f})")  # fmt: skip
    return {
        "coverage": covered,
        "interval half width": median,
        "interval score": score,
        "interval score, constant": best,
    }


def as_record(figures: dict[str, Any]) -> dict[str, float]:
    """Three digits behind the point."""
    return {key: round(float(value), 3) for key, value in figures.items()}
