"""What hethub's own runtime does on a device is what is priced: compiled bodies, gradients added up inside products."""

from dataclasses import replace

import pytest

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import Device, LayerCost, adamw_bytes
from hethub.predictor.cost.operators import Shape, layer_work
from hethub.predictor.cost.software import HETHUB, MathPrecision, Software, hethub_software
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.tensors import LOSS_CHUNK_TOKENS
from tests.predictor.plans import LLAMA_8B

EAGER, FUSED = (replace(HETHUB, fused_elementwise=given) for given in (False, True))


@pytest.mark.parametrize(("chunked", "times"), [(True, 3), (False, 1)])
def test_of_each_token_ranks_tell_each_other_the_largest_logit_and_then_two_sums(chunked: bool, times: int) -> None:
    """Two and a half chunks are three times two sums, of 4 and 8 bytes a token in all."""
    tokens, asked = 2.5 * LOSS_CHUNK_TOKENS, list[float]()

    def all_reduce(num_bytes: float) -> float:
        asked.append(num_bytes)
        return num_bytes

    seconds = replace(HETHUB, chunked_loss=chunked).loss_seconds(tokens, all_reduce)
    assert [times * num_bytes for num_bytes in asked] == pytest.approx([4 * tokens, 8 * tokens])
    assert seconds == pytest.approx(12 * tokens)


def layer_seconds(accelerator: str, software: Software) -> float:
    return LayerCost(LLAMA_8B, find_accelerator(accelerator), 4096, "bf16", software).layer(1).total


@pytest.mark.parametrize("accelerator", ["H100-SXM5-80GB", "MI300X"])
def test_devices_run_compiled_bodies(accelerator: str) -> None:
    assert layer_seconds(accelerator, HETHUB) == layer_seconds(accelerator, FUSED)
    assert layer_seconds(accelerator, HETHUB) < 0.95 * layer_seconds(accelerator, EAGER)


@pytest.mark.parametrize(
    ("accelerator", "is_tuned"), [("H200-SXM-141GB", True), ("GB300", False), ("A100-SXM4-80GB", False)]
)
def test_attention_is_cudnns_where_torch_takes_it(accelerator: str, is_tuned: bool) -> None:
    """On compute capabilities 9.0 and 10.0."""
    assert layer_seconds(accelerator, HETHUB) == layer_seconds(accelerator, replace(HETHUB, tuned_attention=is_tuned))
    other = layer_seconds(accelerator, replace(HETHUB, tuned_attention=not is_tuned))
    assert (layer_seconds(accelerator, HETHUB) < other) == is_tuned


def test_windows_and_whole_precisions_have_no_attention_of_cudnns() -> None:
    """torch's takes half precisions alone, and hethub's windows take FlashAttention 2."""
    h200, plain = find_accelerator("H200-SXM-141GB"), replace(HETHUB, tuned_attention=False)
    windowed = LLAMA_8B.replace(sliding_window=1024)
    for model, precision in ((windowed, "bf16"), (LLAMA_8B, "fp32")):
        asked, untuned = (LayerCost(model, h200, 4096, precision, own).layer(1) for own in (HETHUB, plain))  # type: ignore[arg-type]
        assert asked == untuned


def test_a_captured_program_waits_for_no_launches() -> None:
    """Of a layer so small that the host cannot launch its kernels in time, what is left is the device's own time."""
    tiny = LLAMA_8B.replace(hidden=64, heads=1, kv_heads=1, ffn=64)
    launched, captured = (
        LayerCost(tiny, find_accelerator("H100-SXM5-80GB"), 16, "bf16", replace(FUSED, captured=own))
        for own in (False, True)
    )
    kernels = layer_work(tiny, Shape(1, 16, 1.0), "bf16", FUSED)[0].kernels
    assert launched.layer(1).forward > kernels * launched.device.fit.launch_seconds > captured.layer(1).forward


def test_cpus_run_bodies_as_they_stand_unless_asked_to_compile() -> None:
    assert layer_seconds("CPU-core", HETHUB) == layer_seconds("CPU-core", EAGER)
    assert layer_seconds("CPU-core", hethub_software(True)) == layer_seconds("CPU-core", FUSED)


def test_train_compile_false_is_priced_by_the_planner_too() -> None:
    on = ClusterSpec.model_validate(
        {"name": "one", "nodes": [{"name": "n", "accelerator": "H100-SXM5-80GB", "accelerators": 1}]}
    )
    problem = pose(LLAMA_8B, on, Batch(8, 4096, "bf16"), software=hethub_software(False))
    rate = UnitCosts(problem).rate(0, 1, 1, "none")
    assert rate.layer.total == layer_seconds("H100-SXM5-80GB", EAGER)


@pytest.mark.parametrize(("accelerator", "num_bytes"), [("H100-SXM5-80GB", 6.0), ("MI300X", 10.0)])
def test_gradients_are_added_up_inside_products_where_cublas_can(accelerator: str, num_bytes: float) -> None:
    """4 bytes read and 4 written for the 2 of a half-precision result; elsewhere that is written, read and added."""
    device = Device(find_accelerator(accelerator), "bf16", HETHUB, packaged())
    assert device.fit.gradient_bytes == num_bytes
    theirs = Device(find_accelerator(accelerator), "bf16", Software(gradient_pass_bytes=3.0), packaged())
    assert theirs.fit.gradient_bytes == 3.0


@pytest.mark.parametrize(("precision", "weight"), [("bf16", 2), ("fp32", 0), ("fp64", 0)])
def test_an_update_moves_what_adamw_reads_and_writes(precision: MathPrecision, weight: int) -> None:
    """A master in fp32 at least, which is the weight where that is as wide."""
    master = 8 if precision == "fp64" else 4
    gradient = 3 * master  # zeroed, read for the norm, read by the step
    state = 3 * 2 * master  # master and both moments, read and written
    assert adamw_bytes(precision) == gradient + state + weight


def test_a_heads_gradients_are_made_in_its_forward() -> None:
    """With the logits at hand (hethub/runtime/model/loss.py), as a profile measures it: on a CPU 0.3 % of the head's seconds are
    its backward's, of which two thirds were priced there. The sum is what it was."""
    h100 = find_accelerator("H100-SXM5-80GB")
    found, whole = (
        LayerCost(LLAMA_8B, h100, 4096, "bf16", replace(HETHUB, chunked_loss=chunked)).head(1)
        for chunked in (True, False)
    )
    three_products = 3 * 2 * 4096 * LLAMA_8B.hidden * LLAMA_8B.vocab
    assert found.forward > three_products / 989e12
    assert found.backward < 0.01 * found.forward
    assert found.total == pytest.approx(whole.total)
    assert whole.backward > 1.5 * whole.forward
