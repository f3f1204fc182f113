"""The house: imports point one way, rooms keep to their doorways, planning needs no torch, files stay readable.

A room is a folder. In a folder that holds rooms, each file beside them counts as a room of its own. Every folder's
`__init__.py` opens with its doorway: what lives here, where to start reading, what it may import (names below
`hethub`; a name allows everything under it).
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hethub"
LINKS = ("communicator", "kernels", "planner", "predictor")
MAX_LINES = 400
MAX_FILES = 12

# cli → report, runtime → planner → predictor → spec and runtime → communicator → kernels → spec.
MAY_IMPORT = {
    "spec": set(),
    "predictor": {"spec"},
    "planner": {"predictor", "spec"},
    "capacity": {"predictor", "spec"},
    "kernels": {"spec"},
    "synthesis": {"communicator", "kernels", "predictor", "spec"},
    "communicator": {"kernels", "spec"},
    "runtime": {"planner", "synthesis", "predictor", "communicator", "kernels", "spec"},
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
FOLDERS = sorted({path.parent for path in SOURCES} - {PACKAGE})


def room(path: Path) -> str:
    """The first part of a module's name below hethub: its outer room, or the module itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    """A file's dotted name below hethub; that of its folder for an `__init__.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in SOURCES}


def inner_room(path: Path) -> str:
    """The room of a file: its folder, or itself in a folder that holds rooms."""
    holds_rooms = any((entry / "__init__.py").exists() for entry in path.parent.iterdir() if entry.is_dir())
    own = ".".join(path.parent.relative_to(PACKAGE).parts)
    return ".".join(filter(None, [own, path.stem])) if holds_rooms else own


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Every import of a file, inside functions too, as (line, dotted name)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = list(path.relative_to(ROOT).parent.parts)
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                ours = whole.removeprefix("hethub.") in MODULES or source == "hethub"
                found.append((node.lineno, whole if ours else source))
    return found


def own_imports(path: Path) -> Iterator[tuple[int, Path]]:
    """The files of ours that a file imports, with the line. A package stands for its `__init__.py`."""
    for line, name in imported(path):
        found = MODULES.get(name.removeprefix("hethub.")) if name.startswith("hethub.") else None
        if found is not None and found != path:
            yield line, found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in SOURCES:
        own = room(path)
        for line, name in imported(path):
            first, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if first == "hethub" and other in MAY_IMPORT and other != own and other not in MAY_IMPORT[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "MAY_IMPORT above says which outer room may import which (ARCHITECTURE.md, the rooms)"


def test_every_room_has_its_rule() -> None:
    assert {room(path) for path in SOURCES} <= set(MAY_IMPORT)


class Doorway:
    """The five lines that open a folder's `__init__.py`."""

    def __init__(self, folder: Path) -> None:
        self.lines = (folder / "__init__.py").read_text(encoding="utf-8").splitlines()[:5]
        self.folder = folder

    def is_well_formed(self) -> bool:
        if len(self.lines) < 5:
            return False
        what, blank, start, may, end = self.lines
        framed = what.startswith('"""') and what.endswith(".") and not blank and end == '"""'
        return framed and bool(re.fullmatch(r"Start reading: .+\.", start) and re.fullmatch(r"May import: .+\.", may))

    def start(self) -> list[str]:
        """The files and folders named as the place to begin."""
        return re.findall(r"[\w/]+(?:\.py|/)", self.lines[2])

    def allowed(self) -> list[str]:
        named = self.lines[3].removeprefix("May import: ").removesuffix(".")
        return [] if named == "nothing of ours" else named.split(", ")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: module(folder / "__init__.py"))
def test_a_folder_opens_with_its_doorway(folder: Path) -> None:
    doorway = Doorway(folder)
    assert doorway.is_well_formed(), doorway.lines
    assert doorway.start()
    assert all((folder / name).exists() for name in doorway.start())


def test_rooms_import_what_their_doorways_allow() -> None:
    """A file may import from its own folder and from the rooms inside it; all else its folder's doorway names."""
    doorways = {folder: Doorway(folder).allowed() for folder in FOLDERS}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module(other)}"
        for path in SOURCES
        if path.parent != PACKAGE
        for line, other in own_imports(path)
        if path.parent not in (other.parent, *other.parent.parents)
        and not any(f"{module(other)}.".startswith(f"{name}.") for name in doorways[path.parent])
    ]
    assert not wrong, "the `May import` line of the folder's __init__.py does not name it"


def test_doorways_allow_only_what_is_needed() -> None:
    spare = []
    for folder in FOLDERS:
        needed = {module(other) for path in folder.glob("*.py") for _, other in own_imports(path)}
        for name in Doorway(folder).allowed():
            if not any(f"{other}.".startswith(f"{name}.") for other in needed):
                spare.append(f"{module(folder / '__init__.py')} names {name}")
    assert not spare, "nothing in the folder imports it any more: take it out of the `May import` line"


def circle(needs: Mapping[str, set[str]]) -> list[str]:
    """Names that need each other in a circle, in its order; empty where there is none."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("of", [inner_room, module], ids=["rooms", "files"])
def test_no_circles(of: Callable[[Path], str]) -> None:
    needs = defaultdict(set)
    for path in SOURCES:
        for _, other in own_imports(path):
            if of(other) != of(path):
                needs[of(path)].add(of(other))
    assert not circle(needs)


def test_no_folder_is_too_full() -> None:
    files = [path.relative_to(ROOT) for path in tracked() if path.suffix == ".py" and path.name != "__init__.py"]
    counts = Counter(path.parent for path in files if path.parts[0] in ("hethub", "tests"))
    full = {str(folder): count for folder, count in counts.items() if count > MAX_FILES}
    assert not full, f"more than {MAX_FILES} files: make a room of those that belong together"


def test_tests_mirror_the_rooms() -> None:
    """Each folder of tests has the name of a room, but for whole commands, faults, slow truths and what tests share."""
    apart = {"cli", "faults", "oracle", "reference", "support"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [
        str(folder)
        for folder in folders
        if folder.parts and folder.parts[0] not in apart and not (PACKAGE / folder).is_dir()
    ]


# Words that were replaced by the field's: sub-words of identifiers, and whole identifiers. YAML keys stay as they are.
REPLACED = {
    "tile": "microbatch", "tiles": "microbatches", "tiling": "microbatching", "tilings": "microbatchings",
    "lane": "actor", "lanes": "actors", "seat": "assignment", "seats": "assignments", "draft": "candidate",
    "drafts": "candidates", "judge": "evaluator", "judged": "evaluated", "verdict": "evaluation",
    "surrogate": "estimator", "footprint": "memory model", "footprints": "memory models",
    "roomy": "extra in flight", "flights": "in-flight microbatches", "circuit": "critical cycle",
    "crossing": "point-to-point transfer", "crossings": "point-to-point transfers", "lean": "folded",
    "programme": "task graph", "residency": "ZeRO manager", "parked": "offloaded", "drift": "straggler",
    "drifted": "straggler", "drifting": "stragglers", "rehearsal": "emulation", "rehearsed": "emulated",
    "rehearse": "emulate", "together": "consensus", "agreement": "preflight",
}  # fmt: skip
REPLACED_WHOLE = {
    "put_off": "deferred_wgrad", "paper_run": "list_schedule", "PaperRun": "ListSchedule", "self_measure": "autotune",
    "UnitWeights": "ZeroWeights", "UnitGradients": "ZeroGradients", "num_parts": "num_chunks",
    "part_by_part": "chunk_by_chunk", "KindAlone": "HomogeneousPart", "kinds_alone": "homogeneous_parts",
}  # fmt: skip
# A lane is also one of several TCP connections between two ranks.
LANES_OF_TCP = ("communicator", "runtime/launch", "runtime/loop/build", "commands", "spec/job")
KEYS_OF_FILES = {"drift", "rehearsal"}  # of job files


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """The names that a file defines or uses, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "name", "arg", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def test_identifiers_use_the_fields_words() -> None:
    wrong = []
    for path in SOURCES:
        place = path.relative_to(PACKAGE).as_posix()
        for line, name in identifiers(path):
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
            found = {word for word in words if word in REPLACED}
            if place.startswith(LANES_OF_TCP):
                found -= {"lane", "lanes"}
            whole = [said for old, said in REPLACED_WHOLE.items() if old in name]
            if (found and name not in KEYS_OF_FILES) or whole:
                wrong.append(f"{place}:{line} {name}: say {', '.join(whole or map(REPLACED.get, sorted(found)))}")
    assert not wrong, "REPLACED above has the field's word for each"


def test_documents_name_files_that_exist() -> None:
    named = re.compile(r"`((?:hethub|tests|benchmarks|configs|docs)/[\w./-]*\w)`")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in tracked()
        if path.suffix == ".md" and path.name != "CHANGELOG.md"
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not missing, "the document names a file that is gone"


def test_pages_are_short_enough_to_read() -> None:
    pages = [ROOT / name for name in ("ARCHITECTURE.md", "README.md")]
    assert all(len(page.read_text(encoding="utf-8").splitlines()) <= 200 for page in pages)


def test_planning_rooms_never_name_torch() -> None:
    heavy = ("torch", "cupy", "mpi4py", "safetensors", "tokenizers", "transformers")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        if room(path) in TORCH_FREE
        for line, name in imported(path)
        if name.partition(".")[0] in heavy
    ]
    assert not wrong, "these rooms run where nothing but the light core is installed"


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


def test_nothing_lies_about() -> None:
    loose = {path.name for path in tracked() if path.parent == ROOT and not path.suffix}
    assert loose == {".gitignore", "LICENSE", "Makefile"}


def test_files_are_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"more than {MAX_LINES} lines: part the file by its ideas"


def test_no_file_names_somebodys_machine() -> None:
    homes = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w|[A-Z]:\\\\Users")
    named = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:80]}"
        for path in tracked()
        if not path.is_symlink()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if homes.search(line)
    ]
    assert not named, "a path of one machine means nothing on another"


def test_devices_are_named_in_the_device_layer_only() -> None:
    vendor_api = re.compile(r"\btorch\.(cuda|hip|xpu|version)\b|[\"'](nccl|rccl)[\"']")
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in SOURCES
        if path not in NAMES_DEVICES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if vendor_api.search(line)
    ]
    assert not wrong, "ask hethub/kernels/device.py instead, so that makers differ in one place"


def test_private_torch_is_touched_in_one_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        if path != PACKAGE / "communicator" / "torch_private.py"
        for line, name in imported(path)
        if name.partition(".")[0] == "torch" and any(part.startswith("_") for part in name.split("."))
    ]
    assert not wrong, "what torch keeps private may change with any version: it goes through torch_private.py"
