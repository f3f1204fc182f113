"""What a trace says of a module that it refuses: what it does, and what to write instead."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx

from hethub.spec.errors import BadInput
from hethub.synthesis.capture.nodes import NUMBERS, OUTERMOST, annotated, called, draws, given
from hethub.synthesis.capture.whole_batch import aten, refuse_batch_norm, refuse_instance_norm
from hethub.synthesis.graph import schema_of

CONSTANT = "writes in place to a tensor that the module keeps as a plain attribute, or to what is made of one; register it as a buffer."


def refuse_hooks(named: Mapping[str, torch.Tensor]) -> None:
    """Raise BadInput if parameters have hooks. It names them."""
    for name, value in named.items():
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise BadInput(
                f"'{name}' has a hook on its gradient, which no rank would run on the whole of it; remove the hook, and change"
                " the gradient in forward (a mask times the weight) or after the step, in .grad."
            )


def refuse_update(name: str) -> None:
    """Raise BadInput: forward changes this buffer or parameter."""
    owner = name.rpartition(".")[0] or "the module"
    raise BadInput(
        f"'{owner}' changes its own '{name}' in every step, which ranks would do differently: keep the state of"
        f" '{owner}' outside of forward (an embedding's max_norm too)."
    )


def refuse_lazy(named: Mapping[str, torch.Tensor]) -> None:
    """Raise BadInput if parameters or buffers have no shape before their module's first forward. It names them."""
    for name, value in named.items():
        if torch.nn.parameter.is_lazy(value):
            raise BadInput(
                f"'{name}' has no shape yet; call the module once on a batch, which its lazy layers wait for."
            )


def refuse_sparse(what: str, value: torch.Tensor) -> None:
    """Raise BadInput if a parameter, a buffer, an input or an operator's output is sparse."""
    if value.layout != torch.strided:
        raise BadInput(
            f"{what} is sparse, and ranks could not take pieces of it; keep it dense (.to_dense()), or keep its indices and"
            " values as tensors and add up with index_add."
        )


def refuse_compiled(module: torch.nn.Module) -> None:
    """Raise BadInput if the module, or one in it, is compiled."""
    for name, inner in module.named_modules():
        if hasattr(inner, "_orig_mod") or isinstance(inner, torch.jit.ScriptModule):
            raise BadInput(
                f"{name or type(inner).__name__} is compiled; give the module as it was before torch.compile or torch.jit."
            )


def refuse_result(module: torch.nn.Module, result: Any) -> NoReturn:
    """Raise BadInput: forward returns something else than a loss."""
    what = f"a tensor of {result.dim()} dimensions" if isinstance(result, torch.Tensor) else type(result).__name__
    raise BadInput(
        f"the module must return its loss alone: one tensor without dimensions, where {type(module).__name__} returned {what};"
        " wrap it in a module whose forward picks the loss out, or reduces it (.mean())."
    )


def depends_on_values(error: BaseException) -> bool:
    """Whether tracing failed because control flow or a shape depends on the values of tensors."""
    return type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")


def reason(error: BaseException) -> str:
    """Why tracing failed, in words of the module's author."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not Path(f.filename).is_relative_to(Path(torch.__file__).parent)]
    place = next((f for f in reversed(own) if Path(f.filename).parent != Path(__file__).parent), None)
    where = f" ({place.filename}, line {place.lineno}, in {place.name}: {place.line})" if place else ""
    if depends_on_values(error):
        if any(f.name == "_detect_is_causal_mask" for f in frames):
            return "torch looks into the mask to see whether it is causal; call the encoder or decoder with is_causal=True or False."
        return (
            f"its control flow or its shapes depend on the values of tensors: {first}{where}. Compute both ways and choose"
            " with torch.where, or keep the branch out of forward."
        )
    if "mutating a non-functional tensor" in text:
        return f"an operator {CONSTANT}"
    return f"{type(error).__name__}: {first}{where}"


def refuse_operator(node: fx.Node) -> None:
    """Raise BadInput if no rank could run the operator on its pieces: control flow, random numbers, a batch norm in training."""
    if node.op not in ("call_function", "get_attr") or isinstance(node.meta.get("val"), NUMBERS):
        return
    named = (annotated(each) for each in (node, *node.all_input_nodes))  # control flow has lost its own
    module = next((name for name in named if name is not None), None) or OUTERMOST
    if schema_of(node.target) is None and node.op == "call_function" and called(node) != "getitem":
        raise BadInput(f"'{module}' uses {node.target}: control flow that depends on data cannot be cut over ranks.")
    if isinstance(node.meta.get("val"), torch.Tensor):
        refuse_sparse(f"a tensor of '{module}'", node.meta["val"])
    if draws(node):
        raise BadInput(
            f"'{module}' draws random numbers ({node.target}), which would differ from rank to rank; set its dropout to 0,"
            " call .eval() on it, or let the numbers be an input of forward."
        )
    if node.target is aten.as_strided.default and not _fills_its_memory(given(node, "self").meta["val"]):
        raise BadInput(
            f"'{module}' reads a tensor by places in memory (as_strided), where ranks keep it in another order; call .contiguous()"
            " on it first, or write it with slices, transpose and unfold."
        )
    if "batch_norm" in called(node) and given(node, "training") and given(node, "running_mean") is not None:
        by_sample = given(node, "running_mean").target is aten.repeat.default  # the statistics once for each sample
        (refuse_instance_norm if by_sample else refuse_batch_norm)(module)


def _fills_its_memory(value: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in order, and nothing else lies there."""
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.itemsize
