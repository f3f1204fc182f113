"""Corrections by one's own measurements, for `--calibrate FILE`: a table of steps, or what a run has written.

A table corrects what its rows can tell: the factor of their software stack, which holds for every accelerator, and the
speed of their own accelerators, which says nothing of others. Both begin at what is known and are moved by as much as
the rows agree (a MAP estimate): one row moves less than ten. What a run measured of its device types counts as it is.
"""

from collections.abc import Iterable
from math import log
from pathlib import Path
from statistics import fmean

import numpy as np

import hethub
from hethub.predictor.calibration.evaluate import Repricer, evaluate
from hethub.predictor.calibration.fit.least_squares import scales, solve, stack
from hethub.predictor.calibration.sources.training_steps import Case, read_table
from hethub.predictor.cost.constants import Constants, packaged, scales_key
from hethub.predictor.cost.intervals import half_width, width_of
from hethub.predictor.cost.layer import LayerCost
from hethub.predictor.cost.profile import LAYER_SHAPE, ProfileSpec, load_profile
from hethub.predictor.cost.profiled_layer import estimated_device
from hethub.predictor.cost.software import HETHUB, Software, hethub_software
from hethub.spec.accelerator import AcceleratorSpec, Precision, catalogue
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, asked_by
from hethub.spec.model import ModelSpec

NOISE = 0.05  # of a logarithm: what one row is trusted to
STACK_SIGMA = 0.2  # of a logarithm: how far sources lie apart that ran alike
ACCELERATOR_SIGMA = 0.1  # of a logarithm, as in the fit


def is_of_run(path: Path) -> bool:
    """Whether a calibration file is what a run has written, a profile, and no table of steps."""
    return path.suffix == ".json"


def calibrated(path: Path) -> Constants:
    """The packaged constants with a calibration file's corrections. Raises BadInput where it is none."""
    if not is_of_run(path):
        return Calibration(path).constants
    run = load_profile(path)
    with asked_by(path):
        run.check_version()
    return _with_speeds(packaged(), run)


class Calibration:
    """A table of measured steps. Raises BadInput where it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cases = [case for case in self._read() if not case.suspect]
        self.constants = corrected(packaged(), self._cases)  # the packaged ones with its corrections

    def _read(self) -> list[Case]:
        cases, skipped = read_table(self.path)
        if skipped:
            raise BadInput(
                f"{self.path}, row {skipped[0]['id']}: {skipped[0]['why']}. Every row of a calibration counts; mend it or take it out."
            )
        if not any(not case.suspect for case in cases):
            raise BadInput(f"{self.path}: there is no row to calibrate by; give one measured step at least.")
        return cases

    def profile(
        self, model: ModelSpec, cluster: ClusterSpec, batch: tuple[int, int, Precision], software: Software = HETHUB
    ) -> ProfileSpec:
        """Its corrections as a profile of the cluster's accelerators for a job of `batch`: sequences, tokens of each,
        and the precision; `software` is hethub as the job has it run.

        Raises BadInput where another model was measured: what its layers tell of this one's nobody has shown.
        """
        for case in self._cases:
            _check_model(self.path, case, model)
        devices = {node.device.name: node.device for node in cluster.nodes}
        largest, seq_len, precision = batch
        estimates = [
            estimated_device(
                model, device, seq_len, precision, largest, self.constants, self._width(device, precision), software
            )
            for device in devices.values()
        ]
        about = {"date": "", "hethub": hethub.__version__, "software": f"calibrated by {self.path.name}"}
        return ProfileSpec(**about, model=model, devices=tuple(estimates))

    def _width(self, device: AcceleratorSpec, precision: Precision) -> float:
        """The half width of predictions on an accelerator: where hethub's steps on it are among the rows, as after one
        known row of a source, or as these lie apart from their predictions and from each other; else as without
        the table."""
        table, math = packaged().interval, HETHUB.math_precision(precision)
        own = [
            log(evaluate(case, self.constants).seconds / case.measured_seconds)
            for case in self._cases
            if case.software.stack == HETHUB.stack and _key(case) == scales_key(device.name, math)
        ]
        if own:
            # Few rows pull the correction to themselves, so what is still off tells less than what the others say.
            others = ((sum(own) - error) / max(1, len(own) - 1) for error in own)
            apart = [error - mean for error, mean in zip(own, others, strict=True)]
            return max(table["row known"], half_width(own), half_width(apart))
        return width_of(table, HETHUB.stack in self.constants.stacks, packaged().knows(device.name, math))


def corrected(constants: Constants, cases: Iterable[Case]) -> Constants:
    """The constants that price measured steps best, moved from what they are no further than the rows ask for."""
    cases = list(cases)
    repricers = [Repricer(case, constants) for case in cases]
    measured = np.log([case.measured_seconds for case in cases])
    stacks = sorted({case.software.stack for case in cases})
    keys = sorted({_key(case) for case in cases})
    parameters = [stack(name, constants.stacks.get(name, 1.0), STACK_SIGMA) for name in stacks]
    parameters += scales("accelerators", keys, ACCELERATOR_SIGMA, None)

    def residuals(tried: Constants) -> np.ndarray:
        return np.log([repricer.seconds(tried) for repricer in repricers]) - measured

    return solve(constants, parameters, residuals, f_scale=NOISE)


def _key(case: Case) -> str:
    return scales_key(case.accelerator.name, case.software.math_precision(case.layouts[0].plan.precision))


def _with_speeds(constants: Constants, run: ProfileSpec) -> Constants:
    """The constants with each measured device type slower or faster by what its layers took, over what they should."""
    ratios: dict[str, list[float]] = {}  # bf16 and fp16 share their scales
    for device in run.devices:
        spec = catalogue().get(device.accelerator)
        if spec is None:  # no row is of it: one that the job describes, or ranks told apart from their device type's
            continue
        own, ran = ratios.setdefault(scales_key(spec.name, device.precision), []), hethub_software(device.compiled)
        for timing in device.layers:
            cost = LayerCost(run.model, spec, timing.seq_len, device.precision, ran, constants)
            expected = cost.layer(timing.micro_batch, timing.tp).total
            own.append(log((timing.forward_seconds + timing.backward_seconds) / expected))
    accelerators = dict(constants.accelerators)
    for key, own in ratios.items():
        known = constants.of_accelerator(key)
        accelerators[key] = {**known, "log_scale": known.get("log_scale", 0.0) + fmean(own)}
    return Constants(**{**constants.to_dict(), "accelerators": accelerators})


def _check_model(path: Path, case: Case, model: ModelSpec) -> None:
    theirs, seq_len = case.layouts[0].model, case.layouts[0].plan.seq_len
    if (model.sliding_window or seq_len) >= seq_len:  # no token is beyond it
        model = model.replace(sliding_window=None)
    for key in LAYER_SHAPE:
        if getattr(theirs, key) != getattr(model, key):
            raise BadInput(
                f"{path}, row {case.id}: it measured a model with {key} {getattr(theirs, key)}, but model '{model.name}' has "
                f"{getattr(model, key)}; give rows of this model (its number of layers may differ), or leave --calibrate out."
            )
