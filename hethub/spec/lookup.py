"""Models and clusters by what a job or a plan names them with: where their descriptions are looked for."""

from collections.abc import Iterator
from pathlib import Path

from hethub.spec.base import SpecT, build, load
from hethub.spec.cluster import ClusterSpec, load_cluster
from hethub.spec.documents import Source, read_yaml
from hethub.spec.errors import BadInput, asked_by
from hethub.spec.hugging_face import from_hugging_face
from hethub.spec.model import ModelSpec


def load_model(reference: str, base: Path) -> ModelSpec:
    """The model that a job names: a YAML file or `hf:folder`, relative to `base`. Raises BadInput."""
    if reference.startswith("hf:"):
        return from_hugging_face(base / reference[3:])
    return load(ModelSpec, base / reference, "model file")


def load_model_of(reference: str, base: Path, source: Source) -> ModelSpec:
    """Do what `load_model` does. Where the file is missing, the BadInput says where the job file (`source`) names it."""
    if reference.startswith("hf:") and _is_missing(base / reference[3:] / "config.json"):
        with asked_by(source.at(("model",))):
            return load_model(reference, base)
    if not reference.startswith("hf:") and (missing := _why_missing(base / reference, "model file")):
        raise BadInput(
            f"{source.at(('model',))}: {missing}. Check the path, which is relative to the job file; a folder with a Hugging "
            "Face model is named hf:FOLDER."
        )
    return load_model(reference, base)


def load_cluster_of(reference: str, base: Path, source: Source) -> ClusterSpec | None:
    """The cluster that a job names: a YAML file relative to `base`, None for `detect`. Raises BadInput, as `load_model_of`."""
    if reference == "detect":
        return None
    if missing := _why_missing(base / reference, "cluster file"):
        raise BadInput(
            f"{source.at(('cluster',))}: {missing}. Check the path, which is relative to the job file; "
            "`detect` takes what the ranks find."
        )
    return load_cluster(base / reference)


def _why_missing(file: Path, what: str) -> str:
    """Why there is no file to read, of a job's `what`; empty where there may be one."""
    if file.is_dir():
        return f"{file}: this is a folder, not a {what}"
    return f"{file}: there is no such {what}" if _is_missing(file) else ""


def _is_missing(file: Path) -> bool:
    """Whether there is no such file, as far as this user may look."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it may be there
        pass
    return False


def find_named(cls: type[SpecT], kind: str, name: str, plan_path: Path) -> SpecT:
    """The `kind` ("model", "cluster") of that name: KIND.yaml beside the plan, else a file of a configs/KINDs folder
    above the plan or the current folder. Raises BadInput where there is none."""
    for file in _candidates(kind, plan_path.resolve()):
        data, source = read_yaml(file, f"{kind} file")
        if isinstance(data, dict) and data.get("name") == name:
            return build(cls, data, source, f"{kind} file")
    raise BadInput(
        f"{plan_path}: the plan is for {kind} '{name}', which is described neither beside it ({kind}.yaml) nor in a configs/{kind}s "
        "folder above it or here; name the job it was made for: predict JOB.yaml --plan PLAN.yaml, or --job JOB.yaml of report and diff."
    )


def _candidates(kind: str, plan_path: Path) -> Iterator[Path]:
    if (beside := plan_path.parent / f"{kind}.yaml").exists():
        yield beside
    for folder in dict.fromkeys((*plan_path.parents, Path.cwd(), *Path.cwd().parents)):
        yield from sorted((folder / "configs" / f"{kind}s").glob("*.yaml"))
