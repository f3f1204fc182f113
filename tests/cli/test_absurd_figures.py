"""Whatever number stands in a file: a prediction of finite figures that add up, or one paragraph and exit code 2."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hethub.cli import run
from tests.support.job_files import write_yaml

MODEL = {
    "name": "m", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 256, "max_seq_len": 128,
}  # fmt: skip
OWN = {
    "name": "own", "vendor": "nvidia", "memory_gb": 16, "memory_gbytes_per_second": 900, "fp64_tflops": 5, "fp32_tflops": 10,
    "tf32_tflops": 20, "fp32_matrix_tflops": 12, "fp16_tflops": 40, "bf16_tflops": 40, "fp8_tflops": 80,
    "link_gbytes_per_second": 50, "pcie_generation": 4, "tdp_watts": 300,
}  # fmt: skip
NODE = {"name": "a", "accelerator": OWN, "accelerators": 2, "count": 1, "host_memory_gb": 64, "reserved_memory_gb": 1, "nics": 1,
        "gbps_per_nic": 100, "price_per_hour": 1}  # fmt: skip
REGIONS = {"of_node": {"a": "x", "b": "y"}, "names": ["x", "y"], "gbps": [[100, 10], [10, 100]],
           "latency_seconds": [[0, 0.01], [0.01, 0]]}  # fmt: skip
LINKS = {
    "in_node": {"gbytes_per_second": 40, "latency_seconds": 1e-5},
    "between_nodes": {"latency_seconds": 5e-6, "oversubscription": 1},
    "between_islands": {"gbps_per_node": 50, "latency_seconds": 5e-5}, "regions": REGIONS,
}  # fmt: skip
AMD = {"name": "b", "accelerator": "MI100", "accelerators": 2, "gbps_per_nic": 100}
STAGES = [
    {"layers": [[0, 2]], "replicas": [{"ranks": [0, 1], "micro_batch": 2, "samples": 8, "in_flight": 2}]},
    {"layers": [[2, 4]], "zero": 1, "state_shares": {2: 0.5},
     "replicas": [{"ranks": [2], "micro_batch": 1, "samples": 5}, {"ranks": [3], "micro_batch": 1, "samples": 3}]},
]  # fmt: skip
BATCH = {"global_batch": 8, "seq_len": 64, "precision": "fp16"}
FILES: dict[str, Any] = {
    "model": MODEL,
    "cluster": {"name": "c", "nodes": [NODE, AMD], "links": LINKS},
    "plan": {"model": "m", "cluster": "c", **BATCH, "stages": STAGES},
    "job": {"model": "model.yaml", "cluster": "cluster.yaml", "train": BATCH, "plan": "plan.yaml",
            "constraints": {"reserve": 0.06}},
}  # fmt: skip


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a file holds a number."""
    if isinstance(content, dict):
        return [found for key, value in content.items() for found in places(value, (*path, key))]
    if isinstance(content, list):
        return [found for index, value in enumerate(content) for found in places(value, (*path, index))]
    return [path] if isinstance(content, (int, float)) else []


PLACES = [(name, path) for name, content in FILES.items() for path in places(content)]
ABSURD = [0, -1, 1.5, 1e-300, 1e-9, 1e9, 1e300, math.nan, math.inf, -math.inf, 10**8, 10**40]


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = here = copy.deepcopy(content)
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return changed


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} left the predictor")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), value=st.sampled_from(ABSURD) | st.floats())
def test_any_number_in_any_file(
    place: tuple[str, tuple[Any, ...]], value: float, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name, path = place
    for other, content in FILES.items():
        write_yaml(tmp_path / f"{other}.yaml", with_value(content, path, value) if other == name else content)
    code = run(["predict", str(tmp_path / "job.yaml"), "--json"])
    printed = capsys.readouterr()
    assert code in (0, 2)
    if code == 2:
        assert printed.err.startswith("hethub: ")
        assert printed.err.count("\n") == 1
        assert printed.out == ""
    else:
        check(json.loads(printed.out, parse_constant=no_constant))


def check(data: dict[str, Any]) -> None:
    low, high = data["step_seconds_interval"]
    assert 0 < low <= data["step_seconds"] <= high < math.inf
    assert 0 < data["tokens_per_second"] < math.inf
    assert 0 < data["percent_of_ceiling"] <= 100 * (1 + 1e-9)
    assert sum(data["breakdown"].values()) == pytest.approx(data["step_seconds"])
