"""Models and clusters by what a job or a plan names them with: where their descriptions are looked for."""

from collections.abc import Iterator
from pathlib import Path

from hethub.spec.base import SpecT, build, load
from hethub.spec.documents import read_yaml
from hethub.spec.errors import BadInput
from hethub.spec.hugging_face import from_hugging_face
from hethub.spec.model import ModelSpec


def load_model(reference: str, base: Path) -> ModelSpec:
    """The model that a job names: a YAML file or `hf:folder`, relative to `base`. Raises BadInput."""
    if reference.startswith("hf:"):
        return from_hugging_face(base / reference[3:])
    return load(ModelSpec, base / reference, "model file")


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
