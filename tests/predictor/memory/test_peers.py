"""What others count of memory: Megatron's published formula, PyTorch's MemTracker. Differences are named."""

from typing import Any, NamedTuple

import pytest

from hethub.predictor.calibration.sources.training_steps import read_row
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.memory.activations import kept_of_layer, kept_per_sample
from hethub.predictor.memory.parameters import rank_widths
from hethub.predictor.memory.ranks import rank_memory
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Recompute
from tests.predictor.plans import cluster, uniform


def kept_bytes(model: ModelSpec, seq: int, tp: int, software: Software, width: int, recompute: Recompute) -> float:
    """Bytes that a layer keeps of one sample on one of `tp` ranks."""
    precision = "bf16" if width == 2 else "fp32"
    layout = uniform(
        model, cluster(("A100-SXM4-80GB", 1, tp)), tp=tp, pp=1, micro_batch=1, batch=1, seq=seq, precision=precision
    )
    kept = kept_per_sample(layout, rank_widths(model, tp)[0], software, width, recompute)
    return kept_of_layer(kept, recompute, software)


class Published(NamedTuple):
    """A row of arXiv 2205.05198, table 3, under one of the ways of its table 2."""

    hidden: int
    heads: int
    tp: int
    sequence_parallel: bool
    recompute: Recompute


MEGATRON = [
    Published(6144, 64, 8, False, "none"),
    Published(6144, 64, 8, True, "none"),
    Published(6144, 64, 1, False, "none"),
    Published(12288, 96, 8, False, "none"),
    Published(12288, 96, 8, True, "none"),
    Published(12288, 96, 8, False, "full"),
    Published(20480, 128, 8, False, "none"),
    Published(20480, 128, 8, True, "none"),
    Published(25600, 160, 8, True, "none"),
    Published(25600, 160, 8, False, "full"),
]


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: "-".join(map(str, row)))
def test_layers_keep_what_megatrons_formula_says(row: Published) -> None:
    """Its bytes per token of hidden size h: (10 + 24 / t + 5 a s / (h t)) h, 10 cut by t too with sequence parallelism;
    2 h under full recompute. Ours lack the masks of the two dropouts behind attention and MLP (h each), which no row of
    ours ran with, and have the norms' statistics and the softmax's sums in fp32."""
    seq, h, a, t = 2048, row.hidden, row.heads, row.tp
    model = ModelSpec(
        name="gpt", family="gpt", layers=2, hidden=h, heads=a, ffn=4 * h, vocab=51200, max_seq_len=seq, gated=False
    )
    software = Software(
        stack="megatron", fused_attention=False, attention_dropout=True, sequence_parallel=row.sequence_parallel
    )
    found = kept_bytes(model, seq, t, software, 2, row.recompute)
    cut = t if row.sequence_parallel else 1
    published, masks, statistics = (10 / cut + 24 / t + 5 * a * seq / (h * t)) * h, 2 * h / cut, 4 * (2 + a / t)
    if row.recompute == "full":
        published, masks, statistics = 2 * h, 0.0, 0.0
    assert found == pytest.approx(seq * (published - masks + statistics), rel=1e-9)


def test_our_layers_keep_less_than_eager_ones() -> None:
    """hethub computes the gate's activation again."""
    model = ModelSpec(name="llama", layers=2, hidden=128, heads=4, kv_heads=4, ffn=344, vocab=512, max_seq_len=64)
    eager = kept_bytes(model, 64, 1, Software(keeps_gate_activation=True), 4, "none")
    assert kept_bytes(model, 64, 1, HETHUB, 4, "none") == eager - 4 * 64 * model.ffn


ROW = {
    "id": "a", "source": "made", "family": "llama", "layers": "8", "hidden": "1024", "heads": "8", "ffn": "2816",
    "gated": "1", "vocab": "32000", "seq": "2048", "accelerator": "H100-SXM5-80GB", "n_accelerators": "8", "tp": "1",
    "pp": "1", "dp": "8", "micro_batch": "1", "global_batch": "64", "precision": "bf16", "step_seconds": "1", "zero": "1",
    "flash_attention": "1",
}  # fmt: skip
LAYER = 2048 * 2  # bytes of a column of a layer's activations


def held(**more: str) -> dict[str, int]:
    """Bytes by part of a rank of the row, host memory's too."""
    case = read_row({**ROW, **more})
    entry = rank_memory(case.layouts[0], case.software)[0]
    return entry.parts | {f"host {part}": num_bytes for part, num_bytes in entry.host_parts.items()}


def test_facts_of_a_programs_stack_count() -> None:
    """141 of 742 measured rows were refused as too large without them."""
    plain, nemo, composer = held(stack="unknown"), held(stack="nemo-megatron"), held(stack="composer-fsdp")
    assert nemo["gradients"] == plain["gradients"] / 2
    assert plain["activations"] - nemo["activations"] == 8 * LAYER * 2816
    assert plain["optimizer"] - nemo["optimizer"] == plain["optimizer"] / 6
    assert nemo["logits"] == plain["logits"] == 10 * 2048 * 32000
    assert composer["logits"] == 4 * 2048 * 32000
    assert held(stack="torchtitan-eager")["logits"] == 12 * 2048 * 32000
    in_fp8 = held(stack="nemo-megatron", precision="fp8")["activations"]
    assert nemo["activations"] - in_fp8 == 8 * LAYER / 2 * (2 * 1024 + 2816 - 1024)
    assert held(optimizer_included="0")["optimizer"] == 0


def test_layers_whose_activations_go_to_the_host_are_not_counted_twice() -> None:
    """BigScience's ZeRO-3 checkpoints to the host; Megatron-Bridge's FSDP has half of the layers there, and under ZeRO-1
    none."""
    plain, bridge = held(stack="nemo-megatron", zero="3"), held(stack="megatron-bridge", zero="3")
    layer = plain["activations"] // 8
    assert 4 * layer <= bridge["host activations"] < 8 * layer  # pinned, so rounded up
    assert bridge["activations"] == pytest.approx(plain["activations"] - 2 * layer, rel=0.01)
    assert held(stack="megatron-bridge")["host activations"] == 0
    deepspeed = held(stack="megatron-deepspeed-zero3", zero="3", recompute="full", precision="fp16")
    assert 8 * LAYER * 1024 <= deepspeed["host activations"] < 16 * LAYER * 1024


def test_recipes_that_keep_some_products_compute_the_rest_of_a_layer_again() -> None:
    """MaxText keeps queries, keys and values, Paxml attention's projection too; beside all layers' the one that is
    computed again lies whole. Where a row says what is computed again, that counts."""
    whole, full = (held(stack="jax", recompute=way)["activations"] for way in ("none", "full"))
    maxtext, paxml = held(stack="jax-maxtext")["activations"], held(stack="jax-paxml")["activations"]
    assert maxtext - full == 7 * LAYER * 3 * 1024  # the layer that runs again is whole in both
    assert paxml - full == 7 * LAYER * 4 * 1024
    assert held(stack="jax-maxtext", recompute="none")["activations"] == whole


def test_a_layer_that_runs_again_has_scores_and_comes_behind_the_logits() -> None:
    """Under full recompute: its attention's scores lie there once, and a head's logits are gone by then."""
    fused, unfused = (held(recompute="full", flash_attention=way) for way in ("1", "0"))
    scores = 8 * 2048**2 * 5
    assert unfused["activations"] - fused["activations"] == scores
    assert fused["logits"] < 10 * 2048 * 32000
    assert unfused["logits"] == max(0, fused["logits"] - scores)


def test_deepspeeds_bf16_optimizer_shards_states_at_stage_0() -> None:
    sharded, whole = (
        held(stack="megatron-deepspeed", zero="0", precision=way)["optimizer"] for way in ("bf16", "fp16")
    )
    assert sharded == pytest.approx(whole / 8, rel=0.01)


def test_torchs_own_cross_entropy_takes_12_bytes_a_logit() -> None:
    """As MemTracker sees it under fake tensors: the log-softmax of an fp32 copy and two gradients of it; the logits are gone."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        x = torch.zeros(1024, 1000, dtype=torch.bfloat16, requires_grad=True)
        targets, tracker = torch.zeros(1024, dtype=torch.long), MemTracker()
        tracker.track_external(x, targets)
        before = sum(bytes_by_kind(tracker).values()) / 2  # `Total` is one of the kinds
        with tracker:
            torch.nn.functional.cross_entropy((x * 1).float(), targets).backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    assert peak["Total"] - before == pytest.approx(12 * 1024 * 1000, rel=1e-3)


class Tracked(NamedTuple):
    """A Llama of Hugging Face and the sample that passes it."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    batch: int
    width: int


TRACKED = [
    Tracked(256, 8, 8, 688, 128, 2, 4),
    Tracked(256, 8, 2, 688, 128, 2, 4),
    Tracked(256, 8, 2, 688, 128, 2, 2),
    Tracked(512, 8, 8, 1408, 256, 1, 2),
    Tracked(512, 16, 4, 1408, 64, 4, 4),
    Tracked(768, 12, 12, 2048, 64, 1, 4),
    Tracked(1024, 8, 1, 4096, 512, 1, 2),
    Tracked(2048, 32, 8, 8192, 1024, 1, 2),
    Tracked(4096, 32, 8, 14336, 2048, 2, 2),
    Tracked(8192, 64, 8, 28672, 4096, 1, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", TRACKED, ids=lambda row: "-".join(map(str, row)))
def test_layers_keep_what_memtracker_sees_of_hugging_faces(row: Tracked) -> None:
    """To the byte, under fake tensors: what a second layer adds. Theirs keep besides what ours do: of both norms an fp32
    tensor of the hidden state's size, keys and values repeated for all heads (of one head that is a view), the gate's
    activation, a mask."""
    model = ModelSpec(
        name="tracked", layers=2, hidden=row.hidden, heads=row.heads, kv_heads=row.kv_heads, ffn=row.ffn, vocab=512,
        max_seq_len=row.seq,
    )  # fmt: skip
    (one, stepped_one), (two, stepped_two) = tracked(row, 1), tracked(row, 2)
    ours = kept_bytes(model, row.seq, 1, HETHUB, row.width, "none")
    tokens, repeated = row.seq * row.batch, 2 * (row.heads - row.kv_heads) * model.head_size * (row.kv_heads > 1)
    theirs = tokens * (2 * max(4, row.width) * row.hidden + row.width * (repeated + row.ffn + row.seq))
    assert two["ACT"] - one["ACT"] == row.batch * ours + theirs
    assert two["PARAM"] - one["PARAM"] == row.width * model.layer_parameters
    assert stepped_two["GRAD"] - stepped_one["GRAD"] == row.width * model.layer_parameters
    counters = 9 * 4  # of steps, one for each tensor
    assert stepped_two["OPT"] - stepped_one["OPT"] == 2 * row.width * model.layer_parameters + counters


def tracked(row: Tracked, layers: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind before the backward of a model of so many layers, and behind its first step."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=row.hidden, num_attention_heads=row.heads, num_key_value_heads=row.kv_heads,
        intermediate_size=row.ffn, num_hidden_layers=layers, vocab_size=512, max_position_embeddings=row.seq,
        use_cache=False, attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype({2: torch.bfloat16, 4: torch.float32}[row.width])
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            llama = LlamaForCausalLM(config)
            optimizer = torch.optim.AdamW(llama.parameters(), foreach=True)
            tokens, tracker = torch.zeros(row.batch, row.seq, dtype=torch.long), MemTracker()
            tracker.track_external(llama, optimizer, tokens)
            with tracker:
                loss = llama(input_ids=tokens, labels=tokens).loss
                forward = bytes_by_kind(tracker)
                loss.backward()
                optimizer.step()
                return forward, bytes_by_kind(tracker)
    finally:
        torch.set_default_dtype(before)


def bytes_by_kind(tracker: Any) -> dict[str, int]:
    """What a MemTracker sees now on its only device."""
    (found,) = tracker.get_tracker_snapshot("current").values()
    return {str(kind).rpartition(".")[2]: num_bytes for kind, num_bytes in found.items()}
