"""An unmodified module that returns a loss becomes one graph of its forward and backward."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hethub.spec.errors import BadInput
from hethub.synthesis.graph import Graph, Operator, Ref, Tensor, schema_of

aten: Any = torch.ops.aten
INPUT = "input "  # begins the names of the user's inputs; no name of a module's has a space
SAME_TENSOR = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)

CHECKS = (aten._assert_tensor_metadata.default,)  # of what tracing has fixed anyway


def trace(module: torch.nn.Module, example_inputs: Sequence[torch.Tensor]) -> Graph:
    """The graph of `module(*example_inputs)` and its gradients, for these shapes; nothing is computed.

    Raises BadInput, with operator and module named, for what cannot be cut into pieces exactly: control flow that
    depends on data, writes to inputs, buffers that the step changes, random operators.
    """
    for number, value in enumerate(example_inputs):
        if not isinstance(value, torch.Tensor):
            raise BadInput(
                f"example input {number} is {type(value).__name__}; pass tensors, and let the module keep the rest."
            )
    exported = _export(module, tuple(example_inputs))
    _refuse_writes(exported)
    flat = _placeholder_values(exported, module, example_inputs)
    for node in exported.graph.nodes:
        _refuse_operator(node)
    return _build(_joint(exported.graph_module, flat), exported, flat)


def _export(module: torch.nn.Module, example_inputs: tuple[torch.Tensor, ...]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch's own, about itself
            return torch.export.export(module, example_inputs, strict=False).run_decompositions({})
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{type(module).__name__} cannot be traced: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    if "data-dependent" in text or "Data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        place = next(
            (line.strip() for line in text.splitlines() if "File " in line and "site-packages" not in line), ""
        )
        where = f" ({place})" if place else ""
        return (
            f"its control flow depends on the values of tensors: {first}{where}. Compute both ways and choose with"
            " torch.where, or keep the branch out of forward."
        )
    return f"{type(error).__name__}: {first}"


def _refuse_writes(exported: Any) -> None:
    signature = exported.graph_signature
    for name in signature.user_inputs_to_mutate.values():
        raise BadInput(f"the module writes in place to its input '{name}'; clone it in forward first.")
    for name in signature.buffers_to_mutate.values():
        owner = name.rpartition(".")[0] or "the module"
        batch_norm = any("batch_norm" in str(node.target) for node in exported.graph.nodes)
        remedy = (
            f"BatchNorm in training mixes the samples of a batch; call .eval() on '{owner}' to keep its statistics,"
            " or use GroupNorm."
            if batch_norm
            else f"keep the state of '{owner}' outside of forward."
        )
        raise BadInput(
            f"'{owner}' changes its buffer '{name}' in every step, which ranks would do differently: {remedy}"
        )


def _refuse_operator(node: fx.Node) -> None:
    if node.op not in ("call_function", "get_attr"):
        return
    module = _module_of(node) or "the module itself"
    if node.op == "get_attr" or (schema_of(node.target) is None and _name(node) != "getitem"):
        raise BadInput(f"'{module}' uses {node.target}: control flow that depends on data cannot be cut over ranks.")
    if _draws(node):
        raise BadInput(
            f"'{module}' draws random numbers ({node.target}), which would differ from rank to rank; set its dropout to 0"
            " or call .eval() on it."
        )


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; dropout 0, attention's too, draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    wanted = [name for name in ("dropout_p", "p") if name in names]
    return not wanted or any(given.get(name, 0.0) != 0.0 for name in wanted)


def _placeholder_values(
    exported: Any, module: torch.nn.Module, example_inputs: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Every tensor that the step starts from, in the order of the exported graph's placeholders, by a name of ours."""
    kept = {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
        **exported.constants,
    }
    users = iter(enumerate(example_inputs))
    values = {}
    for spec in exported.graph_signature.input_specs:
        if spec.target is None:
            number, value = next(users)
            values[f"{INPUT}{number}"] = value.view_as(value)  # the same tensor may be given twice
        else:
            values[spec.target] = kept[spec.target]
    return values


def _joint(forward: fx.GraphModule, flat: dict[str, torch.Tensor]) -> fx.GraphModule:
    unique = _without_ties(flat)
    places = {id(value): number for number, value in enumerate(unique.values())}
    order = [places[id(value)] for value in flat.values()]
    wanted = [number for number, value in enumerate(unique.values()) if _is_trained(value)]

    def step(values: list[torch.Tensor]) -> list[Any]:
        results = fx.Interpreter(forward).run(*[values[number] for number in order])
        if len(results) != 1 or not isinstance(results[0], torch.Tensor) or results[0].dim() != 0:
            raise BadInput("the module must return its loss alone: one tensor without dimensions.")
        loss = results[0]
        if not loss.requires_grad:
            raise BadInput("the loss does not depend on any parameter that wants a gradient.")
        gradients = torch.autograd.grad(loss, [values[number] for number in wanted], allow_unused=True)
        return [loss, *gradients]

    with fx.traceback.preserve_node_meta():
        return make_fx(step, decomposition_table=DECOMPOSITIONS, tracing_mode="fake")(list(unique.values()))


def _without_ties(flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor once, under the first of its names: a tied parameter has one gradient."""
    first: dict[int, str] = {}
    for name, value in flat.items():
        first.setdefault(id(value), name)
    return {name: flat[name] for name in first.values()}


def _is_trained(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def _build(joint: fx.GraphModule, exported: Any, flat: dict[str, torch.Tensor]) -> Graph:
    joint.graph.eliminate_dead_code()
    builder = _Builder()
    flat = _without_ties(flat)
    names = list(flat)
    output = list(next(node for node in joint.graph.nodes if node.op == "output").args[0])
    placeholders = iter(names)
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            builder.placeholder(node, next(placeholders))
        elif node.op == "get_attr":
            names.append(node.target)
            flat[node.target] = getattr(joint, node.target)
            builder.placeholder(node, node.target, flat[node.target])
        elif node.op == "call_function":
            builder.call(node)
        if node is output[0]:
            builder.is_forward = False  # autograd starts once there is a loss
    trained = [name for name in names if _is_trained(flat[name])]
    user = [name for name in names if name.startswith(INPUT)]
    constants = {**exported.constants}
    constants.update({name: flat[name] for name in names if name.startswith("_tensor_constant")})
    return Graph(
        tensors=tuple(builder.tensors),
        operators=tuple(builder.operators),
        parameters={name: builder.placed[name] for name in trained},
        buffers={name: builder.placed[name] for name in names if name not in (*trained, *user)},
        constants={name: value for name, value in constants.items() if name in builder.placed},
        inputs=tuple(builder.placed[name] for name in user),
        loss=builder.numbers[output[0]],
        gradients={
            name: None if node is None else builder.numbers[node]
            for name, node in zip(trained, output[1:], strict=True)
        },
    )


class _Builder:
    """Collects tensors and operators from an fx graph."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.numbers: dict[fx.Node, int] = {}  # of the tensor that a node stands for
        self.placed: dict[str, int] = {}
        self.parts: dict[fx.Node, tuple[int | None, ...]] = {}
        self.modules: dict[int, str] = {}  # by tensor
        self.is_forward = True

    def placeholder(self, node: fx.Node, name: str, value: Any = None) -> None:
        self.placed[name] = self.numbers[node] = tensor = self._tensor(node.meta.get("val", value), name)
        if not name.startswith(INPUT):
            self.modules[tensor] = name.rpartition(".")[0]

    def call(self, node: fx.Node) -> None:
        if node.target in CHECKS:
            return
        if node.target in SAME_TENSOR:
            self.numbers[node] = self.numbers[node.args[0]]  # type: ignore[index]
        elif _name(node) == "getitem":
            part = self.parts[node.args[0]][node.args[1]]  # type: ignore[index]
            assert part is not None
            self.numbers[node] = part
        else:
            self._operator(node)

    def _tensor(self, value: Any, name: str) -> int:
        self.tensors.append(Tensor(name=name, shape=tuple(int(n) for n in value.shape), dtype=value.dtype))
        return len(self.tensors) - 1

    def _operator(self, node: fx.Node) -> None:
        _refuse_operator(node)
        if schema_of(node.target).is_mutable:
            raise BadInput(f"{node.target} writes in place, and torch did not turn it into a copy; write it as one.")
        inputs: list[int] = []

        def ref(used: fx.Node) -> Any:
            inputs.append(self.numbers[used])
            return Ref(len(inputs) - 1)

        args, kwargs = fx.map_arg((node.args, node.kwargs), ref)
        value = node.meta["val"]
        many = isinstance(value, (list, tuple))
        values = value if many else (value,)
        outputs = tuple(
            None if part is None else self._tensor(part, f"{node.name}.{number}" if many else node.name)
            for number, part in enumerate(values)
        )
        self.parts[node] = outputs
        if not many:
            self.numbers[node] = outputs[0]  # type: ignore[assignment]
        module = (
            _module_of(node)
            if self.is_forward
            else next((self.modules[t] for t in inputs[::-1] if t in self.modules), "")
        )
        self.modules.update({t: module for t in outputs if t is not None})
        self.operators.append(
            Operator(
                name=node.name, key=str(node.target), args=_plain(args), kwargs=_plain(dict(kwargs)), inputs=tuple(inputs),
                outputs=outputs, has_many_outputs=many, module=module, is_forward=self.is_forward,
            )
        )  # fmt: skip


def _plain(value: Any) -> Any:
    """fx's own lists and dictionaries as Python's."""
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values()))), "")


# Operators that divide by the number of samples, written as a sum and a division by the whole batch's number. A rank
# that holds a piece of the batch would divide by its own; sums can be added up over ranks, and then divided once.


def mean(values: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return aten.sum.default(values, dtype=dtype) / values.numel()


def mean_dims(
    values: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = dim if dim else list(range(values.dim()))
    count = 1
    for d in dims:
        count *= values.shape[d]
    return aten.sum.dim_IntList(values, dims, keepdim, dtype=dtype) / count


def nll_loss(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As aten.nll_loss_forward: the loss and the weight of all targets that count. scores: [samples, classes]."""
    if scores.dim() != 2:
        return NotImplemented
    counts = target != ignore_index
    safe = torch.where(counts, target, 0)
    picked = -aten.gather.default(scores, 1, safe.unsqueeze(1)).squeeze(1)
    weights = counts.to(scores.dtype)
    if weight is not None:
        weights = weights * aten.embedding.default(weight.unsqueeze(1), safe).squeeze(1)
    # Where a target is ignored its score may be infinite, so it is replaced and not multiplied by zero.
    losses = torch.where(counts, picked, 0.0) * weights
    total = weights.sum()
    if reduction == 0:
        return losses, total
    return (losses.sum() if reduction == 2 else losses.sum() / total), total


def mse_loss(values: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    squares = (values - target) * (values - target)
    return squares if reduction == 0 else squares.sum() if reduction == 2 else squares.sum() / squares.numel()


def mse_loss_backward(
    gradient: torch.Tensor, values: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    scale = 2.0 / values.numel() if reduction == 1 else 2.0
    return (values - target) * gradient * scale


DECOMPOSITIONS: dict[Any, Any] = {
    aten.mean.default: mean,
    aten.mean.dim: mean_dims,
    aten.nll_loss_forward.default: nll_loss,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
}
