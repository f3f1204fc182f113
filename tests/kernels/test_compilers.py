"""The staging kernels' source through the makers' own compilers, for every architecture that those at hand know."""

import ctypes
import importlib.util
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hethub.kernels.sources import COMPILE_OPTIONS, NAMES, source

INSTALL = "pip install 'hethub[compilers]'"
# Compilers of 2022 do not know these; what they say then.
UNKNOWN = re.compile(
    r"invalid target ID|unsupported HIP gpu architecture|unknown target CPU|cannot find ROCm device library"
)


@cache
def nvrtc_libraries() -> list[tuple[Any, list[int]]]:
    """Every NVRTC of NVIDIA's wheels (the compiler that CuPy uses), with the architectures it knows."""
    spec, found = importlib.util.find_spec("nvidia"), []
    for folder in (spec.submodule_search_locations or []) if spec is not None else ():
        for path in sorted(Path(folder).rglob("libnvrtc.so*")):
            library, count = ctypes.CDLL(str(path)), ctypes.c_int()
            assert library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
            known = (ctypes.c_int * count.value)()
            assert library.nvrtcGetSupportedArchs(known) == 0
            found.append((library, list(known)))
    return found


def compiled(target: str, *options: str) -> tuple[Any, ctypes.c_void_p, ctypes.c_size_t]:
    """An NVRTC that knows the target, the program that it has compiled, and a place for sizes."""
    nvrtc = next((library for library, known in nvrtc_libraries() if int(target.rpartition("_")[2]) in known), None)
    if nvrtc is None:
        pytest.skip(f"no NVRTC here knows {target}: {INSTALL}")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source().encode(), b"kernels.cu", 0, None, None) == 0
    flags = [f"--gpu-architecture={target}", *options]
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    return nvrtc, program, size


@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (70, 75, 80, 86, 89, 100, 103, 120))]
)
def test_the_source_compiles_for_nvidia(architecture: int) -> None:
    """sm_70 needs the NVRTC of CUDA 12: that of CUDA 13 begins with sm_75."""
    nvrtc, program, size = compiled(f"sm_{architecture}", *COMPILE_OPTIONS["nvidia"])
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    binary = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, binary) == 0
    assert [name for name in NAMES if f".text.{name}".encode() not in binary.raw] == []


def test_denormals_are_kept_under_the_option_that_cupy_adds() -> None:
    """NVRTC takes the last of several -ftz, and CuPy's comes last."""
    nvrtc, program, size = compiled("compute_90", *COMPILE_OPTIONS["nvidia"], "-ftz=true")
    assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetPTX(program, text) == 0
    assert sorted(set(re.findall(r"(?:add|mul|fma|sub)\.\S*f32", text.value.decode()))) == ["add.rn.f32", "mul.rn.f32"]


def test_nvidias_packages_have_the_versions_that_torch_asks_for() -> None:
    """torch 2.13.0+cu130 asks for one NVRTC, and pip installs nothing where constraints.txt holds another one."""
    assert "\nnvidia-" not in (Path(__file__).parents[2] / "constraints.txt").read_text()


def amd_compilers() -> list[list[str]]:
    """hipcc, and Debian's newest clang, which hipcc's headers and code serve as well."""
    clangs = [f"clang++-{version}" for version in range(30, 16, -1)]
    newest = next(
        ([clang, "-x", "hip", "-nogpulib", "--rocm-path=/usr"] for clang in clangs if shutil.which(clang)), []
    )
    return [["hipcc"], *([newest] if newest else [])]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_the_source_compiles_for_amd(tmp_path: Path, architecture: str) -> None:
    if shutil.which("hipcc") is None:
        pytest.skip("needs hipcc (Debian: apt-get install hipcc; clang-19 for what it does not know)")
    (tmp_path / "kernels.hip").write_text("#include <hip/hip_runtime.h>\n" + source())
    options = [f"--offload-arch={architecture}", "--offload-device-only", "-O1", *COMPILE_OPTIONS["amd"]]
    environment = {"PATH": "/usr/bin:/usr/local/bin:/bin:/opt/rocm/bin", "HIP_PLATFORM": "amd"}
    ends = []
    for compiler in amd_compilers():
        command = [*compiler, *options, "-S", "-o", "kernels.s", "kernels.hip"]
        ends.append(
            subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
            )
        )
        if not ends[-1].returncode or not UNKNOWN.search(ends[-1].stderr):
            break
    if architecture not in ("gfx908", "gfx90a") and all(end.returncode and UNKNOWN.search(end.stderr) for end in ends):
        pytest.skip(f"not compiled: none of {', '.join(c[0] for c in amd_compilers())} knows {architecture}")
    assert ends[-1].returncode == 0, ends[-1].stderr
    assembly = (tmp_path / "kernels.s").read_text()
    assert architecture in assembly
    assert [name for name in NAMES if f"\n{name}:" not in assembly] == []
