"""The examples of docs/any-model.md run as a user would start them, and train what one process trains; what it says of CPU
cores' prices."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from hethub import synthesis
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import Device
from hethub.predictor.cost.software import HETHUB
from hethub.spec.cluster import ClusterSpec, load_cluster
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Costs, precision_of, work
from hethub.synthesis.planning import plan_graph
from tests.support.command import needs_mpirun, ranks, start_mpirun

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "any-model.md"
CLUSTERS = sorted((DOCUMENT.parents[1] / "configs" / "clusters").glob("*.yaml"))


def blocks(language: str) -> list[str]:
    """The document's blocks of code, in order."""
    return [part.split("```")[0] for part in DOCUMENT.read_text(encoding="utf-8").split(f"```{language}\n")[1:]]


ONE_PROCESS = """
torch.manual_seed(0)
module, inputs = Net(), (torch.randn(32, 16), torch.randint(4, (32,)))
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
for _ in range(10):
    optimizer.zero_grad()
    loss = module(*inputs)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_documents_example_trains(tmp_path: Path) -> None:
    script, saving = blocks("python")[:2]
    before, end = script.split("print(f")
    (tmp_path / "train.py").write_text(
        f"import torch.distributed.checkpoint as dcp\n{before}{saving}print(f{end}", encoding="utf-8"
    )
    (tmp_path / "cluster.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss (\d+\.\d{4})", done.stdout)  # two ranks write at once: lines may run together
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert "ms a step" in done.stdout
    known: dict[str, object] = {}
    before_groups = script.split("dist.init_process_group")[0]
    exec(before_groups + ONE_PROCESS, known)
    state = torch.load(tmp_path / "net.pt")
    for name, value in known["module"].state_dict().items():  # type: ignore[attr-defined]
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    saved = {"model": {name: torch.zeros_like(value) for name, value in state.items()}}
    dcp.load(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(saved["model"][name], value) for name, value in state.items())


@pytest.mark.parametrize("launcher", ["forked", pytest.param("mpirun", marks=[pytest.mark.slow, needs_mpirun])])
def test_the_documents_job_trains(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(blocks("python")[2], encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    (tmp_path / "job.yaml").write_text(blocks("yaml")[1], encoding="utf-8")
    words = ("train", "job.yaml", "--run-dir", "run")
    results = (
        ranks(2, *words, cwd=tmp_path) if launcher == "forked" else [start_mpirun(2, *words, cwd=tmp_path).end(240)]
    )
    for ended in results:
        assert ended.exit_code == 0, ended.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 20
    known: dict[str, Any] = {}
    exec((tmp_path / "net.py").read_text(encoding="utf-8"), known)
    torch.manual_seed(1)
    module, batches = known["make"](SimpleNamespace(seed=1, global_batch=32))
    assert losses[0] == pytest.approx(float(module(*next(batches)).detach()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_module_is_planned_for_every_cluster_without_devices(path: Path) -> None:
    """hethub-768 among them: 768 accelerators."""
    cluster = load_cluster(path)
    module = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))
    wrapped = Mean(module)
    program = synthesis.plan(wrapped, (torch.empty(4 * cluster.size, 256),), cluster)
    assert program.size == len(program.memory_bytes) == cluster.size
    assert program.predicted_seconds > 0
    assert all(sum(parts) == pytest.approx(1) for parts in program.ratios.values())
    limits = [place.accelerator.memory_bytes for place in cluster.places]
    assert all(used <= limit for used, limit in zip(program.memory_bytes, limits, strict=True))


class Mean(torch.nn.Module):
    """The mean square of what a module gives."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values).square().mean()


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(values)).transpose(0, 1).reshape(2, -1).sum()


def fast_ranks(name: str, machines: int) -> ClusterSpec:
    """So fast that computing and sending take no time."""
    device = {
        "name": name, "vendor": "cpu" if name.startswith("CPU") else "nvidia", "memory_gb": 1, "fp32_tflops": 1e3,
        "memory_gbytes_per_second": 1e5, "link_gbytes_per_second": 1e4,
    }  # fmt: skip
    node = {"name": "a", "count": machines, "accelerator": device, "accelerators": 1, "gbps_per_nic": 1e4}
    return ClusterSpec.model_validate({"name": "fast", "nodes": [node]})


def test_a_cpus_core_launches_one_operator_after_the_other() -> None:
    """Launches were hidden behind computing, as a device hides them, and views cost nothing: narrow models took 3 to 14
    times their prediction."""
    graph, common = trace(Folded(), (torch.randn(6, 4),)), packaged().common
    computing = sum(work(graph, operator) is not None for operator in graph.operators)
    assert 0 < computing < len(graph.operators)
    on_device = (common["kernel_seconds"] ** 4 + common["launch_seconds"] ** 4) ** 0.25
    seconds = [plan_graph(graph, fast_ranks(name, 1)).predicted_seconds for name in ("CPU of a test", "H100-SXM5-80GB")]
    launched = len(graph.operators) * common["launch_seconds"]
    assert seconds[0] > launched + computing * common["kernel_seconds"]
    assert seconds[1] < 1.2 * computing * on_device < launched


@pytest.mark.parametrize("machines", [2, 4])
def test_collectives_of_cpu_ranks_pass_their_hosts_on_several_machines_too(machines: int) -> None:
    """They began as fast as devices' do over a network of their own: 18 us, where two ranks took 60 to 460."""
    started = [
        Costs(fast_ranks(name, machines), "fp32").reduce_scatter.fixed for name in ("CPU of a test", "H100-SXM5-80GB")
    ]
    assert started[0] == packaged().links["hosted_latency_seconds"] > 3 * started[1]


class Batched(nn.Module):
    """As many products as there are samples, a copy and an addition of as many elements, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return (torch.bmm(values, self.weight.expand(len(values), -1, -1)).clone() + others).sum()


def computing_seconds(name: str, samples: int) -> dict[str, float]:
    """Of the first operator of each kind, without what starting it takes."""
    graph, costs = trace(Batched(), (torch.randn(samples, 64, 64),) * 2), Costs(fast_ranks(name, 1), "fp32")
    found = {operator.key: float(costs.operator(graph, operator)[1][0]) for operator in reversed(graph.operators)}
    return {key.split(".")[1]: seconds for key, seconds in found.items()}


def test_a_core_computes_one_product_after_the_other_and_reads_what_it_writes() -> None:
    """It was priced as a device's many units, which one product of 64 by 64 leaves idle: 15 times too dear. And a copy was taken
    to move two thirds of what an addition moves; a cache reads a line before it is written, so that it is three quarters."""
    one, many = (computing_seconds("CPU of a test", samples) for samples in (2, 128))
    assert many["bmm"] == pytest.approx(64 * one["bmm"])
    assert many["clone"] == pytest.approx(3 / 4 * many["add"])


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "MI300X"])
def test_what_cores_do_leaves_the_prices_of_devices_alone(name: str) -> None:
    graph, cluster = trace(Batched(), (torch.randn(4, 64, 64),) * 2), fast_ranks(name, 1)
    device = Device(cluster.places[0].accelerator, "fp32", HETHUB, packaged())
    costs = Costs(cluster, "fp32")
    for operator in graph.operators:
        told = work(graph, operator)
        expected = device.seconds(told) if told else 0.0
        assert sum(costs.operator(graph, operator))[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "MI300X"])
def test_products_under_autocast_cost_what_those_of_a_module_in_that_type_cost(name: str) -> None:
    """They were priced as the parameters' fp32, 10.6 and 3.9 times too dear."""
    node = {"name": "a", "accelerator": name, "accelerators": 1, "gbps_per_nic": 100}
    cluster, told = ClusterSpec.model_validate({"name": "one", "nodes": [node]}), []
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Sequential(nn.Linear(512, 512, bias=False), Summed()).to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            graph = trace(layer, (torch.randn(512, 512, dtype=dtype),))
        costs = Costs(cluster, precision_of(graph))
        products = [o for o in graph.operators if o.key == "aten.mm.default"]
        assert {graph.tensors[o.made[0]].dtype for o in products} == {torch.bfloat16}
        told.append([float(costs.operator(graph, o)[1][0]) for o in products])
    assert told[0] == pytest.approx(told[1], rel=1e-12)


class Summed(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values * values * values.detach().neg()).sum()


def test_a_tensor_that_an_operator_is_given_twice_is_read_once() -> None:
    """On a core x * x took 0.77 times as long as x * y, which moves a third more."""
    graph = trace(nn.Sequential(nn.Linear(8, 8), Summed()), (torch.randn(6, 8),))
    square, product = (work(graph, o) for o in graph.operators if o.is_forward and o.key == "aten.mul.Tensor")
    assert square is not None
    assert product is not None
    assert (square.fused_bytes, product.fused_bytes) == (2 * 6 * 8 * 4, 3 * 6 * 8 * 4)


class Attending(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.layer, self.is_causal = nn.Linear(16, 16), is_causal

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        heads = self.layer(values).unflatten(2, (1, 16)).transpose(1, 2)
        made = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=self.is_causal)
        return (made + torch.zeros_like(made)).sum()


@pytest.mark.parametrize(("length", "part"), [(256, 1.0), (512, 1.0), (1024, 0.75), (4096, 0.5625)])
def test_causal_attention_computes_what_its_kernel_does_not_leave_out(length: int, part: float) -> None:
    """The kernel took 0.76 of the whole attention's time over 1024 positions and 0.55 to 0.62 over 4096; up to 512, all."""
    flops = []
    for is_causal in (False, True):
        graph = trace(Attending(is_causal), (torch.randn(2, length, 16),))
        works = [work(graph, o) for o in graph.operators if "scaled_dot_product" in o.key]
        flops.append([found.flops for found in works if found])
    assert len(flops[0]) == 2  # forward and backward
    assert flops[1] == pytest.approx([part * whole for whole in flops[0]])


def test_what_fills_a_tensor_reads_nothing() -> None:
    graph = trace(Attending(False), (torch.randn(2, 8, 16),))
    (filled,) = (work(graph, o) for o in graph.operators if o.key == "aten.zeros_like.default")
    assert filled is not None
    assert filled.fused_bytes == 2 * 8 * 16 * 4
