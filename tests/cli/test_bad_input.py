"""Every mistake of a user: exit code 2, one paragraph that says what to change, spoken once, nothing written."""

import os
import shutil
from functools import partial

import pytest
import yaml

from hethub.cli import run
from tests.support.command import HETHUB, check_refused, files_below, mpirun, needs_mpirun, one, ranks
from tests.support.job_files import CLUSTER, MODEL, STAGES, plan, write_job, write_pair_job, write_yaml


def train(folder, *arguments, size=4, hook=None):
    """`hethub train` on the job in `folder/job`, which must leave no file."""
    before = set(files_below(folder))
    results = ranks(size, "train", folder / "job" / "job.yaml", *arguments, cwd=folder, hook=hook)
    assert set(files_below(folder)) == before
    return results


def stages(**changes):
    """The plan's stages, keys of the second one changed."""
    return [STAGES[0], {**STAGES[1], **changes}]


def on_pockets(**changes):
    """The cluster's nodes with accelerators of an own description, which computes fp32 only."""
    pocket = {
        "name": "pocket", "vendor": "cpu", "memory_gb": 4, "memory_gbytes_per_second": 10, "fp32_tflops": 0.05,
        "link_gbytes_per_second": 5, **changes,
    }  # fmt: skip
    return {"nodes": [{**node, "accelerator": pocket} for node in CLUSTER["nodes"]]}


# Each: what is changed in the job's files, and what the paragraph must say.
CASES = {
    "misspelt key of the job": ({"data": {"souce": "text"}}, ["job.yaml, line", "data.souce", "did you mean 'source'"]),
    "misspelt key of the model": ({"model": {"hiden": 3}}, ["model.yaml, line", "hiden", "did you mean 'hidden'"]),
    "misspelt key of the cluster": ({"cluster": {"nods": 3}}, ["cluster.yaml, line", "nods", "did you mean 'nodes'"]),
    "misspelt key of the plan": (
        {"plan_file": plan(stages(recompte="full"))},
        ["plan.yaml, line", "stages[1].recompte", "did you mean 'recompute'"],
    ),
    "a key of the wrong type": ({"train": {"lr": "fast"}}, ["job.yaml, line", "train.lr", "'fast'"]),
    "missing model file": ({"model_name": "modl.yaml"}, ["modl.yaml", "no such model file"]),
    "missing cluster file": ({"cluster_name": "lab.yaml"}, ["lab.yaml", "no such cluster file"]),
    "missing plan file": ({"plan": "best.yaml"}, ["best.yaml", "no such plan file"]),
    "missing data": ({"data": {"source": "text", "path": "corpus"}}, ["corpus", "no such file or folder"]),
    "missing data of an evaluation": (
        {"eval": {"data": {"source": "tokens", "path": "held.bin"}}},
        ["job.yaml, line", ": eval.data.path: ", "held.bin", "the token file cannot be read"],
    ),
    "missing data of a mixture": (
        {"data": {"sources": [{"source": "python-stdlib"}, {"source": "jsonl", "path": "more"}]}},
        ["job.yaml, line", ": data.sources[1].path: ", "more: there is no such file or folder"],
    ),
    "missing token file": ({"data": {"source": "tokens", "path": "corpus.bin"}}, ["corpus.bin"]),
    "data without a path": ({"data": {"source": "jsonl"}}, ["job.yaml, line", "data.path"]),
    "unknown accelerator": (
        {"cluster": {"nodes": [{"name": "a", "accelerator": "A100-SXM-80GB", "accelerators": 4}]}},
        ["cluster.yaml, line", "A100-SXM-80GB", "did you mean 'A100-SXM4-80GB'"],
    ),
    "layers that no stage holds": (
        {"plan_file": plan(stages(layers=[[3, 4]]))},
        ["plan.yaml", "layers [2, 3) are in no stage", "stage 1 starts at layer 3"],
    ),
    "layers in two stages": ({"plan_file": plan(stages(layers=[[1, 4]]))}, ["layers [1, 2) are in two stages"]),
    "layers that do not reach the end": (
        {"plan_file": plan(stages(layers=[[2, 3]]))},
        ["[0, 3)", "model 'tiny' has 4", "stop at layer 4"],
    ),
    "plan for another cluster": ({"plan_file": plan(cluster="lab")}, ["'lab'", "'two-makers'", "hethub plan"]),
    "plan for another model": ({"plan_file": {**plan(), "model": "large"}}, ["'large'", "'tiny'"]),
    "plan with other ranks than the cluster": (
        {"plan_file": plan(stages(replicas=[{"ranks": [2], "micro_batch": 4, "samples": 8}]))},
        ["the plan places 3 ranks", "4 accelerators"],
    ),
    "plan for another batch": ({"train": {"global_batch": 16}}, ["plan.yaml", "global_batch 8", "16"]),
    "a rank in two places": (
        {"plan_file": plan(stages(replicas=[{"ranks": [1, 2], "micro_batch": 4, "samples": 8}]))},
        ["rank 1 is twice in replicas"],
    ),
    "batch that the microbatches do not cover": (
        {"plan_file": plan(stages(replicas=[{"ranks": [2, 3], "micro_batch": 4, "samples": 6}]))},
        ["stage 1", "6 samples", "global_batch is 8", "by +2"],
    ),
    "heads that do not divide": (
        {"model": {"heads": 3, "kv_heads": 3, "hidden": 36}},
        ["TP 2", "3 key-value heads", "Degrees that work: 1, 3"],
    ),
    "replica over two islands": (
        {
            "plan_file": plan(
                [
                    {"layers": [[0, 2]], "replicas": [{"ranks": [0, 2], "micro_batch": 4, "samples": 8}]},
                    {"layers": [[2, 4]], "replicas": [{"ranks": [1, 3], "micro_batch": 4, "samples": 8}]},
                ]
            )
        },
        ["ranks [0, 2]", "islands amd and nvidia"],
    ),
    "zero 0 over two islands": (
        {
            "plan_file": plan(
                [{"layers": [[0, 4]], "replicas": [{"ranks": [r], "micro_batch": 2, "samples": 2} for r in range(4)]}]
            )
        },
        ["zero: 0", "set zero: 1"],
    ),
    "too few microbatches in flight": (
        {
            "plan_file": plan(
                [
                    {
                        "layers": [[0, 2]],
                        "replicas": [{"ranks": [0, 1], "micro_batch": 1, "samples": 8, "in_flight": 1}],
                    },
                    {"layers": [[2, 4]], "replicas": [{"ranks": [2, 3], "micro_batch": 4, "samples": 8}]},
                ]
            )
        },
        ["stages[0].replicas[0].in_flight is 1", "at least"],
    ),
    "state shares beyond what a rank holds": (
        {"plan_file": plan([{**STAGES[0], "zero": 1, "state_shares": {0: 0.9, 1: 0.9}}, STAGES[1]])},
        ["state_shares sum to 1.8", "give rank 1 at most 0.1"],
    ),
    "sequence beyond the model's": (
        {"train": {"seq_len": 128}, "plan_file": plan(seq_len=128)},
        ["job.yaml, line", "train.seq_len is 128", "at most 64"],
    ),
    "plan over memory": (
        {"cluster": on_pockets(memory_gb=0.001)},
        ["rank 0 (pocket)", "GiB", "use an accelerator with more memory"],
    ),
    "precision that an accelerator lacks": (
        {"train": {"precision": "bf16"}, "plan_file": plan(precision="bf16"), "cluster": on_pockets(fp16_tflops=0.1)},
        ["precision bf16", "accelerator pocket (rank 0, node 'amd')", "fp16 or fp32"],
    ),
    "no samples of the data's length": (
        {"train": {"seq_len": 64}, "plan_file": plan(seq_len=64), "text": "short"},
        ["text.txt"],
    ),
    "empty data": ({"text": ""}, ["text.txt", "no text"]),
    "tokens outside the vocabulary": ({"model": {"vocab": 40}}, ["vocab", "40"]),
    "a model that is no Llama": ({"model": {"family": "gpt"}}, ["gpt", "llama"]),
    "an emulated cluster over memory": (
        {
            "cluster": {
                "emulated": True,
                "nodes": [{"name": "t4", "accelerator": "T4", "accelerators": 4, "reserved_memory_gb": 14}],
            }
        },
        ["rank", "T4", "GiB"],
    ),
    "a memory that others hold all of": (
        {"cluster": {"nodes": [{"name": "t4", "accelerator": "T4", "accelerators": 4, "reserved_memory_gb": 15}]}},
        ["reserved_memory_gb 15 leaves nothing of the 15 GiB of T4"],
    ),
    "a slowdown below one": ({"rehearsal": {"slowdown": {0: 0.5}}}, ["rehearsal.slowdown"]),
    "a slowdown of a rank that does not exist": (
        {"rehearsal": {"slowdown": {9: 2}}},
        ["job.yaml, line", "rehearsal.slowdown names rank 9", "4 accelerators", "0 to 3"],
    ),
    "a slowdown of accelerators that are not emulated": (
        {"rehearsal": {"slowdown": {0: 2}}},
        ["job.yaml, line", "rehearsal.slowdown is for clusters marked `emulated: true`", "of cluster"],
    ),
    "a time scale of what the ranks find": (
        {"rehearsal": {"time_scale": 2}, "cluster_name": "detect"},
        ["rehearsal.time_scale is for clusters marked `emulated: true`", "cluster: detect"],
    ),
    "measurements of accelerators that are emulated": (
        {"measure": "always", "cluster": {"emulated": True}},
        ["job.yaml, line", "measure is always", "cluster 'two-makers' are emulated", "Remove it"],
    ),
    "an unknown relay": ({"communicator": {"relay": "carrier-pigeon"}}, ["communicator.relay", "carrier-pigeon"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_files_is_one_paragraph(name, tmp_path):
    changes, words = dict(CASES[name][0]), CASES[name][1]
    text, model_name = changes.pop("text", None), changes.pop("model_name", None)
    job = write_job(tmp_path / "job", **changes)
    if text is not None:
        (tmp_path / "job" / "text.txt").write_text(text)
    if model_name is not None:
        write_yaml(job, {**yaml.safe_load(job.read_text()), "model": model_name})
    check_refused(train(tmp_path, "--run-dir", "run"), *words)


# Each: the arguments, and what the paragraph must say.
ARGUMENTS = {
    "set without a value": (["--set", "train.steps"], ["--set train.steps", "key.path=value"]),
    "set of an unknown key": (["--set", "train.step=5"], ["train.step", "did you mean 'steps'"]),
    "set of a wrong value": (["--set", "train.steps=many"], ["train.steps", "'many'"]),
    "set of no YAML": (["--set", "train.steps=[1"], ["--set train.steps=[1", "not valid YAML"]),
    "set below a value": (["--set", "plan.file=x"], ["--set plan.file=x", "no mapping at 'plan'"]),
    "resume where there is no run": (["--resume", "nowhere"], ["nowhere", "no run to resume"]),
    "resume and a run folder": (["--resume", "a", "--run-dir", "b"], ["--resume", "--run-dir"]),
    "a run folder that its own files cannot name": (["--run-dir", "\udcff"], ["name this path in UTF-8"]),
    "missing plan": (["--plan", "best.yaml"], ["best.yaml", "no such plan file"]),
    "unknown strategy": (["--set", "plan=autoo"], ["autoo", "did you mean 'auto'"]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_mistake_in_the_arguments_is_one_paragraph(name, tmp_path):
    arguments, words = ARGUMENTS[name]
    write_job(tmp_path / "job", cluster_name="detect", plan="auto")
    check_refused(train(tmp_path, *arguments, size=1), *words)


@pytest.mark.parametrize(
    "arguments", [["--resume", "a", "--run-dir", "b"], ["--set", "plan=hap", "--profile", "p.json"]]
)
def test_what_does_not_go_together_is_said_once_for_all_ranks(arguments, tmp_path):
    write_job(tmp_path / "job", cluster_name="detect", plan="auto")
    check_refused(train(tmp_path, *arguments, size=2), "--resume" if "--resume" in arguments else "--profile")


def little_host_memory(rank):
    """Hosts of which the ranks find 4 KiB of memory."""
    from hethub.runtime.launch import preflight

    preflight.host_memory_bytes = lambda: 4096


def test_offload_beyond_the_host_memory_that_ranks_found_is_refused(tmp_path):
    offloading = [{**own, "offload": ["optimizer"]} for own in STAGES]
    write_job(tmp_path / "job", cluster_name="detect", plan_file=plan(offloading, cluster="detected"))
    refused = train(tmp_path, "--run-dir", "run", hook=little_host_memory)
    check_refused(refused, "would hold", "host memory", "offload less")


def test_a_missing_job_file_is_named(tmp_path):
    check_refused(ranks(2, "train", "nothing.yaml", cwd=tmp_path), "nothing.yaml", "no such job file")


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    write_job(tmp_path / "job", cluster_name="detect", plan="auto")
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "metrics.jsonl").write_text("")
    check_refused(train(tmp_path, "--run-dir", "a run", size=1), "holds a run already", "--resume 'a run'")


def test_a_world_of_another_size_than_the_cluster_is_refused(tmp_path):
    write_job(tmp_path / "job")
    check_refused(train(tmp_path, size=2), "4 accelerators", "2 ranks", "mpirun -n 4")


def test_a_world_of_another_size_than_the_plan_is_refused(tmp_path):
    write_job(tmp_path / "job", cluster_name="detect", plan_file=plan(cluster="detected"))
    check_refused(train(tmp_path, size=2), "4 ranks", "2 accelerators")


def hugging_face_job(folder):
    """A job that starts from a Hugging Face folder of a tiny random Llama."""
    import torch

    from hethub.runtime.model.huggingface import write_folder
    from hethub.spec.layout.tensors import model_tensors
    from hethub.spec.model import ModelSpec

    model = ModelSpec.model_validate(MODEL)
    tensors = ((info.name, torch.randn(info.shape) * 0.02) for info in model_tensors(model))
    write_folder(folder / "job" / "llama", model, tensors, torch.float32)
    job = write_job(folder / "job", plan_file={**plan(), "model": "llama"})
    return write_yaml(job, {**yaml.safe_load(job.read_text()), "model": "hf:llama"})


def test_damaged_weights_are_named_and_leave_no_run_folder(tmp_path):
    hugging_face_job(tmp_path)
    (weights,) = (tmp_path / "job" / "llama").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    check_refused(train(tmp_path, "--run-dir", "run"), "model.safetensors", "damaged or cut short")


def test_weights_that_only_one_rank_cannot_read_end_all(tmp_path):
    """Rank 2 has a folder of its own, as on a node without a shared file system, and its copy is damaged."""
    hugging_face_job(tmp_path)
    shutil.copytree(tmp_path / "job", tmp_path / "other" / "job")
    (weights,) = (tmp_path / "other" / "job" / "llama").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    results = ranks(
        4, "train", "job/job.yaml", "--run-dir", tmp_path / "run", cwd=tmp_path, hook=partial(move, tmp_path / "other")
    )
    check_refused(results, "rank 2: ", "damaged or cut short", speaker=2)
    assert not (tmp_path / "run").exists()


def move(folder, rank):
    if rank == 2:
        os.chdir(folder)


@pytest.mark.parametrize("name", ["text.txt", "model.yaml"])
def test_a_rank_that_reads_other_files_is_named(name, tmp_path):
    write_job(tmp_path / "job")
    shutil.copytree(tmp_path / "job", tmp_path / "other" / "job")
    path = tmp_path / "other" / "job" / name
    path.write_text(path.read_text().replace("64", "65"))
    results = ranks(
        4, "train", "job/job.yaml", "--run-dir", tmp_path / "run", cwd=tmp_path, hook=partial(move, tmp_path / "other")
    )
    check_refused(results, "tokens differs" if name == "text.txt" else "job differs", "rank 0", "rank 2", "copy")
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(tmp_path):
    ended = one(ranks(1, "train", "nothing.yaml", "--debug", cwd=tmp_path))
    assert ended.exit_code == 2
    assert "Traceback" in ended.stderr
    assert "no such job file" in ended.stderr


@pytest.mark.parametrize("command", [[], ["trian"], ["train"], ["train", "job.yaml", "--fast"]])
def test_a_command_that_does_not_exist_ends_with_2(command, capsys):
    assert run(command) == 2
    assert "hethub: " in capsys.readouterr().err


@needs_mpirun
def test_under_mpirun_it_is_said_once_and_that_other_data_are_other_data(tmp_path):
    """A real start, where rank 1 is sent to a folder of its own by a wrapper around hethub."""
    write_pair_job(tmp_path / "job")
    shutil.copytree(tmp_path / "job", tmp_path / "other" / "job")
    (tmp_path / "other" / "job" / "text.txt").write_text("something else entirely " * 1000)
    wrapper = ["/bin/sh", "-c", f'[ $OMPI_COMM_WORLD_RANK = 1 ] && cd other; exec {HETHUB} "$@"', "sh"]
    before = set(files_below(tmp_path))
    ended = mpirun(2, "train", "job/job.yaml", "--run-dir", tmp_path / "run", cwd=tmp_path, program=wrapper)
    assert ended.exit_code == 2
    (paragraph,) = ended.paragraphs
    assert "tokens differs" in paragraph
    assert "rank 1" in paragraph
    assert "Traceback" not in ended.stderr
    assert set(files_below(tmp_path)) == before


def elsewhere(rank):
    """Rank 1 was started with another --run-dir."""
    from hethub.commands import train

    run_plan = train._run_plan

    def moved(options):
        options.run_dir = options.job.with_name("there") if rank else options.run_dir
        return run_plan(options)

    train._run_plan = moved


def test_ranks_that_name_unlike_run_folders_are_told_so(tmp_path):
    """The run went to rank 0's, and nobody said so."""
    write_job(tmp_path / "job", train={"steps": 1})
    results = ranks(4, "train", "job/job.yaml", "--run-dir", "here", cwd=tmp_path, hook=elsewhere)
    check_refused(
        results,
        "run_folder differs: rank 0",
        "has --run-dir here",
        "has --run-dir job/there",
        "give every rank the same",
    )
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
@needs_mpirun
def test_mpirun_without_mpi4py_is_said_once_per_node(tmp_path):
    """A finder in front of all others that knows no mpi4py, as where it is not installed."""
    write_job(tmp_path / "job")
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDE.format(names=["mpi4py"]))
    ended = mpirun(2, "train", "job/job.yaml", cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path / "hide")})
    assert ended.exit_code == 2
    (paragraph,) = ended.paragraphs
    assert "mpi4py is not installed" in paragraph
    assert "hethub[train]" in paragraph


HIDE = """
import importlib.util
import sys

find_spec = importlib.util.find_spec
hidden = {names}


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hidden())
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find_spec(name, package)
"""
