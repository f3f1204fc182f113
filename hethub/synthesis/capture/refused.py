"""What a trace says of a module that it refuses: what it does, and what to write instead."""

import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from hethub.spec.errors import BadInput

CONSTANT = "writes in place to a tensor that the module keeps as a plain attribute, or to what is made of one; register it as a buffer."


def refuse_hooks(named: Mapping[str, torch.Tensor]) -> None:
    """Of parameters that have any, by name."""
    for name, value in named.items():
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise BadInput(
                f"'{name}' has a hook on its gradient, which no rank would run on the whole of it; remove the hook, and change"
                " the gradient in forward (a mask times the weight) or after the step, in .grad."
            )


def refuse_update(name: str) -> None:
    """Of a buffer that forward changes."""
    owner = name.rpartition(".")[0] or "the module"
    raise BadInput(
        f"'{owner}' changes its buffer '{name}' in every step, which ranks would do differently: keep the state of"
        f" '{owner}' outside of forward."
    )


def reason(error: Exception) -> str:
    """Why tracing failed, in words of the module's author."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        inside = Path(torch.__file__).parent
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(inside)]
        place = next((f for f in reversed(frames) if Path(f.filename).parent != Path(__file__).parent), None)
        if any(f.name == "_detect_is_causal_mask" for f in traceback.extract_tb(error.__traceback__)):
            return "torch looks into the mask to see whether it is causal; call the encoder or decoder with is_causal=True or False."
        where = f" ({place.filename}, line {place.lineno}, in {place.name}: {place.line})" if place else ""
        return (
            f"its control flow or its shapes depend on the values of tensors: {first}{where}. Compute both ways and choose"
            " with torch.where, or keep the branch out of forward."
        )
    if "mutating a non-functional tensor" in text:
        return f"an operator {CONSTANT}"
    return f"{type(error).__name__}: {first}"
