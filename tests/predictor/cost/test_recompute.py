"""What runs again in a backward takes what it takes in a forward."""

from dataclasses import replace

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import LayerCost
from hethub.predictor.cost.operators import Shape, beside_sums, layer_work, weight_work
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.memory.parameters import RankParameters, rank_widths
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.accelerator import find_accelerator
from hethub.spec.layout.bind import bind
from hethub.spec.plan import Recompute
from tests.predictor.plans import LLAMA_8B, cluster, under, uniform


@pytest.mark.parametrize("accelerator", ["H100-SXM5-80GB", "MI300X"])
def test_selective_recompute_takes_attentions_own_time(accelerator: str) -> None:
    """It was priced by attention's part of the FLOPs, 1.45 ms on H100, of which fused attention reaches fewer a second
    than products: 2.6 ms."""
    cost = LayerCost(LLAMA_8B, find_accelerator(accelerator), 8192, "bf16", HETHUB)
    plain, selective, full = (cost.layer(1, 1, recompute) for recompute in ("none", "selective", "full"))
    again, fit = selective.backward - plain.backward, cost.device.fit
    flops = 4 * LLAMA_8B.heads * LLAMA_8B.head_size * 8192 * 8192 / 2
    kernel = fit.scale * (flops / (fit.attention * cost.device.attention_peak) + fit.kernel_seconds)
    assert again == pytest.approx(kernel, rel=1e-3)
    assert full.backward - plain.backward == pytest.approx(plain.forward)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_what_runs_again_is_not_put_off(recompute: Recompute) -> None:
    """A part of it was, beside a layer's gradients of weights, which take what their products do."""
    on = cluster(("H100-SXM5-80GB", 1, 2))
    layout = uniform(LLAMA_8B, on, tp=1, pp=2, micro_batch=1, batch=8, seq=8192, recompute=recompute)
    costs = PlanCosts(bind(under("zero_bubble", layout.plan), LLAMA_8B, on), HETHUB, packaged())
    cost, found = costs.layer_cost(1), costs.microbatch(1, 0, 1)
    products = cost.device.seconds(weight_work(LLAMA_8B, Shape(1, 8192, 1.0), "bf16", cost.software), backward=True)
    assert found.weight.compute == pytest.approx(16 * products)
    assert found.backward.compute == pytest.approx(
        16 * (cost.layer(1, 1, recompute).backward - products) + cost.head(1).backward
    )


def test_fused_attentions_backward_is_five_products_for_the_forwards_two() -> None:
    """It has the scores once more, and the gradients of values, of probabilities, of queries and of keys: as many
    FLOPs each (FlashAttention 2, arXiv 2307.08691, section 3)."""
    forward, backward = layer_work(LLAMA_8B, Shape(1, 4096, 1.0), "bf16", HETHUB)
    pair = 2 * LLAMA_8B.heads * LLAMA_8B.head_size * 4096 * 4096 / 2
    assert forward.attention_flops == pytest.approx(2 * pair)
    assert backward.attention_flops == pytest.approx(5 * pair)


def test_products_backward_are_twice_the_forwards() -> None:
    """Of every product two gradients, each of as many FLOPs; where attention is not fused, of its two products too. What moves
    between products has a gradient that moves as well."""
    unfused = replace(HETHUB, fused_attention=False)
    forward, backward = layer_work(LLAMA_8B, Shape(1, 4096, 1.0), "bf16", unfused)
    assert backward.flops == 2 * forward.flops
    assert (backward.fused_bytes, backward.elementwise_bytes) == (
        2 * forward.fused_bytes,
        2 * forward.elementwise_bytes,
    )
    assert forward.flops - layer_work(LLAMA_8B, Shape(1, 4096, 1.0), "bf16", HETHUB)[0].flops == pytest.approx(
        2 * 2 * LLAMA_8B.heads * LLAMA_8B.head_size * 4096 * 4096
    )


@pytest.mark.parametrize(("kv_heads", "tp"), [(8, 1), (8, 8), (2, 8), (1, 4)])
def test_a_backward_makes_the_gradients_that_its_rank_holds(kv_heads: int, tp: int) -> None:
    """Of all matrices, of which a head of keys and values is on every rank that shares it; beside its two sums those of the
    matrices cut by columns."""
    model = LLAMA_8B.replace(kv_heads=kv_heads)
    widths, asked = rank_widths(model, tp)[0], (model, Shape(1, 4096, 1 / tp), "bf16", HETHUB)
    assert layer_work(*asked)[1].gradients == RankParameters.of(model, widths).layer_matrices
    by_columns = (widths.query + 2 * widths.kv) * model.head_size, 2 * widths.ffn
    assert tuple(work.gradients for work in beside_sums(*asked)) == tuple(model.hidden * own for own in by_columns)


def test_short_sequences_recompute_little() -> None:
    cost = LayerCost(LLAMA_8B, find_accelerator("H100-SXM5-80GB"), 512, "bf16", HETHUB)
    plain, selective = (cost.layer(1, 1, recompute) for recompute in ("none", "selective"))
    assert 0 < selective.backward - plain.backward < 0.1 * plain.forward
