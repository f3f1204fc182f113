"""Jobs and clusters: defaults as documented, paths relative to the file, overrides, refusals."""

from pathlib import Path
from typing import Any

import pytest

from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec, load_cluster
from hethub.spec.documents import dump_yaml
from hethub.spec.errors import BadInput
from hethub.spec.job import JobSpec, load_job
from hethub.spec.lookup import load_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"name": "m", "layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 300, "max_seq_len": 128}
NODE = {"name": "nv", "count": 2, "accelerator": "A100-SXM4-80GB", "accelerators": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(dump_yaml(MODEL))
    (tmp_path / "cluster.yaml").write_text(dump_yaml({"name": "c", "nodes": [NODE]}))
    return tmp_path


def write_job(folder: Path, **more: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(dump_yaml({"model": "model.yaml", "cluster": "cluster.yaml", **more}))
    return path


def test_the_defaults_are_those_of_the_format(folder: Path) -> None:
    job = load_job(write_job(folder))
    assert job.spec.model_dump(exclude={"model", "cluster", "constraints"}) == {
        "data": {
                "source": "python-stdlib", "path": None, "text": None, "sources": None, "tokenizer": "bytes",
                "document_mask": False, "bos": True,
            },
            "eval": None,
        "train": {
            "steps": 60, "global_batch": 16, "seq_len": 128, "precision": "fp32", "compile": None, "lr": 3.0e-4, "min_lr": 3.0e-5,
            "warmup_steps": 10, "schedule": "cosine", "decay_steps": None, "weight_decay": 0.1,
                "betas": (0.9, 0.95), "eps": 1.0e-8, "grad_clip": 1.0, "seed": 1,
        },
        "plan": "auto",
        "communicator": {"relay": "auto", "wire": "exact", "lanes": 1, "timeout_seconds": 120.0},
        "checkpoint": {"every_steps": 20, "keep": 2, "keep_every": None},
        "log": {"every_steps": 1, "tensorboard": False, "wandb": None, "profile_steps": None},
        "rehearsal": {"time_scale": None, "slowdown": {}},
        "profile": None, "measure": "auto", "parity": "stop", "drift": {"threshold": 0.2, "steps": 5}, "replan": None,
        "lora": None,
    }  # fmt: skip
    assert job.model.name == "m"
    assert job.cluster is not None
    assert job.cluster.size == 8
    assert job.plan_path is None
    assert JobSpec.model_validate(job.spec.to_dict()) == job.spec


def test_lora_may_be_null_alone(folder: Path) -> None:
    assert load_job(write_job(folder, lora=None)).spec == load_job(write_job(folder)).spec


def test_paths_are_relative_to_the_job_and_a_plan_may_be_a_file(folder: Path) -> None:
    (folder / "deep").mkdir()
    path = folder / "deep" / "job.yaml"
    path.write_text("model: ../model.yaml\ncluster: detect\nplan: my-plan.yaml\n")
    job = load_job(path)
    assert job.cluster is None
    assert job.plan_path == folder / "deep" / "my-plan.yaml"


def test_overrides_are_applied_before_validation(folder: Path) -> None:
    job = load_job(write_job(folder), ["train.steps=5", "train.grad_clip=null", "train.betas=[0.8, 0.9]", "plan=hap"])
    assert (job.spec.train.steps, job.spec.train.grad_clip, job.spec.train.betas) == (5, None, (0.8, 0.9))
    assert job.spec.plan == "hap"


def test_what_is_set_below_an_alias_is_set_there_alone(folder: Path) -> None:
    """Both mappings were one in Python: a job told to evaluate on other text was trained on that, too."""
    text = "data: &text {source: text, path: a.txt}\neval: {data: *text, batches: 2}\n"
    (folder / "aliased.yaml").write_text("model: model.yaml\ncluster: detect\n" + text)
    job = load_job(folder / "aliased.yaml", ["eval.data.path=b.txt", "eval.batches=3", "eval.data.source=jsonl"])
    assert job.spec.eval is not None
    assert (job.spec.data.path, job.spec.data.source) == ("a.txt", "text")
    assert (job.spec.eval.data.path, job.spec.eval.data.source, job.spec.eval.batches) == ("b.txt", "jsonl", 3)


def test_a_mapping_that_a_file_leaves_empty_can_be_filled(folder: Path) -> None:
    """`eval: null` was no mapping to put anything into."""
    job = load_job(write_job(folder, eval=None), ["eval.every_steps=5", "eval.data.source=python-stdlib"])
    assert job.spec.eval is not None
    assert job.spec.eval.every_steps == 5


@pytest.mark.parametrize(("key", "own"), [("tokenizer", "t.json"), ("bos", False), ("document_mask", True)])
def test_a_model_is_evaluated_as_it_is_trained(folder: Path, key: str, own: Any) -> None:
    """`eval.data.document_mask` was read and had no effect."""
    held_out = {"source": "text", "path": "held-out.txt"}
    job = load_job(write_job(folder, data={key: own}, eval={"data": held_out}))
    assert job.spec.eval is not None
    assert getattr(job.spec.eval.data, key) == own
    load_job(write_job(folder, data={key: own}, eval={"data": {**held_out, key: own}}))
    other = load_job(write_job(folder)).spec.data.to_dict()[key]
    with pytest.raises(
        BadInput, match=rf"eval\.data\.{key} is .*, but the model is trained with data\.{key} .*; leave it out"
    ):
        load_job(write_job(folder, data={key: own}, eval={"data": {**held_out, key: other}}))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.step=5", "train.step is not a known key; did you mean 'steps'"),
        ("train.steps=0", "train.steps is 0, but input should be greater than or equal to 1"),
        ("train.steps", "--set train.steps: write key.path=value"),
        ("train..steps=5", "write key.path=value"),
        ("train.steps=[", r"^--set train.steps=\[: the value is not valid YAML"),
        ("model.name=x", "has no mapping at 'model' to put 'name' into"),
        ("train.epsilon=1e-8", "train.epsilon is not a known key; did you mean 'eps'"),  # not precision
        ("nope.a.b=1", "^--set nope.a.b=1: nope is not a known key"),
        ("eval.every_steps=5", "^--set eval.every_steps=5: eval.data is missing"),
    ],
)
def test_a_wrong_override_is_named(folder: Path, override: str, expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        load_job(write_job(folder), [override])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"trian": {}}, r"job.yaml, line 3: trian is not a known key; did you mean 'train'"),
        ({"train": {"global_batchs": 4}}, "train.global_batchs is not a known key; did you mean 'global_batch'"),
        ({"train": {"lr": 1.0e-5}}, "min_lr 3e-05 exceeds lr 1e-05"),
        ({"train": {"seq_len": 129}}, "line 3: train.seq_len is 129, but model 'm' takes at most 128 tokens"),
        ({"train": {"compile": "fast"}}, "train.compile is 'fast', but input should be true or false"),
        (
            {"train": {"steps": 10**400}},
            "train.steps is 1000.*, but input should be less than or equal to 1000000000000",
        ),
        (
            {"train": {"warmup_steps": 10**400}},
            "train.warmup_steps is 1000.*, but input should be less than or equal to",
        ),
        ({"measure": False}, r"\(so YAML reads .*\), and this key takes neither; give 'auto', 'always' or 'never'\."),
        ({"model": False}, r"and this key takes neither; put the word in quotes\."),
        ({"train": {"lr": False}}, r"and this key takes neither; give a number\."),
        ({"train": {"seq_len": 10**400}}, r"train\.seq_len is 1000+\.\.\., but"),
        ({"replan": False}, "replan is yes or no .* give 'auto', 'report' or 'never'"),
        ({"model": {"tied_head": True}}, "model is {'tied_head': True}, but input should be text"),
        ({"train": {"schedule": True}}, "give 'cosine', 'wsd', 'linear' or 'constant'"),
        ({"train": {"precision": "fp8"}}, "train.precision is 'fp8', but input should be 'fp64'"),
        ({"train": {"betas": [0.9, 1.0]}}, r"train.betas\[1\] is 1.0, but input should be less than 1"),
        ({"data": {"source": "text"}}, r"line \d+: data\.path: source text needs one, the file or folder to read"),
        ({"data": {"path": "x"}}, r"data\.path: source python-stdlib reads the interpreter's own files; remove it"),
        ({"data": {"sources": [{"source": "text"}]}}, r"data\.sources\[0\]\.path: source text needs one"),
        ({"eval": {"data": {"source": "text"}}}, r"eval\.data\.path: source text needs one"),
        ({"data": {"source": "csv"}}, "data.source is 'csv'"),
        ({"communicator": {"wire": "fp4"}}, "communicator.wire is 'fp4'"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0"),
        ({"constraints": {"reserve": 1.5}}, "constraints.reserve is 1.5"),
        ({"lora": {"rank": 16}}, r"line 3: lora is {'rank': 16}, but hethub has nothing of the kind; leave it out"),
        ({"lora": False}, "lora is false, but hethub has nothing of the kind"),
        (
            {"model": "nowhere.yaml"},
            r"job\.yaml, line 1: model: .*nowhere\.yaml: there is no such model file.* hf:FOLDER",
        ),
        ({"model": "."}, r"job\.yaml, line 1: model: .*: this is a folder, not a model file.* hf:FOLDER"),
        ({"model": "hf:nowhere"}, r"job\.yaml, line 1: model: .*nowhere/config\.json: there is no such file"),
        ({"cluster": "."}, r"job\.yaml, line 1: cluster: .*: this is a folder, not a cluster file"),
        ({"cluster": "nowhere.yaml"}, r"job\.yaml, line 1: cluster: .*nowhere\.yaml: there is no such cluster file"),
    ],
)
def test_a_wrong_job_is_refused(folder: Path, more: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        load_job(write_job(folder, **more))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden": 33}, "hidden 33 is not a multiple of heads 4; change one or give head_dim"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd; RoPE turns pairs"),
        ({"layer": 2}, "layer is not a known key; did you mean 'layers'"),
        ({"num_experts": 8}, "num_experts is not a known key; known: family, ffn, "),  # not norm_eps, which it looks like
        ({"vocab_size": 8}, "vocab_size is not a known key; did you mean 'vocab'"),
        ({"layers": 0}, "layers is 0"),
        ({"rope_scaling": {"factor": 8, "low_freq_factor": 4, "high_freq_factor": 1, "original_max_seq_len": 64}},
         "rope_scaling: high_freq_factor must exceed low_freq_factor"),
    ],
)  # fmt: skip
def test_a_wrong_model_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    (tmp_path / "model.yaml").write_text(dump_yaml(MODEL | changes))
    with pytest.raises(BadInput, match=expected):
        load_model("model.yaml", tmp_path)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("tinyllama-1.1b", 1.100), ("llama2-7b", 6.738), ("llama2-13b", 13.016), ("llama2-70b", 68.977),
        ("llama3-8b", 8.030), ("llama3-70b", 70.554), ("llama3-405b", 405.853), ("gpt3-175b", 174.6),
    ],
)  # fmt: skip
def test_packaged_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    model = load_model(f"{name}.yaml", ROOT / "configs" / "models")
    assert model.parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_clusters_load(path: Path) -> None:
    cluster = load_cluster(path)
    assert cluster.size == len(cluster.places) > 1
    assert sorted(rank for ranks in cluster.islands.values() for rank in ranks) == list(range(cluster.size))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_jobs_load(path: Path) -> None:
    # continue-hf wants a folder of the user's; tests/commands/test_starting_jobs.py gives it one
    own = ["model=../models/tinyllama-1.1b.yaml"] if path.stem == "continue-hf" else []
    job = load_job(path, own)
    assert JobSpec.model_validate(job.spec.to_dict()) == job.spec


def test_ranks_are_numbered_through_the_nodes() -> None:
    nodes = [NODE, {"name": "amd", "accelerator": "MI250X-GCD", "accelerators": 2}, {**NODE, "name": "nv2", "count": 1}]
    cluster = ClusterSpec.model_validate({"name": "c", "nodes": nodes})
    assert [(place.machine, place.local) for place in cluster.places[3:6]] == [(0, 3), (1, 0), (1, 1)]
    assert cluster.islands == {"nvidia": (*range(8), *range(10, 14)), "amd": (8, 9)}
    assert cluster.places[8].node.name == "amd"


def test_a_node_may_name_its_own_vendor_and_describe_its_accelerator() -> None:
    own = {"name": "X1", "vendor": "xmaker", "memory_gb": 16, "memory_gbytes_per_second": 100, "fp32_tflops": 1,
           "link_gbytes_per_second": 10}  # fmt: skip
    nodes = [
        {"name": "x", "accelerator": own, "accelerators": 1, "nics": 2, "gbps_per_nic": 100},
        {"name": "y", "accelerator": "CPU-core", "accelerators": 1, "vendor": "amd"},
    ]
    cluster = ClusterSpec.model_validate({"name": "c", "nodes": nodes})
    assert list(cluster.islands) == ["xmaker", "amd"]
    assert cluster.nodes[0].gbps == 200
    assert cluster.nodes[1].gbps is None
    assert cluster.places[0].accelerator.peak_flops("bf16") == 0.0
    assert ClusterSpec.model_validate(cluster.to_dict()) == cluster


DEVICE = find_accelerator("A100-SXM4-80GB").to_dict()
REGIONS = {"names": ["east"], "of_node": {"nv": "east"}, "gbps": [[10]]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"nodes": [NODE, NODE]}, "two nodes are named 'nv'; equal machines are one entry with a count"),
        (
            {"nodes": [NODE, {**NODE, "name": "old", "accelerator": {**DEVICE, "memory_gb": 16}}]},
            "nodes 'nv' and 'old' both have an accelerator named 'A100-SXM4-80GB', but of unlike memory_gb",
        ),
        ({"nodes": []}, "nodes is .*at least 1 item"),
        (
            {"nodes": [{**NODE, "accelerator": "A100-SXM4-80G"}]},
            "'A100-SXM4-80G' is not in the catalogue; did you mean 'A100-",
        ),
        (
            {"nodes": [{**NODE, "acelerators": 8}]},
            r"nodes\[0\].acelerators is not a known key; did you mean 'accelerators'",
        ),
        (
            {"nodes": [{**NODE, "vendor": "NVIDIA Corp"}]},
            r"nodes\[0\].vendor: 'NVIDIA Corp' is no vendor; write one word in lower case \(nvidia, amd, cpu, intel",
        ),
        ({"network": "eth0"}, "network: the network 'eth0' is not a CIDR"),
        ({"nodes": [{**NODE, "network": "fd00::/8"}]}, "'fd00::/8' is an IPv6 network"),
        ({"links": {"in_node": {"gbps": 1}}}, "links.in_node.gbps is not a known key"),
        (
            {"links": {"regions": {**REGIONS, "gbps": [[10, 1]]}}},
            r"gbps has rows of \[2\] figures for .*; a matrix between 1 regions has 1 rows of 1 figures",
        ),
        (
            {"links": {"regions": {**REGIONS, "names": ["a", "a"], "gbps": [[9, 1], [1, 9]]}}},
            "two regions are named 'a'",
        ),
        ({"links": {"regions": {**REGIONS, "of_node": {"nv": "west"}}}}, "region 'west' is not among the names"),
        (
            {"links": {"racks": [{"name": "r", "nodes": ["nw"], "gbps": 1}]}},
            "rack 'r' holds node 'nw', which is not among nodes: known: nv",
        ),
        (
            {
                "links": {
                    "racks": [{"name": "r", "nodes": ["nv"], "gbps": 1}, {"name": "s", "nodes": ["nv"], "gbps": 1}]
                }
            },
            "node 'nv' is in rack 'r' and in rack 's'; a node has one uplink",
        ),
        (
            {
                "links": {
                    "racks": [{"name": "r", "nodes": ["nv"], "gbps": 1}, {"name": "r", "nodes": ["nv"], "gbps": 1}]
                }
            },
            "two racks are named 'r'",
        ),
        ({"links": {"staging": {"gbytes_per_second": -1}}}, "links.staging.gbytes_per_second is -1"),
        ({"links": {"regions": {**REGIONS, "of_node": {}}}}, "node 'nv' has no region in links.regions.of_node"),
    ],
)
def test_a_wrong_cluster_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_yaml({"name": "c", "nodes": [NODE], **changes}))
    with pytest.raises(BadInput, match=expected) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


def test_a_command_for_described_models_does_not_ask_for_the_strategy_that_is_set(folder: Path) -> None:
    job = load_job(write_job(folder, model="python:net:make", plan="hap"))
    with pytest.raises(BadInput, match="Set that where it is missing; for anything else name a model file"):
        _ = job.model
