"""An unmodified module that returns a loss becomes one graph of its forward and backward, for any number of samples."""

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import FakeTensorMode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hethub.spec.errors import BadInput
from hethub.synthesis.capture.nodes import NUMBERS, annotated, called, is_check, module_of, owner_of, writes
from hethub.synthesis.capture.proof import as_it_was, prove
from hethub.synthesis.capture.refused import (
    CONSTANT,
    depends_on_values,
    reason,
    refuse_compiled,
    refuse_hooks,
    refuse_lazy,
    refuse_operator,
    refuse_result,
    refuse_sparse,
    refuse_update,
)
from hethub.synthesis.capture.whole_batch import BATCH_NORMS, DECOMPOSITIONS, aten, normalized
from hethub.synthesis.graph import BySamples, Graph, Operator, Ref, Tensor, tensors_of

INPUT = "input "  # begins the names of the user's inputs; no name of a module's has a space
SAME_TENSOR = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)
PROFILER = "profiler."  # begins the keys of operators that mark a time and make no tensor


def trace(module: torch.nn.Module, example_inputs: Sequence[torch.Tensor]) -> Graph:
    """The graph of `module(*example_inputs)` and its gradients.

    Its shapes are those of the example inputs; `at` gives it for other numbers of samples, dimension 0 of the inputs.
    Where there are values, a few samples are computed by the module and by the graph; the module stays as it was.
    Raises BadInput, with operator and module named, for what cannot be cut into pieces exactly: control flow that
    depends on data, writes to inputs, a state that the step changes, random operators, hooks on gradients.
    """
    refuse_compiled(module)
    if isinstance(example_inputs, torch.Tensor):
        raise BadInput("the example inputs are one tensor; pass a tuple, (values,) for a module of one input.")
    for number, value in enumerate(example_inputs):
        if not isinstance(value, torch.Tensor):
            raise BadInput(
                f"example input {number} is {type(value).__name__}; pass tensors, and let the module keep the rest."
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own, about itself
        warnings.filterwarnings("ignore", module=r"torch\.backends")
        # Without libraries whose kernels torch chooses by the number of samples, which would become conditions of the graph.
        plain = torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False)
        with as_it_was(module, with_values=False), plain[0], plain[1]:
            graph = _Tracing(module, example_inputs).graph()
        prove(module, graph, example_inputs)
    return graph


class _Tracing:
    """One run of forward and backward on tensors without values, whose number of samples is a symbol."""

    def __init__(
        self, module: torch.nn.Module, example_inputs: Sequence[torch.Tensor], *, is_symbol: bool = True
    ) -> None:
        self._module, self._inputs, self._is_symbol = module, example_inputs, is_symbol
        self._shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._samples = next((int(value.shape[0]) for value in example_inputs if value.dim()), 1)
        count = self._symbol() if is_symbol else self._samples
        held = tensors_of(module)
        firsts = {id(value): name for name, value in reversed(held.items())}
        self._first = {name: firsts[id(value)] for name, value in held.items()}  # a tied parameter has one gradient
        unique = {name: held[name] for name in dict.fromkeys(self._first.values())}
        refuse_lazy(unique)
        given = ((f"input {number}", value) for number, value in enumerate(example_inputs))
        for what, value in (*unique.items(), *given):
            refuse_sparse(f"'{what}'", value)
        self._values = {name: self._like(value, value.shape) for name, value in unique.items()}
        self._trained = [
            name for name, value in unique.items() if isinstance(value, torch.nn.Parameter) and value.requires_grad
        ]
        self._owners = {value.untyped_storage()._cdata: name for name, value in unique.items() if value.numel()}
        refuse_hooks(unique)
        for name in self._trained:
            self._values[name].requires_grad_()
        for number, value in enumerate(example_inputs):
            batched = value.dim() and value.shape[0] == self._samples
            shape = (count, *value.shape[1:]) if batched else value.shape
            self._values[f"{INPUT}{number}"] = self._like(value.detach().contiguous(), shape)
        self._updates: dict[str, torch.Tensor] = {}  # what buffers hold after the step

    def _symbol(self) -> Any:
        dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        return self._mode.from_tensor(torch.empty(self._samples, 0), symbolic_context=dynamic).shape[0]

    def _like(self, value: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
        device = "cpu" if value.device.type == "meta" else value.device
        with self._mode:
            if value.is_contiguous():
                return torch.empty(tuple(shape), dtype=value.dtype, device=device)
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    def graph(self) -> Graph:
        try:
            with fx.traceback.preserve_node_meta(), self._named_modules():
                joint = self._traced(lambda values: self._step(values))
            for node in joint.graph.nodes:
                refuse_operator(node)
            writers = [node for node in joint.graph.nodes if writes(node)]
            names = dict(zip((n for n in joint.graph.nodes if n.op == "placeholder"), self._values, strict=True))
            for node in writers:
                if names.get(owner_of(node), "").startswith(INPUT):
                    self._refuse_write(node, names[owner_of(node)])
            if writers:
                run = functionalize(lambda values: fx.Interpreter(joint).run(*values))
                with fx.traceback.preserve_node_meta(), torch.no_grad():  # gradients are operators of the graph by now
                    joint = self._traced(lambda values: run(values))
        except BadInput:
            raise
        except (Exception, SystemExit) as error:  # of the user's own code, so of any type
            if self._is_symbol and not depends_on_values(error):  # some operators of torch take numbers, no symbols
                return _Tracing(self._module, self._inputs, is_symbol=False).graph()
            inputs = ", ".join(f"{value.dtype} of {list(value.shape)}" for value in self._inputs)
            raise BadInput(f"{type(self._module).__name__} cannot be traced with {inputs}: {reason(error)}") from error
        return self._build(joint, list(self._updates))

    def _traced(self, step: Any) -> fx.GraphModule:
        tracer = make_fx(step, DECOMPOSITIONS, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        # Its log has tracebacks, where a paragraph says what cannot be traced.
        log = logging.getLogger(FakeTensorMode.__module__)
        before, log.disabled = log.disabled, True
        try:
            return tracer(list(self._values.values()))
        finally:
            log.disabled = before

    def _step(self, values: list[torch.Tensor]) -> list[Any]:
        given = dict(zip(self._values, values, strict=True))
        held = {name: given[self._first[name]] for name in self._places()}
        swapped = {f"inner.{name}": value for name, value in held.items()}
        # Gradients are taken before the module has its own weights back, which recomputed forwards would read.
        whole = _Then(self._module, lambda loss: self._differentiated(loss, given))
        inputs = tuple(v for n, v in given.items() if n.startswith(INPUT))
        results = functional_call(whole, swapped, inputs, tie_weights=False)
        for name, value in held.items():
            if value is not swapped[f"inner.{name}"]:
                refuse_update(name)
        return results

    def _places(self) -> list[str]:
        """One name of every attribute that holds a parameter or buffer: a module that is there under two names has two, and
        would be given each tensor twice and its own back once."""
        held = [(prefix, {**inner._parameters, **inner._buffers}) for prefix, inner in self._module.named_modules()]
        names = [f"{prefix}.{name}" if prefix else name for prefix, own in held for name in own]
        return [name for name in names if name in self._first]

    def _differentiated(self, loss: Any, given: dict[str, torch.Tensor]) -> list[Any]:
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            refuse_result(self._module, loss)
        if not loss.requires_grad:
            raise BadInput("the loss does not depend on any parameter that wants a gradient.")
        gradients = torch.autograd.grad(loss, [given[name] for name in self._trained], allow_unused=True)
        for name, gradient in zip(self._trained, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise BadInput(f"the gradient of '{name}' is sparse, which ranks cannot add up; set sparse=False.")
        return [loss, *gradients, *self._updates.values()]

    @contextmanager
    def _named_modules(self) -> Iterator[None]:
        """Operators made inside know the module whose forward makes them; batch norms follow a rule of ours."""
        entered: list[AbstractContextManager[None]] = []
        hooks = []

        def enter(name: str) -> Any:
            def hook(*_: Any) -> None:
                entered.append(fx.traceback.annotate({"module": name}))
                entered[-1].__enter__()

            return hook

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        names = {}
        for name, module in self._module.named_modules():
            hooks += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
            names[module] = name
        own = [(kind, kind.forward) for kind in BATCH_NORMS]
        for kind in BATCH_NORMS:
            kind.forward = lambda norm, values: normalized(norm, names[norm], self._updates, values)
        try:
            yield
        finally:
            while entered:  # a refusal ends forwards in their middle
                leave()
            for hook in hooks:
                hook.remove()
            for kind, forward in own:
                kind.forward = forward

    def _build(self, joint: fx.GraphModule, updates: list[str]) -> Graph:
        for node in reversed(joint.graph.nodes):  # what ends a mark reads what began it
            if is_check(node) or str(node.target).startswith(PROFILER):
                joint.graph.erase_node(node)
        names = iter(self._values)
        placed = {node: next(names) for node in joint.graph.nodes if node.op == "placeholder"}
        for node in joint.graph.nodes:
            if node.target is aten.copy_.default and node.args[0] in placed:
                refuse_update(placed[node.args[0]])
        joint.graph.eliminate_dead_code()
        builder = _Builder()
        output = _made_each(joint.graph, len(self._trained))
        constants = {}
        for node in joint.graph.nodes:
            if node.op == "placeholder":
                builder.placeholder(node, placed[node])
            elif node.op == "get_attr":
                constants[node.target] = value = getattr(joint, node.target)
                refuse_sparse(f"a tensor of '{module_of(node)}'", value)
                owner = self._owners.get(value.untyped_storage()._cdata)
                if owner is not None:
                    raise BadInput(
                        f"'{module_of(node)}' reads '{owner}' past the module's attributes; read it in"
                        " forward as an attribute of its module (a tied weight too)."
                    )
                builder.placeholder(node, node.target, value)
            elif node.op == "call_function":
                builder.call(node)
            if node is output[0]:
                builder.is_forward = False  # autograd starts once there is a loss
        gradients = output[1 : len(self._trained) + 1]
        placed_at = builder.placed
        others = [name for name in placed_at if name not in self._trained and not name.startswith(INPUT)]
        graph = Graph(
            tensors=tuple(builder.tensors),
            operators=tuple(builder.operators),
            parameters={name: placed_at[name] for name in self._trained},
            buffers={name: placed_at[name] for name in others},
            constants=constants,
            inputs=tuple(tensor for name, tensor in placed_at.items() if name.startswith(INPUT)),
            loss=builder.numbers[output[0]],
            gradients={
                name: None if node is None else builder.numbers[node]
                for name, node in zip(self._trained, gradients, strict=True)
            },
            updates={
                name: builder.numbers[node] for name, node in zip(updates, output[len(gradients) + 1 :], strict=True)
            },
            samples=self._samples,
            default_dtype=torch.get_default_dtype(),
            guards=tuple(guard.expr for guard in self._shapes.guards),
        )
        return replace(graph, template=graph).at(self._samples)

    def _refuse_write(self, node: fx.Node, name: str) -> None:
        given = list(inspect.signature(self._module.forward).parameters)
        number = int(name.removeprefix(INPUT))
        own = given[number] if number < len(given) else name
        raise BadInput(
            f"'{module_of(node)}' writes in place ({node.target}) to the input '{own}'; clone it in forward first."
        )


class _Then(torch.nn.Module):
    """A module, and what is done with its result before its tensors are its own again."""

    def __init__(self, inner: torch.nn.Module, then: Any) -> None:
        super().__init__()
        self.inner, self._then = inner, then

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._then(self.inner(*inputs))


def _made_each(graph: fx.Graph, gradients: int) -> list[Any]:
    """What a step results in: the loss, so many gradients, and buffers; every gradient is made by an operator."""
    end = next(node for node in graph.nodes if node.op == "output")
    results = list(end.args[0])
    for place in range(1, gradients + 1):
        source = results[place]
        while source is not None and source.target in SAME_TENSOR:
            source = source.args[0]
        if source is not None and source.op != "call_function":  # a backward of the user's own returned a saved tensor
            with graph.inserting_before(end):
                results[place] = graph.call_function(aten.clone.default, (source,))
            results[place].meta.update(source.meta)
    return results


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
        if name in self.placed:  # a constant that is read again
            self.numbers[node] = self.placed[name]
            return
        self.placed[name] = self.numbers[node] = tensor = self._tensor(node.meta.get("val", value), name)
        if not name.startswith(INPUT):
            self.modules[tensor] = name.rpartition(".")[0]

    def call(self, node: fx.Node) -> None:
        if isinstance(node.meta.get("val"), NUMBERS):
            return  # whoever reads it knows its formula
        if node.target in SAME_TENSOR:
            self.numbers[node] = self.numbers[node.args[0]]  # type: ignore[index]
        elif called(node) == "getitem":
            part = self.parts[node.args[0]][node.args[1]]  # type: ignore[index]
            assert part is not None
            self.numbers[node] = part
        else:
            self._operator(node)

    def _tensor(self, value: Any, name: str) -> int:
        self.tensors.append(Tensor(name=name, shape=tuple(map(_plain, value.shape)), dtype=value.dtype))
        return len(self.tensors) - 1

    def _operator(self, node: fx.Node) -> None:
        if writes(node):
            raise BadInput(f"{module_of(node)}: {node.target} {CONSTANT}")
        inputs: list[int] = []

        def ref(used: fx.Node) -> Any:
            if isinstance(used.meta.get("val"), NUMBERS):
                return used.meta["val"]
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
            annotated(node) or ""
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
    """fx's own lists and dictionaries as Python's, and numbers that follow from the number of samples by their formula."""
    if isinstance(value, NUMBERS):
        formula = value.node.expr
        number = int if isinstance(value, torch.SymInt) else float
        return BySamples(formula, number) if formula.free_symbols else number(formula)
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
