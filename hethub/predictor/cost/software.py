"""How a step is executed beside its plan: what published measurements vary and hethub's own runtime fixes."""

from dataclasses import dataclass
from typing import Literal

from hethub.spec.accelerator import Precision

# What matrix units compute in; fp8 and tf32 appear in published tables, hethub's runtime has the spec's precisions.
MathPrecision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


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
    fused_elementwise: bool = False  # torch.compile, Megatron: norms, dropout, residuals in few kernels
    overlapped_reduction: bool = True  # gradients summed under the last backward
    gathers_ahead: bool = True  # ZeRO-2/3: a layer's collectives overlap its neighbours', over the ends of a pass too
    one_tied_copy: bool = True  # of a tied head: both ends sum and step it together; else each its own copy
    # Moved per parameter and backward to accumulate half-precision gradients, beside the product's own writing:
    # hethub's are read in half and added up in fp32. None: as measured where weights stay in fp32 and are cast for
    # every pass (autocast).
    gradient_pass_bytes: float | None = 10.0
    gradient_wire_bytes: int | None = None  # per gradient on the wire; None: at least fp32 (rule 11 of exactness)
    spread_boundaries: bool = (
        False  # between stages every tensor-parallel rank sends its part through its own interface
    )
    sequence_parallel: bool = False  # Megatron's: norms and residuals cut over the tensor-parallel ranks
    context_parallel: int = 1  # ranks of a replica that share the sequence; the rest of it is tensor-parallel
    interleave: int = 1  # chunks of layers per stage that take turns (virtual stages)
    selective_fraction: float | None = None  # of a forward run again under selective recompute; None: attention alone
    chunked_loss: bool = True  # logits are never held for a whole micro-batch
    optimizer_included: bool = True

    def math_precision(self, precision: Precision) -> MathPrecision:
        """What matrix products run in for a plan of this precision."""
        return self.math or precision


HETHUB = Software()


def element_bytes(precision: MathPrecision) -> int:
    """Bytes of one activation; fp8 and tf32 keep activations in bf16 and fp32."""
    return {"fp64": 8, "fp32": 4, "tf32": 4}.get(precision, 2)


def gradient_bytes(width: int) -> int:
    """Bytes of one gradient, accumulated in fp32 at least (rule 11 of exactness), where activations take `width`."""
    return max(4, width)
