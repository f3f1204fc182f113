"""How each aten operator may be cut: dimensions that can be shared out among ranks without changing the result.

A `Label` names one such dimension by its place in every input and output, as a letter of an einsum does: pieces of the
inputs give the same piece of the outputs, or, where the dimension is summed over, partial sums. Why a table of our own
and not DTensor's registry: that one is private, knows even cuts only, and does not say which dimensions belong
together, which is what uneven cuts need. An operator that is missing here is computed whole on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch

from hethub.synthesis.graph import Operator, argument_of, overload

Shape = tuple[int, ...]
Order = Literal["any", "rows", "whole"]  # of memory: of each row of the last dimension, of the whole tensor
SUM = "sum"  # in a label: these tensors are partial sums


@dataclass(frozen=True)
class Label:
    """One dimension that may be cut: its number in each input and output, None where the tensor is whole."""

    inputs: tuple[int | str | None, ...]  # SUM: what is added to a result of partial sums is one too
    outputs: tuple[int | str | None, ...]


@dataclass(frozen=True)
class Shapes:
    """An operator's arguments by name, and the shapes of its tensors."""

    operator: Operator
    inputs: list[Shape]
    outputs: list[Shape]  # of those it makes

    def argument(self, name: str, default: Any = None) -> Any:
        return argument_of(self.operator.target, self.operator.args, self.operator.kwargs, name, default)

    def all_but(self, *excluded: int) -> list[Label]:
        """Every dimension that all inputs and outputs share, except `excluded` ones."""
        first = self.inputs[0]
        dims = [d for d in range(len(first)) if d not in {e % len(first) for e in excluded}]
        alike = [d for d in dims if all(len(s) > d and s[d] == first[d] for s in (*self.inputs, *self.outputs))]
        return [Label((d,) * len(self.inputs), (d,) * len(self.outputs)) for d in alike]


def aligned(shape: Shape, out: Shape, d: int) -> int | None:
    """Which dimension of an input is dimension `d` of what it is broadcast to; None where it is the same along it."""
    own = d - len(out) + len(shape)
    return own if own >= 0 and shape[own] == out[d] else None


def pointwise(op: Shapes) -> list[Label]:
    out = op.outputs[0]
    return [
        Label(tuple(aligned(shape, out, d) for shape in op.inputs), (d,) * len(op.outputs))
        for d in range(len(out))
        if out[d] > 1
    ]


def mm(op: Shapes) -> list[Label]:
    return [Label((0, None), (0,)), Label((None, 1), (1,)), Label((1, 0), (SUM,))]


def bmm(op: Shapes) -> list[Label]:
    return [Label((0, 0), (0,)), Label((1, None), (1,)), Label((None, 2), (2,)), Label((2, 1), (SUM,))]


def mv(op: Shapes) -> list[Label]:
    return [Label((0, None), (0,)), Label((1, 0), (SUM,))]


def product_and_bias(op: Shapes) -> list[Label]:
    """A product, and what is added to it."""
    bias, out = op.inputs[0], op.outputs[0]
    return [
        Label((aligned(bias, out, d) if isinstance(d := label.outputs[0], int) else d, *label.inputs), label.outputs)
        for label in (bmm(op) if len(out) == 3 else mm(op))
    ]


def permute(op: Shapes) -> list[Label]:
    rank = len(op.inputs[0])
    order = list(range(rank))
    if op.operator.key == "aten.permute.default":
        order = [d % rank for d in op.argument("dims")]
    else:
        a, b = (0, 1) if op.operator.key == "aten.t.default" else (op.argument("dim0"), op.argument("dim1"))
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    return [Label((source,), (target,)) for target, source in enumerate(order)]


def along(*names: str) -> Callable[[Shapes], list[Label]]:
    """An operator that works along the dimensions given in its arguments `names`, and on each of the others alone."""

    def labels(op: Shapes) -> list[Label]:
        given = [op.argument(name) for name in names]
        dims = [d for value in given for d in (value if isinstance(value, (list, tuple)) else [value or 0])]
        return op.all_but(*dims)

    return labels


def along_last(op: Shapes) -> list[Label]:
    """topk, sort and glu: along the given dimension, which is the last unless told."""
    return op.all_but(op.argument("dim", -1))


def slices(op: Shapes) -> list[Label]:
    """A slice that takes all is a copy."""
    whole = op.inputs[0] == op.outputs[0]
    return op.all_but() if whole else op.all_but(op.argument("dim", 0))


def reduction(op: Shapes, *, sums: bool) -> list[Label]:
    """Over the dimensions of the argument `dim`, all where there is none."""
    rank, given = len(op.inputs[0]), op.argument("dim")
    dims = [given] if isinstance(given, int) else (given or range(rank))
    reduced = {d % rank for d in dims} if rank else set()
    keeps = bool(op.argument("keepdim", False))
    labels: list[Label] = []
    target = 0
    for d in range(rank):
        if d not in reduced:
            labels.append(Label((d,), (target,) * len(op.outputs)))
        elif sums:
            labels.append(Label((d,), (SUM,)))
        target += 1 if keeps or d not in reduced else 0
    return labels


def removed(op: Shapes) -> list[Label]:
    """select, unbind, squeeze: the dimensions of the argument `dim` go."""
    given, rank = op.argument("dim", 0), len(op.inputs[0])
    if not rank:
        return []
    named = {d % rank for d in ([given] if isinstance(given, int) else given)}
    stays = {d for d in named if short(op.operator).startswith("squeeze") and op.inputs[0][d] > 1}
    kept = [d for d in range(rank) if d not in named - stays]  # what stays must not be cut to 1
    return [Label((d,), (target,) * len(op.outputs)) for target, d in enumerate(kept) if d not in stays]


def added(op: Shapes) -> list[Label]:
    """unsqueeze and select_backward: one dimension more, at the argument `dim`."""
    rank = len(op.outputs[0])
    at = op.argument("dim") % rank
    kept = [d for d in range(rank) if d != at]
    return [Label((source,), (target,)) for source, target in enumerate(kept)]


def padded(op: Shapes) -> list[Label]:
    """The argument `pad` has two numbers for each dimension, the last one's first; 1 and -1 shift it."""
    last = len(op.inputs[0]) - 1
    return op.all_but(*(last - place // 2 for place, size in enumerate(op.argument("pad")) if size))


def rolled(op: Shapes) -> list[Label]:
    """Without dimensions the flat tensor is."""
    return along("dims")(op) if op.argument("dims") else []


def triangle(op: Shapes) -> list[Label]:
    return op.all_but(-2, -1)


def stack(op: Shapes) -> list[Label]:
    at, rank = op.argument("dim", 0) % len(op.outputs[0]), len(op.inputs[0])
    return [Label((d,) * len(op.inputs), (d + (d >= at),)) for d in range(rank)]


def embedding(op: Shapes) -> list[Label]:
    columns = Label((1, None), (len(op.outputs[0]) - 1,))
    return [columns, *(Label((None, d), (d,)) for d in range(len(op.inputs[1])))]


def embedding_backward(op: Shapes) -> list[Label]:
    """Where gradients are divided by how often a row is looked up, that is counted over the whole batch."""
    last = len(op.inputs[0]) - 1
    summed = 0 if op.argument("scale_grad_by_freq") else len(op.inputs[1])
    return [Label((last, None), (1,)), *(Label((d, d), (SUM,)) for d in range(summed))]


def layer_norm(op: Shapes) -> list[Label]:
    rows = len(op.inputs[0]) - len(op.argument("normalized_shape"))
    more = len(op.inputs) - 1
    return [Label((d,) + (None,) * more, (d,) * len(op.outputs)) for d in range(rows)]


def layer_norm_backward(op: Shapes) -> list[Label]:
    rows = len(op.inputs[0]) - len(op.argument("normalized_shape"))
    made = op.argument("output_mask")
    more = (None,) * (len(op.inputs) - 4)
    return [Label((d,) * 4 + more, _wanted((d, SUM, SUM), made)) for d in range(rows)]


def _wanted(parts: Sequence[int | str | None], made: Sequence[bool]) -> tuple[int | str | None, ...]:
    """The parts of the outputs that an operator was told to make."""
    return tuple(part for part, wanted in zip(parts, made, strict=True) if wanted)


def group_norm(op: Shapes) -> list[Label]:
    return [Label((0,) + (None,) * (len(op.inputs) - 1), (0,) * len(op.outputs))]


def group_norm_backward(op: Shapes) -> list[Label]:
    made = op.argument("output_mask")
    return [Label((0,) * 4 + (None,) * (len(op.inputs) - 4), _wanted((0, SUM, SUM), made))]


def convolution(op: Shapes) -> list[Label]:
    bias = len(op.inputs) > 2
    labels = [Label((0, None) + (None,) * bias, (0,))]
    if op.argument("groups") == 1 and not op.argument("transposed"):
        labels.append(Label((None, 0) + (0,) * bias, (1,)))
        if not bias:
            labels.append(Label((1, 1), (SUM,)))
    return labels


def convolution_backward(op: Shapes) -> list[Label]:
    """Inputs: gradient, input, weight; outputs, as far as wanted: of input, weight and bias."""
    made = op.argument("output_mask")
    labels = [Label((0, 0, None), _wanted((0, SUM, SUM), made))]
    if op.argument("groups") == 1 and not op.argument("transposed"):
        labels.append(Label((1, None, 0), _wanted((SUM, 0, 0), made)))
        if not made[2]:  # every rank would make the bias's gradient whole
            labels.append(Label((None, 1, 1), _wanted((1, 1, None), made)))
    return labels


def pictures(op: Shapes) -> list[Label]:
    """Pooling: each picture and each channel alone."""
    channels = len(op.inputs[0]) - 3
    return [Label((d,) * len(op.inputs), (d,) * len(op.outputs)) for d in range(channels + 1)]


def attention(op: Shapes) -> list[Label]:
    """Each sample and each head alone; a mask may be the same for all of them, or speak of queries and keys only."""
    labels = []
    mask = op.argument("attn_mask")
    for d in (0, 1):
        size = op.inputs[0][d]
        dims = [
            None if mask is not None and place == mask.index and (len(s) < 4 or s[d] == 1) else d
            for place, s in enumerate(op.inputs)
        ]
        pairs = [*zip(op.inputs, dims, strict=True), *((s, d) for s in op.outputs)]
        if all(own is None or s[own] == size for s, own in pairs):  # heads may share keys
            labels.append(Label(tuple(dims), (d,) * len(op.outputs)))
    return labels


def nll_loss_backward(op: Shapes) -> list[Label]:
    """Inputs: gradient, scores, target, perhaps weight, total weight; the total is the whole batch's."""
    if len(op.inputs[1]) != 2:
        return []
    own = 0 if op.inputs[0] else None
    return [Label((own, 0, 0) + (None,) * (len(op.inputs) - 3), (0,))]


_EXTREMES = partial(reduction, sums=False)
_TABLE: list[tuple[Callable[[Shapes], list[Label]], str]] = [
    (mm, "mm.default"),
    (bmm, "bmm.default"),
    (mv, "mv.default"),
    (product_and_bias, "addmm.default baddbmm.default"),
    (permute, "t.default transpose.int permute.default"),
    (pointwise, "expand.default copy.default fill.Scalar masked_fill.Tensor"),
    (pointwise, "hardswish.default _prelu_kernel.default log_sigmoid_forward.default log_sigmoid_backward.default"),
    (pointwise, "leaky_relu_backward.default elu_backward.default hardtanh_backward.default softplus_backward.default"),
    (pointwise, "hardswish_backward.default hardsigmoid_backward.default mish_backward.default"),
    (pointwise, "_prelu_kernel_backward.default softshrink_backward.default hardshrink_backward.default"),
    (along("dim"), "_softmax.default _log_softmax.default _safe_softmax.default cumsum.default"),
    (along("dims"), "flip.default"),
    (rolled, "roll.default"),
    (triangle, "tril.default triu.default"),
    (along("dim"), "_softmax_backward_data.default _log_softmax_backward_data.default"),
    (along("dim"), "gather.default scatter.src scatter.value scatter_add.default"),
    (along("dim"), "cat.default split.Tensor split_with_sizes.default"),
    (along_last, "topk.default sort.default glu.default glu_backward.default"),
    (slices, "slice.Tensor"),
    (partial(reduction, sums=True), "sum.default sum.dim_IntList"),
    (_EXTREMES, "amax.default amin.default argmax.default max.dim min.dim any.dim all.dim logsumexp.default"),
    (_EXTREMES, "linalg_vector_norm.default argmin.default var.correction std.correction"),
    (removed, "select.int unbind.int squeeze.dim squeeze.dims"),
    (added, "unsqueeze.default select_backward.default"),
    (padded, "constant_pad_nd.default"),
    (Shapes.all_but, "slice_backward.default new_zeros.default new_full.default"),  # what keeps its size
    (stack, "stack.default"),
    (embedding, "embedding.default"),
    (embedding_backward, "embedding_dense_backward.default"),
    (layer_norm, "native_layer_norm.default"),
    (layer_norm_backward, "native_layer_norm_backward.default"),
    (group_norm, "native_group_norm.default"),
    (group_norm_backward, "native_group_norm_backward.default"),
    (convolution, "convolution.default"),
    (convolution_backward, "convolution_backward.default"),
    (pictures, "max_pool2d_with_indices.default max_pool2d_with_indices_backward.default"),
    (pictures, "_adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default"),
    (pictures, "avg_pool2d.default avg_pool2d_backward.default"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu.default"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu_backward.default"),
    (nll_loss_backward, "nll_loss_backward.default"),
]
LABELS = {name: labels for labels, names in _TABLE for name in names.split()}
# What computes matrix products, or gathers rows of a table: the axes that they can be cut along are worth cutting.
HEAVY = (
    "mm.default", "addmm.default", "bmm.default", "baddbmm.default", "mv.default", "convolution.default",
    "convolution_backward.default", "embedding.default", "_scaled_dot_product_flash_attention_for_cpu.default",
)  # fmt: skip
# Whose kernels take it for granted that each row of the last dimension lies in order.
ROWS = (
    "_scaled_dot_product_flash_attention_for_cpu.default", "_scaled_dot_product_flash_attention_for_cpu_backward.default",
)  # fmt: skip
# Whose kernels refuse what does not lie in order.
ORDERED = ("native_group_norm.default", "native_group_norm_backward.default")
COPIES = (
    "clone.default",
    "_to_copy.default",
    "empty_like.default",
    "ones_like.default",
    "zeros_like.default",
    "full_like.default",
)
RESHAPES = ("view.default", "_unsafe_view.default", "reshape.default")

# Operators that map a sum of inputs to the sum of their outputs, by the inputs that must be partial sums together.
_LINEAR: list[tuple[list[list[int]], str]] = [
    ([[0]], "neg.default clone.default view.default _unsafe_view.default reshape.default t.default transpose.int"),
    ([[0]], "permute.default expand.default select.int squeeze.dim squeeze.dims unsqueeze.default slice.Tensor"),
    ([[0]], "slice_backward.default select_backward.default sum.default sum.dim_IntList div.Tensor"),
    ([[0]], "gelu_backward.default threshold_backward.default tanh_backward.default"),
    ([[0]], "native_layer_norm_backward.default convolution_backward.default embedding_dense_backward.default"),
    ([[0]], "max_pool2d_with_indices_backward.default _adaptive_avg_pool2d_backward.default"),
    ([[0], [1]], "mm.default bmm.default mul.Tensor"),
    ([[0, 1]], "add.Tensor sub.Tensor"),
]
LINEAR: dict[str, list[list[int]]] = {name: sets for sets, names in _LINEAR for name in names.split()}


def short(operator: Operator) -> str:
    """`mm.default` for aten.mm.default."""
    return operator.key.removeprefix("aten.")


@cache
def _labels(key: str) -> Callable[[Shapes], list[Label]] | None:
    name = key.removeprefix("aten.")
    is_pointwise = torch.Tag.pointwise in overload(key).tags or name in COPIES
    return LABELS.get(name, pointwise if is_pointwise else None)


def order_of(operator: Operator) -> Order:
    """The order of memory in which an operator is right for its inputs: some of torch's kernels silently take that of one
    device for granted. Those of the table were tried on any."""
    name = short(operator)
    if name in ROWS:
        return "rows"
    known = name in RESHAPES or _labels(operator.key) is not None
    return "any" if known and name not in ORDERED else "whole"


def in_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """The tensor in that order of memory, itself where it is."""
    is_right = order == "rows" and (tensor.shape[-1:] in ((), (1,)) or tensor.stride(-1) == 1)
    return tensor if is_right or order == "any" else tensor.contiguous()


def labels_of(op: Shapes) -> list[Label] | None:
    """The dimensions of an operator that may be cut; None where the table does not know it."""
    if not op.inputs:
        return []
    found = _labels(op.operator.key)
    return None if found is None else [label for label in found(op) if _fits(label, op)]


def _fits(label: Label, op: Shapes) -> bool:
    """Whether the dimensions of a label have one size, above 1."""
    pairs = [*zip(op.inputs, label.inputs, strict=True), *zip(op.outputs, label.outputs, strict=True)]
    sizes = {shape[d] if d < len(shape) else 0 for shape, d in pairs if isinstance(d, int)}
    return len(sizes) == 1 and sizes.pop() > 1


def linear_in(op: Shapes) -> list[tuple[int, ...]]:
    """Sets of inputs that may be partial sums while the others are whole; the outputs are then partial sums."""
    found = LINEAR.get(short(op.operator), ())
    if short(op.operator) in ("add.Tensor", "sub.Tensor") and len(op.inputs) < 2:
        return []  # a number would be added once per rank
    numbers = len(op.inputs)
    return [tuple(positions) for positions in found if all(position < numbers for position in positions)]
