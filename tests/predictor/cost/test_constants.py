"""How an accelerator finds its constants."""

import math
from dataclasses import replace

import pytest

from hethub.predictor.cost.constants import ASSUMED, architecture, packaged, peak_flops
from hethub.predictor.cost.layer import Device, LayerCost
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.node_links import host_gbytes_per_second
from hethub.predictor.cost.software import HETHUB, MathPrecision, Software
from hethub.spec.accelerator import catalogue, find_accelerator
from hethub.spec.cluster import ClusterSpec
from tests.predictor.plans import LLAMA_8B


def test_an_architectures_scales_are_on_top_of_its_predecessors() -> None:
    own = {"log_scale": 0.1, "throttle": 0.0, "log_attention": -0.2}
    constants = replace(packaged(), architectures={**packaged().architectures, "blackwell fp16": own}, accelerators={})
    new, old = (constants.efficiency(find_accelerator(name), "bf16") for name in ("B200-SXM", "H100-PCIe-80GB"))
    assert new.scale == pytest.approx(old.scale * math.exp(0.1))
    assert new.attention == pytest.approx(old.attention * math.exp(-0.2))


@pytest.mark.parametrize(("precision", "expected"), [("bf16", 2500), ("fp8", 5000), ("mxfp8", 5000), ("nvfp4", 15000)])
def test_narrow_precisions_have_peaks_of_their_own(precision: MathPrecision, expected: float) -> None:
    assert peak_flops(find_accelerator("GB300"), precision) == expected * 1e12
    assert peak_flops(find_accelerator("A100-SXM4-80GB"), precision) == 312e12  # has none of them


def test_an_accelerator_of_an_unknown_architecture_is_predicted_from_its_data_sheet() -> None:
    unknown = find_accelerator("A100-SXM4-80GB").replace(name="mine", vendor="mine")
    assert packaged().efficiency(unknown, "bf16").scale == 1.0


def test_constants_are_far_fewer_than_rows() -> None:
    assert 0 < packaged().count <= 2650 / 10


def test_scales_belong_to_architectures_and_accelerators_alone() -> None:
    """None to a source, a model or a row that it was fitted on."""
    constants, known = packaged(), catalogue().values()
    names = {f"{accelerator.name} {width}" for accelerator in known for width in ("fp16", "fp32")}
    architectures = {f"{architecture(accelerator)} {width}" for accelerator in known for width in ("fp16", "fp32")}
    assert constants.accelerators
    assert constants.accelerators.keys() <= names
    assert constants.architectures
    assert constants.architectures.keys() <= architectures


def test_tf32_without_such_units_is_fp32() -> None:
    turing = find_accelerator("T4")
    assert turing.tf32_tflops is None
    one, other = (Device(turing, precision, HETHUB, packaged()) for precision in ("tf32", "fp32"))
    assert (one.peak, one.fit) == (other.peak, other.fit)


@pytest.mark.parametrize(
    ("precision", "counted", "expected"), [("bf16", 10.0, 10.0), ("bf16", None, None), ("tf32", 10.0, 0.0)]
)
def test_gradients_are_accumulated_in_as_many_bytes_as_the_software_moves(
    precision: MathPrecision, counted: float | None, expected: float | None
) -> None:
    """None: as fitted on layers under autocast."""
    constants = packaged()
    device = Device(find_accelerator("A100-SXM4-80GB"), precision, Software(gradient_pass_bytes=counted), constants)
    assert device.fit.gradient_bytes == (constants.common["gradient_bytes"] if expected is None else expected)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_small_collective_through_the_host_takes_longer_the_more_ranks_meet(ranks: int) -> None:
    node = {"name": "n", "accelerator": "T4", "accelerators": 8}
    network = Network(ClusterSpec.model_validate({"name": "one", "nodes": [node]}), packaged())
    seconds = network.reduce_scatter(network.group(range(ranks)), 1)
    assert seconds == pytest.approx(packaged().links["hosted_latency_seconds"] * math.log2(ranks), rel=0.1)


def test_what_was_never_fitted_is_named_and_not_counted() -> None:
    constants = packaged()
    assert ASSUMED.keys() <= {*constants.common, *constants.links}
    more = replace(constants, links={**constants.links, "another": 1.0})
    assert more.count == constants.count + 1
    without = {key: value for key, value in constants.links.items() if key not in ASSUMED}
    assert replace(constants, links=without).count == constants.count


@pytest.mark.parametrize(("name", "measured"), [("H100-SXM5-80GB", 51.0), ("MI300X", 55.0), ("A100-SXM4-80GB", 26.3)])
def test_host_copies_reach_what_was_measured(name: str, measured: float) -> None:
    """GB/s from host to device (Azure AI benchmarking guide), not what collectives over PCIe reach."""
    assert host_gbytes_per_second(find_accelerator(name), packaged().links) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("name", "chip"), [("MI250-GCD", "MI250X-GCD"), ("H800-SXM5-80GB", "H100-SXM5-80GB")])
def test_one_chip_under_two_names_has_one_scale(name: str, chip: str) -> None:
    """MI250-GCD was predicted 7 % faster than MI250X-GCD, whose peak is 5 % higher."""
    one, other = (packaged().efficiency(find_accelerator(each), "bf16") for each in (name, chip))
    assert one == other
    layers = [LayerCost(LLAMA_8B, find_accelerator(each), 4096, "bf16").layer(1).total for each in (name, chip)]
    assert layers[0] >= layers[1]
