"""A device against the formulas: a row for each operator, layer, head, optimizer step and property of its arithmetic."""

import math
from collections.abc import Callable

from hethub.kernels.device import Device
from hethub.runtime.parity.faults import changed, known_faults
from hethub.runtime.parity.formulas import Formulas
from hethub.runtime.parity.noise import FAILS, PASSES, Measured, worst
from hethub.runtime.parity.probes import probes
from hethub.runtime.parity.row import Row, State
from hethub.runtime.parity.subjects import Subject, subjects
from hethub.spec.job import TrainSpec
from hethub.spec.model import ModelSpec

Progress = Callable[[str], None]


def check_device(
    model: ModelSpec,
    train: TrainSpec,
    device: Device,
    *,
    masks_documents: bool = False,
    progress: Progress = lambda what: None,
) -> list[Row]:
    """Every row, operators first. At most PASSES noises pass; above FAILS a row fails; between them it is a note.

    What does not pass is named: results that are others each time, the known fault whose formulas the device's results fit, else
    the output that is furthest off.
    """
    rows: list[Row] = []
    for subject in subjects(model, train, masks_documents=masks_documents):
        progress(subject.name)
        suspects = [row.what for row in rows if row.state == "fail"] if subject.joins else []
        rows.append(_row(subject, device, suspects))
    return [*rows, *probes(device, train.precision)]


def _row(subject: Subject, device: Device, suspects: list[str]) -> Row:
    measured = Measured(subject, device.torch_device)
    output, error = worst(measured.errors(Formulas()))
    other, unsteady = worst(measured.unsteady)
    furthest = max(error, unsteady)
    state: State = "pass" if furthest <= PASSES else "note" if furthest <= FAILS else "fail"
    reason = ""
    if state != "pass" and suspects:
        reason = f"follows from {', '.join(suspects)}"
    elif state != "pass" and PASSES < unsteady < math.inf:
        reason = f"the same inputs gave other results a second time: {other}"
    elif state != "pass":
        reason = _cause(measured) or f"furthest off: {output}"
    return Row(
        what=subject.name, where=device.name, state=state, found=f"{furthest:.3g} noises", reason=reason,
        figures={"noises": min(furthest, 1e30)},
    )  # fmt: skip


def _cause(measured: Measured) -> str:
    """The known fault that fits the device's results within its noise; empty where none does."""
    fitting = []
    for fault in known_faults():
        if changed(fault) in measured.subject.uses:
            _, error = worst(measured.errors(fault.formulas))
            if error <= PASSES:
                fitting.append((error, fault.name))
    return min(fitting)[1] if fitting else ""
