"""Ranks of this machine that hethub starts by itself, where no launcher has."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hethub.communicator.joining.islands import Islands
from hethub.kernels.device import VISIBLE_DEVICES, all_devices
from hethub.spec.errors import RunFailed
from hethub.spec.network import TOKEN_VARIABLE

_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "TORCHELASTIC_")
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HETHUB_ISLANDS")
CPU_RANKS = 2  # beside devices: an island of their own, which the bridge joins
ALONE_ON_CPUS: Islands = ((0, 1), (2,))


def environments(num_devices: int, num_cpus: int, islands: Islands | None = None) -> list[dict[str, str]]:
    """What each rank finds in its environment: the devices' first, then ranks that see none."""
    size, port = num_devices + num_cpus, _free_port()
    base = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) and k not in _PLACE}
    base |= {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    base[TOKEN_VARIABLE] = secrets.token_hex(16)
    if islands is not None:
        base["HETHUB_ISLANDS"] = "|".join(",".join(map(str, island)) for island in islands)
    hidden = {**dict.fromkeys(VISIBLE_DEVICES, ""), "OMP_NUM_THREADS": "1"}  # one core for a CPU rank
    return [
        {**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **(hidden if rank >= num_devices else {})}
        for rank in range(size)
    ]


def run(words: Sequence[str], places: Sequence[Mapping[str, str]], *, timeout_seconds: float) -> tuple[int, str, str]:
    """Runs `python -m WORDS` once for each environment; the exit code of the first that failed (0: none), the first
    rank's standard output, and what all wrote to standard error. None of them outlives the call."""
    command = [sys.executable, "-P", "-m", *words]
    ranks = [
        subprocess.Popen(
            command, env=dict(place), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for place in places
    ]  # fmt: skip
    try:
        with ThreadPoolExecutor(len(ranks)) as readers:  # a rank that nobody reads from stands still behind a full pipe
            told = list(readers.map(lambda rank: rank.communicate(timeout=timeout_seconds), ranks))
    except subprocess.TimeoutExpired:
        return 1, "", f"not through within {timeout_seconds:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    code = next((rank.returncode for rank in ranks if rank.returncode), 0)
    return code, told[0][0], "".join(error for _, error in told)


def start_here(*words: str) -> None:
    """Runs `hethub WORDS` on ranks of this machine: one for each device and two on the CPU, or on CPUs alone three in two
    islands. Rank 0 speaks. Raises RunFailed where one failed."""
    devices = len(all_devices())
    places = environments(devices, CPU_RANKS) if devices else environments(0, 3, ALONE_ON_CPUS)
    command = [sys.executable, "-P", "-m", "hethub", *words]
    ranks = [
        subprocess.Popen(command, env=place, stdout=None if rank == 0 else subprocess.DEVNULL)
        for rank, place in enumerate(places)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.terminate()
    if code := next((code for code in codes if code), 0):
        raise RunFailed(f"the acceptance test ended with exit code {code}; what failed is said above.")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
