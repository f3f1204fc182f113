"""How a step is executed beside its plan: what published measurements vary and hethub's own runtime fixes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hethub.spec.accelerator import Precision
from hethub.spec.layout.tensors import LOSS_CHUNK_TOKENS

# What matrix units compute in; those narrower than bf16 and tf32 appear in published tables, hethub's runtime has the spec's precisions.
MathPrecision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """The execution of a plan by one software stack. The defaults are hethub's runtime."""

    stack: str = "hethub"
    math: MathPrecision | None = None  # None: the plan's precision
    fused_attention: bool = True  # FlashAttention-like: scores never reach memory
    fused_softmax: bool = True  # where attention is not: scale, mask and softmax in one kernel
    attention_dropout: bool = False  # where attention is not fused: its scores are kept once more, and a mask
    fused_activation: bool = True  # GELU and the like in one kernel
    keeps_gate_activation: bool = False  # of SwiGLU, until its backward; hethub computes it again
    # torch.compile, Megatron: norms, dropout, residuals in few kernels. None: on devices, not on CPUs, as hethub's bodies
    # are compiled where `train.compile` does not say otherwise (hethub/kernels/bodies.py).
    fused_elementwise: bool | None = None
    overlapped_reduction: bool = True  # gradients summed under the last backward
    overlapped_tensor_parallel: bool = False  # products cut in chunks that hide their own collectives
    sums_beside_weights: bool = True  # a backward's sums over tensor-parallel ranks, beside its weights' gradients
    overlapped_gather: bool = True  # new weights under ZeRO-1 and 2 are gathered under the next forward
    captured: bool = False  # CUDA graphs, XLA: the host launches a program, not kernels
    slow_host: bool = False  # programs before PyTorch 2, which take longer to launch a kernel
    # Fused attention written for this generation of matrix units. None: where torch takes cuDNN's, by device.
    tuned_attention: bool | None = None
    gathers_ahead: bool = True  # ZeRO-2/3: a layer's collectives overlap its neighbours', over the ends of a pass too
    norms_apart: bool = True  # summed and sent by themselves, not with the matrices
    one_tied_copy: bool = True  # of a tied head: both ends sum and step it together; else each its own copy
    # Moved per parameter and backward to accumulate half-precision gradients, beside the product's own writing. By device:
    # hethub's, added up in fp32 in the product itself where a library can. None: as measured where weights stay in fp32
    # and are cast for every pass (autocast).
    gradient_pass_bytes: float | Literal["by device"] | None = "by device"
    gradient_wire_bytes: int | None = None  # per gradient on the wire; None: at least fp32 (rule 11 of exactness)
    spread_boundaries: bool = (
        False  # between stages every tensor-parallel rank sends its part through its own interface
    )
    sequence_parallel: bool = False  # Megatron's: norms and residuals cut over the tensor-parallel ranks
    context_parallel: int = 1  # ranks of a replica that share the sequence; the rest of it is tensor-parallel
    interleave: int = 1  # chunks of layers per stage that take turns (virtual stages)
    selective_fraction: float | None = None  # of a forward run again under selective recompute; None: attention alone
    chunked_loss: bool = True  # logits are never held for a whole micro-batch
    # Of cross-entropy on whole half-precision logits: 10 with an fp32 copy and its gradient; 4 in one kernel that writes the
    # gradient beside them; 12 in torch's own kernels, which hold two gradients and the log-softmax of the copy.
    loss_bytes: int = 10
    half_gradients: bool = False  # kept in half precision, where weights are
    narrow_inputs: bool = False  # of products in fp8 and narrower: kept for the backward as they were multiplied
    kept_products: Literal["all", "qkv", "qkv and output"] = "all"  # of a layer; what others made is computed again
    master_remainders: bool = False  # the optimizer keeps the 16 bits that a bf16 weight lacks, no fp32 copy
    layers_in_host: float = 0.0  # of all layers, whose activations wait for their backward in host memory
    optimizer_included: bool = True

    def math_precision(self, precision: Precision) -> MathPrecision:
        """What matrix products run in for a plan of this precision."""
        return self.math or precision

    def loss_seconds(self, tokens: float, all_reduce: Callable[[float], float]) -> float:
        """What ranks that share a vocabulary need to tell each other of their logits in fp32: of each token the largest one,
        then two sums. `all_reduce` gives the seconds of so many bytes."""
        times = math.ceil(tokens / LOSS_CHUNK_TOKENS) if self.chunked_loss else 1
        return times * sum(all_reduce(each * tokens / times) for each in (4, 8))


HETHUB = Software()


def hethub_software(compiles: bool | None) -> Software:
    """hethub's runtime under a job's `train.compile`."""
    return HETHUB if compiles is None else replace(HETHUB, fused_elementwise=compiles)


def held_gradient_bytes(width: int, software: Software) -> int:
    """Bytes of one gradient between backward and the optimizer."""
    return width if software.half_gradients else gradient_bytes(width)


def element_bytes(precision: MathPrecision) -> int:
    """Bytes of one activation; what is narrower than bf16 keeps activations in bf16, tf32 in fp32."""
    return {"fp64": 8, "fp32": 4, "tf32": 4}.get(precision, 2)


def gradient_bytes(width: int) -> int:
    """Bytes of one gradient, accumulated in fp32 at least (rule 11 of exactness), where activations take `width`."""
    return max(4, width)
