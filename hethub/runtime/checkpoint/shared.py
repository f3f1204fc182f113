"""The check that all ranks see one checkpoint folder."""

import secrets
import socket
import time
from pathlib import Path

from hethub.communicator import World
from hethub.runtime.run_claim import UNWRITABLE
from hethub.spec.errors import BadInput

_POLL_SECONDS = 0.2


def require_shared(folder: Path, world: World, patience_seconds: float = 10.0) -> None:
    """Makes `folder` and returns when every rank sees it and can write there; all ranks call it together.

    A network file system may show a new file late, so a rank looks for it for `patience_seconds`. Raises BadInput on
    all ranks, naming those that do not see it.
    """
    token = secrets.token_hex(8)
    fault = _write_probe(folder, token) if world.rank == 0 else None
    token, fault = world.all_gather_objects((token, fault))[0]
    if fault is not None:
        raise BadInput(f"checkpoints go to {folder}, but rank 0 {fault}. {UNWRITABLE}")
    fault = _look(folder, token, world.rank, patience_seconds)
    answers = world.all_gather_objects((socket.gethostname(), fault))
    if world.rank == 0:  # all ranks have looked; whatever else is there was left by ranks that were killed
        for probe in folder.glob(_probe(folder, "*").name):
            probe.unlink(missing_ok=True)
    failing = [f"rank {rank} ({host}) {fault}" for rank, (host, fault) in enumerate(answers) if fault is not None]
    if failing:
        raise BadInput(
            f"checkpoints go to {folder}, which every rank must see and be able to write to, but {'; '.join(failing)}. "
            "Choose a run folder (--run-dir) on a file system that all nodes share."
        )


def _probe(folder: Path, token: str) -> Path:
    return folder / f".probe-{token}"


def _write_probe(folder: Path, token: str) -> str | None:
    """None, or why this rank cannot write to `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder, token).touch()
    except OSError as error:
        return f"cannot write there ({error.strerror})"
    return None


def _look(folder: Path, token: str, rank: int, patience_seconds: float) -> str | None:
    """None, or why this rank cannot use `folder`."""
    deadline = time.monotonic() + patience_seconds
    while not _probe(folder, token).exists():
        if time.monotonic() > deadline:
            return "does not see what rank 0 wrote there"
        time.sleep(_POLL_SECONDS)
    own = f"{token}-{rank}"
    fault = _write_probe(folder, own)
    _probe(folder, own).unlink(missing_ok=True)
    return fault
