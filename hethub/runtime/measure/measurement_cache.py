"""What a rank measured of itself, kept in a cache folder for its device, model and versions."""

import json
import os
import platform
import socket
from pathlib import Path
from typing import Any

import torch

import hethub
from hethub.kernels.device import Device
from hethub.predictor.cost.profile import DeviceProfile
from hethub.spec.documents import parse_json, write_whole
from hethub.spec.errors import BadInput
from hethub.spec.job import TrainSpec
from hethub.spec.model import ModelSpec


class MeasurementCache:
    """Where a rank keeps what it measured: a file for its place on the host, model, precision and sequence length."""

    def __init__(
        self, model: ModelSpec, train: TrainSpec, device: Device, local_rank: int, size: int, reserve: float
    ) -> None:
        self._facts = {
            "device": device_name(device), **versions(), "model": model.to_dict(), "batch": train.global_batch,
            "ranks": size, "compile": train.compile, "reserve": reserve,
        }  # fmt: skip
        place = f"{socket.gethostname()}-{local_rank}-{model.name}-{train.precision}-{train.seq_len}"
        self.path = cache_folder() / "measured" / f"{place.replace(os.sep, '_')}.json"

    def load(self) -> DeviceProfile | None:
        """What was measured; None where nothing was, by other versions, or where it cannot be reached. Raises BadInput
        for another device's."""
        try:
            content = self.path.read_bytes()
        except OSError:  # measured anew; whether that can be kept, `save` says
            return None
        try:
            data = parse_json(content, str(self.path), "cache")
            facts, profile = data["facts"], DeviceProfile.model_validate(data["profile"])
            device = facts.get("device")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{self.path}: this cache of measurements cannot be read ({error}); delete it.") from None
        if device != self._facts["device"]:
            raise BadInput(
                f"{self.path}: these measurements are of another device, {device}; this rank has {self._facts['device']}. "
                "Delete the file, name another folder in HETHUB_CACHE, or set measure: never."
            )
        return profile if facts == self._facts else None

    def save(self, profile: DeviceProfile) -> str | None:
        """Keeps the measurements, whole or not at all; where it cannot, what to tell the user, for the run goes on."""
        return keep(self.path, {"facts": self._facts, "profile": profile.to_dict()}, "measurements are")


def keep(path: Path, data: dict[str, Any], what: str) -> str | None:
    """Writes a file of the cache, whole or not at all; where it cannot, what to tell the user of `what`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        return (
            f"{what} not remembered: {path.parent} cannot be written ({error.strerror}); name a folder that "
            "can be in HETHUB_CACHE."
        )
    return None


def cache_folder() -> Path:
    """HETHUB_CACHE, or hethub's folder in the user's cache. Raises BadInput where there is neither."""
    if named := os.environ.get("HETHUB_CACHE"):
        return Path(named)
    users = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if users.is_absolute():  # else it is to be ignored, as its specification says
        return users / "hethub"
    try:
        return Path.home() / ".cache" / "hethub"
    except RuntimeError:
        raise BadInput(
            "this user has no home folder for hethub's cache; name a folder for it in HETHUB_CACHE."
        ) from None


def versions() -> dict[str, str]:
    """Return the versions of all that computes. Figures measured under other versions are not used."""
    return {"hethub": hethub.__version__, "torch": torch.__version__, "python": platform.python_version()}


def device_name(device: Device) -> str:
    """What the maker calls this rank's device; of a CPU, its model."""
    if device.is_gpu:
        return device.name
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
