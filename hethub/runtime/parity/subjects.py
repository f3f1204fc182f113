"""What is compared: a job's layer, head and optimizer step, and the operators they are made of, on inputs that depend
on nothing but their names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log2, sqrt

import torch
from torch import Tensor

from hethub.runtime.model.initial import generator_of
from hethub.runtime.model.layers import Documents, TokenLayout, _mix, _SwiGLU, rms_norm
from hethub.runtime.model.loss import head_loss
from hethub.runtime.model.rope import rope_table, rotate
from hethub.runtime.model.stage import llama_layer
from hethub.runtime.model.tensor_parallel import TensorGroup, column_parallel, embed, row_parallel
from hethub.runtime.parity.formulas import AdamWStep, Formulas
from hethub.runtime.state.optimizer import fused_adamw
from hethub.runtime.state.parameter import Parameter
from hethub.runtime.state.storage import DTYPES
from hethub.spec.job import TrainSpec
from hethub.spec.layout.tensors import IGNORED, layer_tensors
from hethub.spec.model import ModelSpec

SEQUENCES, MOST_SEQ_LEN = 2, 128  # of real width and few tokens: the CPU's fp64 must not take minutes
UPDATES_BEFORE = 2  # of the optimizer, so that bias correction shows
Tensors = Mapping[str, Tensor]
GRADIENT = "gradient of {}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One thing that is computed on both sides.

    `run` takes the inputs on the device and `expect` the same in fp64; both give the same outputs by name. `roundings` is
    how many on end a result may have at best, in at least fp32: log2(n) of a sum of n products, added in pairs.
    """

    name: str
    inputs: Tensors
    run: Callable[[Tensors], Tensors]
    expect: Callable[[Formulas, Tensors], Tensors]
    roundings: float
    uses: tuple[str, ...]  # formulas by name
    joins: bool = False  # operators that were compared before


def subjects(model: ModelSpec, train: TrainSpec, *, masks_documents: bool) -> Iterator[Subject]:
    """The operators in the order in which a microbatch meets them; then layer, head and optimizer as they train."""
    make = _Maker(model, train, masks_documents=masks_documents)
    yield make.embedding()
    yield make.norm()
    yield make.projection()
    yield make.rotary()
    yield make.attention()
    yield make.output_projection()
    yield make.activation()
    yield make.layer()
    yield make.head()
    yield make.optimizer()


class _Maker:
    def __init__(self, model: ModelSpec, train: TrainSpec, *, masks_documents: bool) -> None:
        self.train, self.dtype = train, DTYPES[train.precision]
        self.seq = min(train.seq_len, MOST_SEQ_LEN)
        window = model.sliding_window and max(
            1, model.sliding_window * self.seq // train.seq_len
        )  # as a part of the sequence
        self.model = model.replace(sliding_window=window)
        self.heads = (SEQUENCES, self.seq, -1, model.head_size)
        self.first_document = max(1, self.seq // 3) if masks_documents and self.seq > 1 else self.seq  # tokens of it
        document = torch.arange(self.seq) < self.first_document
        behind = torch.arange(self.seq).unsqueeze(1) - torch.arange(self.seq)
        self.mask = document.unsqueeze(0) == document.unsqueeze(1)  # (seq, seq)
        self.mask &= behind < (window or self.seq)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _drawn(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator_of(name)) * scale).to(self.dtype)

    def _hidden(self, name: str) -> Tensor:
        """(tokens, hidden), rows of magnitudes from 2^-10 to 4: eps shows in the small ones."""
        tokens = SEQUENCES * self.seq
        sizes = torch.exp2(torch.rand(tokens, 1, generator=generator_of(f"{name} sizes")) * 12 - 10)
        return self._drawn(name, tokens, self.model.hidden) * sizes.to(self.dtype)

    def _matrix(self, name: str, *shape: int) -> Tensor:
        """A weight (out, in) that keeps its input's magnitude."""
        return self._drawn(name, *shape, scale=1 / sqrt(shape[-1]))

    def _norm_weight(self, name: str) -> Tensor:
        return (1 + self._drawn(name, self.model.hidden, scale=0.1)).to(self.dtype)

    def _tokens(self, name: str) -> Tensor:
        return torch.randint(0, self.model.vocab, (SEQUENCES * self.seq,), generator=generator_of(name))

    # -- subjects ------------------------------------------------------------------------------------------------------

    def _graph(
        self,
        name: str,
        inputs: Tensors,
        weights: Sequence[str],
        run: Callable[[Tensors, Callable[[str], Parameter]], Tensor],
        expect: Callable[[Formulas, Tensors], Tensor],
        *,
        uses: str = "",
        roundings: float,
        joins: bool = False,
    ) -> Subject:
        """A subject with a backward: `run` meets `weights` as the runtime's parameters."""
        with torch.no_grad():
            result = expect(Formulas(), {key: wide(value) for key, value in inputs.items()})
        at_least_fp32 = torch.promote_types(self.dtype, torch.float32)
        grad = self._drawn(f"{name} grad", *result.shape).to(at_least_fp32 if result.dim() == 0 else self.dtype)
        return Subject(
            name=name, inputs={**inputs, "grad": grad}, run=partial(_run_graph, run, weights),
            expect=partial(_expect_graph, expect), roundings=roundings, uses=tuple(uses.split()), joins=joins,
        )  # fmt: skip

    def embedding(self) -> Subject:
        inputs = {
            "tokens": self._tokens("tokens") % 7 * (self.model.vocab // 7),  # few rows, met often
            "weight": self._drawn("embedding", self.model.vocab, self.model.hidden),
        }
        return self._graph(
            "embedding", inputs, ["weight"],
            lambda t, use: embed(t["tokens"], 0, TensorGroup(None), use("weight")),
            lambda formulas, t: t["weight"][t["tokens"]],
            roundings=log2(SEQUENCES * self.seq),
        )  # fmt: skip

    def norm(self) -> Subject:
        inputs, eps = {"x": self._hidden("x"), "weight": self._norm_weight("norm")}, self.model.norm_eps
        return self._graph(
            "norm", inputs, ["weight"],
            lambda t, use: rms_norm(t["x"], use("weight"), eps),
            lambda formulas, t: formulas.rms_norm(t["x"], t["weight"], eps),
            uses="rms_norm", roundings=log2(max(self.model.hidden, SEQUENCES * self.seq)),
        )  # fmt: skip

    def projection(self) -> Subject:
        hidden, out = self.model.hidden, self.model.heads * self.model.head_size
        inputs = {"x": self._drawn("x", SEQUENCES * self.seq, hidden), "weight": self._matrix("q", out, hidden)}
        return self._graph(
            "projection", inputs, ["weight"],
            lambda t, use: column_parallel(t["x"], TensorGroup(None), (use("weight"),))[0],
            lambda formulas, t: formulas.linear(t["x"], t["weight"]),
            uses="linear", roundings=log2(max(hidden, out)),
        )  # fmt: skip

    def output_projection(self) -> Subject:
        hidden, width = self.model.hidden, self.model.heads * self.model.head_size
        weight = self._matrix("o", hidden, width).t().contiguous()  # as it is stored: (in, out)
        inputs = {"x": self._drawn("mixed", SEQUENCES * self.seq, width), "weight": weight}
        return self._graph(
            "output projection", inputs, ["weight"],
            lambda t, use: row_parallel(t["x"], TensorGroup(None), use("weight")),
            lambda formulas, t: formulas.linear(t["x"], t["weight"].t()),
            uses="linear", roundings=log2(max(hidden, width)),
        )  # fmt: skip

    def rotary(self) -> Subject:
        """An angle is a position times a frequency: it is off by as many roundings of the frequency."""
        heads, shape = (self.model.heads, self.model.num_kv_heads), (SEQUENCES, self.seq)
        inputs = {
            name: self._drawn(name, *shape, number, self.model.head_size)
            for name, number in zip(("query", "key"), heads, strict=True)
        }
        return self._graph(
            "rotary embedding", inputs, [],
            lambda t, use: torch.cat(rotate(t["query"], t["key"], *self._table(t["query"].device)), 2),
            lambda formulas, t: torch.cat([formulas.rotate(t[name], self.model) for name in ("query", "key")], 2),
            uses="rotate", roundings=self.seq,
        )  # fmt: skip

    def attention(self) -> Subject:
        shape = (SEQUENCES, self.seq)
        inputs = {
            "query": self._drawn("query", *shape, self.model.heads, self.model.head_size),
            "key": self._drawn("key", *shape, self.model.num_kv_heads, self.model.head_size),
            "value": self._drawn("value", *shape, self.model.num_kv_heads, self.model.head_size),
        }
        return self._graph(
            "attention", inputs, [],
            lambda t, use: _mix(
                t["query"], t["key"], t["value"], self._documents(t["query"].device), self.model.sliding_window
            ),
            lambda formulas, t: formulas.attention(t["query"], t["key"], t["value"], self.mask),
            uses="scores spread_heads allowed", roundings=log2(max(self.seq, self.model.head_size)),
        )  # fmt: skip

    def activation(self) -> Subject:
        shape = (SEQUENCES * self.seq, self.model.ffn)
        return self._graph(
            "MLP activation", {"gate": self._drawn("gate", *shape), "up": self._drawn("up", *shape)}, [],
            lambda t, use: _SwiGLU.apply(t["gate"], t["up"]),
            lambda formulas, t: formulas.swiglu(t["gate"], t["up"]),
            uses="swiglu", roundings=1,
        )  # fmt: skip

    def layer(self) -> Subject:
        model, prefix, inputs = self.model, "model.layers.0.", {"x": self._hidden("x")}
        for info in layer_tensors(model, 0):
            drawn = self._matrix(info.name, *info.shape) if info.decays else self._norm_weight(info.name)
            inputs[info.name] = drawn.t().contiguous() if info.split_dim == 1 else drawn

        def run(t: Tensors, use: Callable[[str], Parameter]) -> Tensor:
            cos, sin = self._table(t["x"].device)
            layout = TokenLayout(
                batch=SEQUENCES, seq_len=self.seq, cos=cos, sin=sin, documents=self._documents(t["x"].device)
            )
            return llama_layer(model, 0, use, TensorGroup(None))(t["x"], layout)

        def expect(formulas: Formulas, t: Tensors) -> Tensor:
            def through(x: Tensor, name: str, *, stored_in_first: bool = False) -> Tensor:
                weight = t[f"{prefix}{name}.weight"]
                return formulas.linear(x, weight.t() if stored_in_first else weight)

            def normed(x: Tensor, name: str) -> Tensor:
                return formulas.rms_norm(x, t[f"{prefix}{name}.weight"], model.norm_eps)

            x, x1 = t["x"], normed(t["x"], "input_layernorm")
            query, key, value = (through(x1, f"self_attn.{part}_proj").view(self.heads) for part in "qkv")
            turned = formulas.rotate(query, model), formulas.rotate(key, model)
            mixed = formulas.attention(*turned, value, self.mask)
            x = x + through(mixed, "self_attn.o_proj", stored_in_first=True)
            x2 = normed(x, "post_attention_layernorm")
            inner = formulas.swiglu(through(x2, "mlp.gate_proj"), through(x2, "mlp.up_proj"))
            return x + through(inner, "mlp.down_proj", stored_in_first=True)

        weights = [name for name in inputs if name != "x"]
        uses = "linear rms_norm rotate scores spread_heads allowed swiglu"
        return self._graph("layer", inputs, weights, run, expect, uses=uses, roundings=log2(model.ffn), joins=True)

    def head(self) -> Subject:
        targets = self._tokens("targets")
        targets[::5] = IGNORED
        inputs = {
            "x": self._hidden("x"), "norm": self._norm_weight("norm"), "targets": targets,
            "weight": self._matrix("head", self.model.vocab, self.model.hidden),
        }  # fmt: skip
        eps, scale = self.model.norm_eps, 1 / targets.numel()

        def run(t: Tensors, use: Callable[[str], Parameter]) -> Tensor:
            x = rms_norm(t["x"], use("norm"), eps)
            return head_loss(x, t["targets"], 0, scale, TensorGroup(None), use("weight"))

        def expect(formulas: Formulas, t: Tensors) -> Tensor:
            logits = formulas.linear(formulas.rms_norm(t["x"], t["norm"], eps), t["weight"])
            return formulas.token_losses(logits, t["targets"]) * scale

        subject = self._graph(
            "head",
            inputs,
            ["norm", "weight"],
            run,
            expect,
            uses="linear rms_norm token_losses",
            roundings=log2(self.model.vocab),
        )
        grad = torch.ones_like(subject.inputs["grad"])  # the weight's gradient is added before backward is asked
        return replace(subject, inputs={**subject.inputs, "grad": grad})

    def optimizer(self) -> Subject:
        wide, shape = torch.promote_types(self.dtype, torch.float32), (SEQUENCES * self.seq, self.model.hidden)
        # From far below eps to 1.
        sizes = torch.exp2(torch.rand(shape, generator=generator_of("grad sizes"), dtype=wide) * -40)
        grad = torch.randn(shape, generator=generator_of("grad"), dtype=wide) * sizes
        inputs = {"weight": torch.randn(shape, generator=generator_of("master"), dtype=wide), "grad": grad}
        inputs |= {"first": 0.1 * grad, "second": 0.05 * grad.square()}
        train = self.train

        def run(t: Tensors) -> Tensors:
            state = {name: t[name].clone() for name in ("weight", "first", "second")}
            before = torch.full((), float(UPDATES_BEFORE), device=t["grad"].device)
            fused_adamw([list(state.values())], [t["grad"].clone()], [before], train, lr=train.lr, decays=True)
            return state

        def expect(formulas: Formulas, t: Tensors) -> Tensors:
            step = AdamWStep(lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay)
            found = formulas.adamw((t["weight"], t["first"], t["second"]), t["grad"], step, UPDATES_BEFORE + 1)
            return dict(zip(("weight", "first", "second"), found, strict=True))

        return Subject(name="optimizer step", inputs=inputs, run=run, expect=expect, roundings=1, uses=("adamw",))

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return rope_table(self.model, self.seq, self.dtype, device)

    def _documents(self, device: torch.device) -> Documents | None:
        if self.first_document == self.seq:
            return None
        sizes = SEQUENCES * (self.first_document, self.seq - self.first_document)
        starts = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
        return Documents(sizes=sizes, starts=starts)


def wide(value: Tensor) -> Tensor:
    """Numbers in fp64, indices as they are."""
    return value.double() if value.is_floating_point() else value


def _run_graph(
    run: Callable[[Tensors, Callable[[str], Parameter]], Tensor], weights: Sequence[str], inputs: Tensors
) -> Tensors:
    """The result and every gradient, by the runtime's own backward functions."""
    parameters = {name: _parameter(name, inputs[name]) for name in weights}

    def use(name: str) -> Parameter:
        return parameters[name]

    others = {
        name: value.detach().requires_grad_(value.is_floating_point() and name != "grad")
        for name, value in inputs.items()
        if name not in weights
    }
    result = run(others, use)
    result.backward(others["grad"])
    found = {"result": result.detach()}
    found |= {GRADIENT.format(name): t.grad for name, t in others.items() if t.grad is not None}
    return found | {GRADIENT.format(name): parameter.grad for name, parameter in parameters.items()}


def _parameter(name: str, weight: Tensor) -> Parameter:
    wide = torch.promote_types(weight.dtype, torch.float32)
    parameter = Parameter(name, weight, torch.zeros_like(weight, dtype=wide))
    parameter.uses = 1
    parameter.start_step(1, lambda done: None)
    return parameter


def _expect_graph(expect: Callable[[Formulas, Tensors], Tensor], formulas: Formulas, inputs: Tensors) -> Tensors:
    """Return the gradients by autograd."""
    leaves = {
        name: value.detach().requires_grad_(value.is_floating_point() and name != "grad")
        for name, value in inputs.items()
    }
    result = expect(formulas, leaves)
    result.backward(leaves["grad"])
    found = {"result": result.detach()}
    return found | {GRADIENT.format(name): t.grad for name, t in leaves.items() if t.grad is not None}
