"""The house: imports point one way, planning needs no torch, the links are doorways, files stay readable."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hethub"
LINKS = ("communicator", "kernels", "planner", "predictor")
MAX_LINES = 400

# cli → report, runtime → planner → predictor → spec and runtime → communicator → kernels → spec.
MAY_IMPORT = {
    "spec": set(),
    "predictor": {"spec"},
    "planner": {"predictor", "spec"},
    "capacity": {"predictor", "spec"},
    "kernels": {"spec"},
    "communicator": {"kernels", "spec"},
    "runtime": {"planner", "predictor", "communicator", "kernels", "spec"},
    "report": {"runtime", "capacity", "planner", "predictor", "spec"},
    "commands": {"report", "runtime", "capacity", "planner", "predictor", "communicator", "kernels", "spec"},
    "cli": {"commands", "spec"},
    "__main__": {"cli"},
    "__init__": set(),
}
# The device layer; kernels launched on torch's stream; and the doctor, which reports what a vendor's libraries say.
NAMES_DEVICES = (
    PACKAGE / "kernels" / "device.py",
    PACKAGE / "kernels" / "compiled.py",
    PACKAGE / "runtime" / "doctor" / "machine.py",
)
TORCH_FREE = ("spec", "predictor", "planner", "capacity")
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The first part of a module's name below hethub: its room, or the module itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, inside functions too, as (line, dotted name)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = list(path.relative_to(ROOT).parent.parts)
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            if module == "hethub":
                yield from ((node.lineno, f"hethub.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def test_imports_point_one_way() -> None:
    wrong = []
    for path in SOURCES:
        own = room(path)
        for line, name in imported(path):
            first, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if first == "hethub" and other in MAY_IMPORT and other != own and other not in MAY_IMPORT[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


def test_every_room_has_its_rule() -> None:
    assert {room(path) for path in SOURCES} <= set(MAY_IMPORT)


def test_planning_rooms_never_name_torch() -> None:
    heavy = ("torch", "cupy", "mpi4py", "safetensors", "tokenizers", "transformers")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        if room(path) in TORCH_FREE
        for line, name in imported(path)
        if name.partition(".")[0] in heavy
    ]
    assert not wrong


WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "mpi4py", "cupy", "safetensors", "tokenizers", "transformers"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refuse())
for room in ("spec", "predictor", "planner", "capacity"):
    package = importlib.import_module(f"hethub.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"hethub.{room}."):
        importlib.import_module(module.name)
import hethub.cli
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
"""


def test_planning_starts_without_torch_installed() -> None:

    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", LINKS)
def test_links_are_the_map_of_the_project(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"hethub/{name}"
    assert (link / "__init__.py").samefile(PACKAGE / name / "__init__.py")


def test_no_module_is_imported_under_two_names() -> None:
    """Looks at this very process, in which pytest has imported every collected test and what it needs."""
    names = defaultdict(set)
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or os.devnull)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            names[path.resolve()].add(name)
    assert Path(__file__).resolve() in names
    assert not {path: found for path, found in names.items() if len(found) > 1}
    assert {found.partition(".")[0] for own in names.values() for found in own} <= {"hethub", "tests", "conftest"}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_answers_for_no_package(name: str) -> None:
    """`kernels` is a package of Hugging Face: with the root on sys.path our link would pretend to be it."""
    spec = importlib.util.find_spec(name)
    assert spec is None or not Path(spec.origin or os.devnull).is_relative_to(ROOT / name)


def test_only_hethub_is_packaged_and_all_of_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_packages(str(ROOT), **settings["packages"]["find"])
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert set(packages) == folders  # a folder without __init__.py would stay behind


def tracked() -> list[Path]:
    """The files under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("runs in a git checkout only: it reads the list of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_files_are_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def test_no_file_names_somebodys_machine() -> None:
    homes = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w|[A-Z]:\\\\Users")
    named = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:80]}"
        for path in tracked()
        if not path.is_symlink()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if homes.search(line)
    ]
    assert not named


def test_devices_are_named_in_the_device_layer_only() -> None:
    vendor_api = re.compile(r"\btorch\.(cuda|hip|xpu|version)\b|[\"'](nccl|rccl)[\"']")
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in SOURCES
        if path not in NAMES_DEVICES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if vendor_api.search(line)
    ]
    assert not wrong


def test_private_torch_is_touched_in_one_file() -> None:
    wrong = []
    for path in SOURCES:
        if path == PACKAGE / "communicator" / "torch_private.py":
            continue
        for line, name in imported(path):
            if name.partition(".")[0] == "torch" and any(part.startswith("_") for part in name.split(".")):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong
