"""What programs do that published tables do not say: facts of software stacks and of machines, never fitted."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

FAST_HOSTS = 2023  # programs from this year on: PyTorch 2, and the processors beside H100
HALF_GRADIENT_BYTES = 6.0  # gradients kept in half precision: the new and the old one read, the sum written
HALF = ("fp16", "bf16", "fp8", "mxfp8", "nvfp4")  # weights and gradients of 16 bits at most


class Stack(NamedTuple):
    """What a software stack does by its own defaults, and since when it is as it is here."""

    year: int
    source: str
    fused_elementwise: bool = False  # norms, dropout, residuals in few kernels
    overlapped_reduction: bool = False  # gradients summed under the last backward
    overlapped_tensor_parallel: bool = False  # products cut in chunks that hide their own collectives
    overlapped_gather: bool = False  # ZeRO-1's new weights gathered under the next forward
    captured: bool = False  # CUDA graphs, XLA: the host launches a program, not kernels
    spread_boundaries: bool = False  # every tensor-parallel rank sends its part between stages
    fused_softmax: bool = True  # where attention is not fused: scale, mask and softmax in one kernel
    fused_activation: bool = True  # GELU in one kernel
    tuned_attention: bool = False  # fused attention written for this generation of matrix units
    fused_gate: bool = False  # SwiGLU in one kernel, which keeps its inputs alone
    loss_bytes: int = 10  # of cross-entropy: half-precision logits, their fp32 copy, its gradient
    half_gradients: tuple[str, ...] = ()  # precisions whose gradients stay in half from backward to the optimizer
    narrow_inputs: bool = False  # of products in fp8: kept for the backward as they were multiplied
    master_remainders: bool = False  # the optimizer keeps the 16 bits that a bf16 weight lacks, no fp32 copy
    kept_products: Literal["all", "qkv", "qkv and output"] = (
        "all"  # of a layer until its backward, where a row does not say what is computed again
    )
    layers_in_host: float = 0.0  # of all layers under ZeRO-3, whose activations wait in host memory
    shards_states: tuple[str, ...] = ()  # precisions whose optimizer is ZeRO-1's whatever the level
    autocast: bool = False  # weights and gradients stay in fp32 and are cast for every product
    zero: int = 0  # where a row does not say
    reduces_once: bool = False  # ZeRO-2 of a pipeline sums once a step, not once a micro-batch
    fused_attention: bool = False  # where a row does not say

    def facts(self) -> dict[str, Any]:
        """What of it is a field of `Software`."""
        names = ("fused_elementwise", "overlapped_reduction", "overlapped_tensor_parallel", "overlapped_gather",
                 "captured",
                 "spread_boundaries", "fused_softmax", "tuned_attention", "loss_bytes", "narrow_inputs", "master_remainders")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"slow_host": self.year < FAST_HOSTS}


# By the beginning of a stack's name in a table, the longest that fits first.
STACKS: Mapping[str, Stack] = {
    "nemo-megatron": Stack(
        2024, "NeMo performance recipes: overlap_grad_reduce, overlap_param_gather, tp_comm_overlap, cuDNN attention, "
        "grad_reduce_in_fp32 = False; Megatron-Core's SwiGLUFunction; Transformer Engine's inputs in fp8; "
        "megatron_base_model.py: store_param_remainders",
        fused_elementwise=True, overlapped_reduction=True, overlapped_tensor_parallel=True, overlapped_gather=True, spread_boundaries=True,
        tuned_attention=True, zero=1, reduces_once=True, fused_attention=True, fused_gate=True, half_gradients=HALF,
        narrow_inputs=True, master_remainders=True),
    "megatron-bridge": Stack(
        2025, "Megatron-Bridge performance recipes: the same, CUDA graphs on Blackwell, cross_entropy_fusion_impl te; under FSDP "
        "cpu_offloading_num_layers: 40 of Llama 70B's 80 on GB200 (20 on GB300), 95 of 405B's 126",
        fused_elementwise=True, overlapped_reduction=True, overlapped_tensor_parallel=True, overlapped_gather=True, captured=True,
        spread_boundaries=True, tuned_attention=True, zero=1, reduces_once=True, fused_attention=True, fused_gate=True,
        half_gradients=HALF, narrow_inputs=True, loss_bytes=4, layers_in_host=0.5),
    "llama3": Stack(
        2024, "arXiv 2407.21783, section 3.3: FSDP that keeps weights between passes, asynchronous sends",
        fused_elementwise=True, overlapped_reduction=True, spread_boundaries=True, tuned_attention=True, zero=2,
        reduces_once=True, fused_attention=True),
    "megatron-deepspeed-zero3": Stack(
        2021, "BigScience, meg_ds_zero_gpt2_perf_n16.slurm: DeepSpeed's ZeRO-3 around Megatron's model, --checkpoint-in-cpu",
        fused_elementwise=True, zero=3, layers_in_host=1.0, half_gradients=("fp16",)),
    "megatron-deepspeed": Stack(
        2021, "DeepSpeed's pipeline engine sums gradients after the last backward; its BF16_Optimizer shards states at stage 0 "
        "(tr11-176B-ml.slurm)",
        fused_elementwise=True, spread_boundaries=True, reduces_once=True, shards_states=("bf16",)),
    "megatron": Stack(
        2021, "arXiv 2104.04473: scatter and gather between stages, fused kernels",
        fused_elementwise=True, spread_boundaries=True, reduces_once=True),
    "bigcode-megatron-lm": Stack(2023, "a fork of Megatron-LM", fused_elementwise=True, spread_boundaries=True,
        reduces_once=True),
    "gpt-neox": Stack(2023, "Megatron's kernels under DeepSpeed", fused_elementwise=True, zero=1, reduces_once=True),
    "deepspeed": Stack(2022, "AMP's trials: DeepSpeed's pipeline", fused_elementwise=True, spread_boundaries=True),
    "composer-fsdp": Stack(2023, "llm-foundry: FSDP of PyTorch 2.0, Triton attention, low-precision norms, "
        "loss_fn fused_crossentropy", fused_elementwise=True, overlapped_reduction=True, zero=3, fused_attention=True, loss_bytes=4),
    "torchtitan-compile": Stack(2024, "FSDP2, torch.compile", fused_elementwise=True, overlapped_reduction=True, zero=3,
        fused_attention=True),
    "torchtitan-eager": Stack(2024, "FSDP2; torch's own cross_entropy", overlapped_reduction=True, zero=3, fused_attention=True,
        loss_bytes=12),
    "torchtune-fsdp-compile": Stack(2025, "FSDP2, torch.compile", fused_elementwise=True, overlapped_reduction=True,
        zero=3, fused_attention=True),
    "fsdp-compile": Stack(2024, "FSDP, torch.compile", fused_elementwise=True, overlapped_reduction=True, zero=3,
        fused_attention=True),
    "olmo-fsdp": Stack(2024, "FSDP, torch.compile in OLMo's configuration", fused_elementwise=True,
        overlapped_reduction=True, zero=3, fused_attention=True),
    "huggingface-eager": Stack(2023, "transformers: attention and tanh-GELU kernel by kernel", fused_softmax=False,
        fused_activation=False),
    "megatron-accelerate": Stack(2023, "Megatron-LM through accelerate", fused_elementwise=True,
        spread_boundaries=True, reduces_once=True),
    "pytorch": Stack(2025, "DistributedDataParallel sums buckets under the backward; scaled_dot_product_attention",
        autocast=True, overlapped_reduction=True, fused_attention=True),
    "jax-maxtext": Stack(2024, "XLA, as below; NVIDIA's recipe has remat_policy save_qkv_proj", fused_elementwise=True,
        overlapped_reduction=True, captured=True, tuned_attention=True, zero=3, fused_attention=True, kept_products="qkv"),
    "jax-paxml": Stack(2024, "XLA, as below; NVIDIA's recipe has CHECKPOINT_POLICY SAVE_QKV_OUT_PROJ", fused_elementwise=True,
        overlapped_reduction=True, captured=True, tuned_attention=True, zero=3, fused_attention=True,
        kept_products="qkv and output"),
    "jax": Stack(2024, "XLA fuses elementwise work; cuDNN attention; latency-hiding scheduler", fused_elementwise=True,
        overlapped_reduction=True, captured=True, tuned_attention=True, zero=3, fused_attention=True),
}  # fmt: skip
UNKNOWN = Stack(2023, "not known", fused_elementwise=False)


def stack_of(name: str) -> Stack:
    """The facts of the stack whose name begins so."""
    known = [prefix for prefix in STACKS if name.startswith(prefix)]
    return STACKS[max(known, key=len)] if known else UNKNOWN


class Server(NamedTuple):
    """A machine as its makers built it: Gbit/s of all its interfaces, and how many accelerators one fast switch joins."""

    gbps: float
    accelerators: int
    domain: int = 0  # beyond one machine (NVL72); 0: none


# By the beginning of an accelerator's name: the reference machines of its maker.
SERVERS: Mapping[str, Server] = {
    "P100": Server(100, 4), "V100-SXM": Server(400, 8), "V100": Server(100, 4), "T4": Server(50, 4),
    "A100-SXM": Server(1600, 8), "A100-PCIe": Server(200, 4), "A800": Server(1600, 8), "H100-SXM": Server(3200, 8),
    "H100": Server(400, 4), "H200": Server(3200, 8), "H800": Server(3200, 8), "H20": Server(3200, 8),
    "GH200": Server(800, 4), "B200": Server(3200, 8), "B300": Server(6400, 8), "GB200": Server(1600, 4, 72),
    "GB300": Server(3200, 4, 72), "MI100": Server(200, 4), "MI210": Server(200, 4), "MI250": Server(800, 8),
    "MI3": Server(3200, 8), "L4": Server(100, 4), "A10G": Server(100, 4), "A40": Server(200, 4), "RTX": Server(100, 4),
}  # fmt: skip


def server_of(accelerator: str) -> Server | None:
    """The reference machine of an accelerator; None where none is known."""
    known = [prefix for prefix in SERVERS if accelerator.startswith(prefix)]
    return SERVERS[max(known, key=len)] if known else None
