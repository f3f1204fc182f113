"""hethub init, catalogue and schema: what to write job files from."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hethub.commands.common import add_json, check_folder, check_link, command, path, print_json
from hethub.spec.errors import BadInput

if TYPE_CHECKING:
    from hethub.spec.cluster import ClusterSpec

KINDS = ("laptop", "pretrain", "continue")
SCHEMAS = ("job", "cluster", "plan", "model", "catalogue")


def add(commands: Any) -> None:
    _add_init(commands)
    _add_catalogue(commands)
    _add_schema(commands)


def _add_init(commands: Any) -> None:
    parser = command(
        commands,
        "init",
        init,
        "Writes a commented job to start from, and a cluster file of what this machine has.",
        "hethub init laptop --out my-job",
    )
    parser.add_argument("kind", choices=KINDS, help="what the job is for")
    parser.add_argument("--model", type=path, metavar="HF_DIR", help="continue: the Hugging Face folder to go on from")
    parser.add_argument("--out", type=path, default=Path(), metavar="DIR", help="where to (default: here)")


def init(options: argparse.Namespace) -> None:
    from hethub.commands import templates
    from hethub.spec.documents import write_text
    from hethub.spec.job import TOKENIZER

    files = _files(options.kind, options.model)
    there = [name for name in files if (options.out / name).exists()]
    if there:
        raise BadInput(
            f"{options.out / there[0]}: this file is there already, and nothing is overwritten; give another --out."
        )
    check_link(options.out)
    check_folder(options.out)
    made = [folder for folder in (options.out, *options.out.parents) if not folder.exists()]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(text, options.out / name)
    except OSError:  # of a disk that is full: as it was
        for name in files:
            (options.out / name).unlink(missing_ok=True)
        for folder in made:
            if folder.exists():
                folder.rmdir()
        raise
    print(f"written: {', '.join(str(options.out / name) for name in files)}")
    job = shlex.quote(str(options.out / "job.yaml"))
    print(f"next: hethub plan {job}")
    if options.model is not None and not (options.model / TOKENIZER).is_file():
        print(f"then: name the tokenizer in {job}: {options.model} has no {TOKENIZER}")
    if files["cluster.yaml"] == templates.EXAMPLE_CLUSTER:
        print(f"then: write your nodes into {options.out / 'cluster.yaml'}, where an example stands")
    if options.kind != "laptop":
        print(f"then: hethub doctor {job}      names what the job lacks, your data above all")
    print(f"then: hethub launch {job}")


def _files(kind: str, model: Path | None) -> dict[str, str]:
    """The files of a kind of job by name. Raises BadInput where the model does not belong to it."""
    from hethub.commands import templates
    from hethub.runtime.doctor.detected import this_machine
    from hethub.spec.hugging_face import from_hugging_face

    if (model is None) == (kind == "continue"):
        wanted = (
            "needs --model HF_DIR, the folder to go on from"
            if model is None
            else "takes no --model, `hethub init continue` does"
        )
        raise BadInput(f"hethub init {kind} {wanted}.")
    found = this_machine()
    on_devices = any(node.device.vendor != "cpu" and node.vendor is None for node in found.nodes)
    if kind == "laptop":
        job = templates.LAPTOP_JOB.format(ranks=found.size)
        return {"job.yaml": job, "model.yaml": templates.LAPTOP_MODEL, "cluster.yaml": _cluster_text(found)}
    cluster = _cluster_text(found) if on_devices else templates.EXAMPLE_CLUSTER
    if model is None:
        job = templates.PRETRAIN_JOB.format(
            steps=20000, batch=512, seq_len=8192, lr="3.0e-4", min_lr="3.0e-5", warmup=2000
        )
        return {"job.yaml": job, "model.yaml": templates.PRETRAIN_MODEL, "cluster.yaml": cluster}
    described = from_hugging_face(model)
    length = min(described.max_seq_len, 8192)
    quoted = str(model.resolve()).replace("'", "''")  # as YAML has it between single quotes
    job = templates.CONTINUE_JOB.format(
        model=quoted, steps=1000, batch=64, seq_len=length, lr="2.0e-5", min_lr="2.0e-6", warmup=50
    )
    return {"job.yaml": job, "cluster.yaml": cluster}


def _cluster_text(cluster: "ClusterSpec") -> str:
    from hethub.commands.templates import CLUSTER_HEAD
    from hethub.spec.documents import dump_yaml

    what = "This machine, as it was found; add nodes in the order in which the launcher numbers the ranks."
    return CLUSTER_HEAD.format(what=what) + dump_yaml(cluster.model_dump(exclude_defaults=True, exclude_none=True))


def _add_catalogue(commands: Any) -> None:
    parser = command(
        commands,
        "catalogue",
        catalogue,
        "Lists the accelerators that cluster files can name, with their figures and where those are from.",
        "hethub catalogue H100",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one accelerator in full, or all whose name begins so")
    add_json(parser)


def catalogue(options: argparse.Namespace) -> None:
    from hethub.report.tables import print_accelerator, print_accelerators
    from hethub.spec.accelerator import catalogue as accelerators
    from hethub.spec.accelerator import find_accelerator

    known = accelerators()
    wanted = options.name or ""
    chosen = [known[wanted]] if wanted in known else [
        each for name, each in known.items() if name.lower().startswith(wanted.lower())
    ] or [find_accelerator(wanted)]  # fmt: skip
    if options.json:
        print_json({"accelerators": [each.to_dict() for each in chosen]})
    elif options.name is not None and len(chosen) == 1:
        print_accelerator(chosen[0])
    else:
        print_accelerators(chosen)


def _add_schema(commands: Any) -> None:
    parser = command(
        commands,
        "schema",
        schema,
        "Prints the JSON schema of a kind of YAML file, for editors and checkers.",
        "hethub schema job > job.schema.json",
    )
    parser.add_argument("kind", choices=SCHEMAS, help="which file")


def schema(options: argparse.Namespace) -> None:
    from hethub.commands.reference import json_schema

    print_json(json_schema(options.kind))
