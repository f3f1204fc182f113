"""Before training, where makers meet: a device of each type is held against the formulas, once for its versions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hethub.communicator import Rendezvous
from hethub.kernels.device import Device
from hethub.runtime.launch.consensus import all_gather, consensus
from hethub.runtime.launch.preflight import Facts
from hethub.runtime.measure.measurement_cache import cache_folder, device_name, keep, versions
from hethub.runtime.parity.check import check_device
from hethub.runtime.parity.row import Row
from hethub.spec.documents import read_json
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import Job

CHECKING_SECONDS = 1800.0  # how long ranks wait for those that compute; a dead one is noticed by the watch


def check_makers(meeting: Rendezvous, job: Job, device: Device, facts: Sequence[Facts]) -> list[str]:
    """What is to be said of each type of device, the same on every rank; nothing where all are of one maker.

    Raises RunFailed on every rank where a device computes wrongly, unless the job only wants it reported.
    """
    if job.spec.parity == "never" or len({own.vendor for own in facts}) < 2:
        return []
    first: dict[tuple[str, str], int] = {}
    for own in facts:
        first.setdefault((own.vendor, own.device), own.rank)
    checks = meeting.rank in first.values()
    own_lines = consensus(
        meeting, "parity", lambda: _compare(job, device) if checks else [], patience_seconds=CHECKING_SECONDS
    )
    return [line for lines in all_gather(meeting, "parity's lines", own_lines) for line in lines]


def _compare(job: Job, device: Device) -> list[str]:
    """Lines on this rank's device. Raises RunFailed where it computes wrongly and the job is to stop then."""
    rows, unsaved = remembered(job, device)
    wrong = [f"{row.what} is {row.found or 'wrong'} off: {row.reason}" for row in rows if row.state == "fail"]
    if wrong and job.spec.parity == "stop":
        raise RunFailed(
            f"{device.name} does not compute what the formulas say: {'; '.join(wrong)}. `hethub doctor --acceptance` shows all that was "
            "compared; parity: report in the job trains all the same."
        )
    notes = [f"{row.what}: {row.found} {row.reason}" for row in rows if row.state == "note"]
    lines = [f"warning: {device.name}: {text}" for text in (*wrong, *notes)]
    most = max(row.figures["noises"] for row in rows if "noises" in row.figures)
    held = f"{device.name} computes what the formulas say, within {most:.2g} of its rounding noise"
    return [*([] if wrong else [held]), *lines, *([f"warning: {unsaved}"] if unsaved else [])]


def remembered(job: Job, device: Device) -> tuple[list[Row], str | None]:
    """The rows of this device for the job, from the cache where it has passed with these versions; and what to tell the
    user where they cannot be kept."""
    train = job.spec.train
    facts = {
        "device": device_name(device), **versions(), "model": job.model.to_dict(), "train": train.to_dict(),
        "document_mask": job.spec.data.document_mask,
    }  # fmt: skip
    name = "".join(
        letter if letter.isalnum() else "_" for letter in f"{device_name(device)}-{job.model.name}-{train.precision}"
    )
    path = cache_folder() / "parity" / f"{name}.json"
    if (known := _read(path, facts)) is not None:
        return known, None
    rows = check_device(job.model, train, device, masks_documents=job.spec.data.document_mask)
    device.release_memory()
    if any(row.state == "fail" for row in rows):
        return rows, None  # looked at again, once something was done about it
    return rows, keep(path, {"facts": facts, "rows": [row.to_dict() for row in rows]}, "what devices computed is")


def _read(path: Path, facts: dict[str, Any]) -> list[Row] | None:
    if not path.exists():
        return None
    try:
        data = read_json(path, "cache")
        return [Row(**row) for row in data["rows"]] if data["facts"] == facts else None
    except (BadInput, KeyError, TypeError):  # of another version, or damaged: computed anew, and written over
        return None
