"""Every rule of every operator that the four models use, checked with numbers and uneven cuts."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hethub.runtime.program.llama import Llama
from hethub.spec.model import ModelSpec
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.costs import Move, is_view, work
from hethub.synthesis.graph import Graph, Operator, Ref
from hethub.synthesis.pieces import Exchange, OwnCall, joined, piece
from hethub.synthesis.planning import plan_graph
from hethub.synthesis.rules import PARTIAL, WHOLE, Cut, Rule, Rules, State, reshaped
from tests.support.ranks import run_ranks
from tests.synthesis.clusters import cluster
from tests.synthesis.models import NAMES, build

aten: Any = torch.ops.aten
GRAPHS: dict[str, tuple[Graph, dict[int, torch.Tensor]]] = {}


def llama() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """hethub's own, with fewer heads of keys than of queries."""
    model = ModelSpec(name="llama", layers=1, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=40, max_seq_len=8)
    torch.manual_seed(0)
    module = Llama(model, 8).double()
    return module, (torch.randint(40, (6, 8)), torch.randint(40, (6, 8)))


def traced(name: str) -> tuple[Graph, dict[int, torch.Tensor]]:
    """A model's graph and the value of every tensor of it, computed on one device."""
    if name not in GRAPHS:
        module, inputs = llama() if name == "llama" else build(name)
        graph = trace(module, inputs)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers()), **graph.constants}
        values = {t: named[n].detach() for n, t in (*graph.parameters.items(), *graph.buffers.items())}
        values.update(zip(graph.inputs, inputs, strict=True))
        for operator in graph.operators:
            results = operator.call([values[t] for t in operator.inputs])
            values.update({t: r for t, r in zip(operator.outputs, results, strict=True) if t is not None})
        GRAPHS[name] = graph, values
    return GRAPHS[name]


def share_lists(atoms: int) -> Iterator[tuple[int, ...]]:
    """Shares of three ranks: nothing, one, some and all of the atoms occur."""
    some = max(2, atoms // 2) if atoms > 2 else 1
    yield (0, 1, atoms - 1)
    yield (some, 0, atoms - some)
    yield (0, atoms, 0)


def parts(whole: torch.Tensor, state: State, shares: Sequence[int]) -> list[torch.Tensor]:
    """Each rank's part of a tensor in `state`."""
    if isinstance(state, Cut):
        return [piece(whole, state, shares, rank) for rank in range(len(shares))]
    if state == WHOLE:
        return [whole] * len(shares)
    first = torch.randn_like(whole) if whole.is_floating_point() else torch.ones_like(whole)
    return [first, *[torch.zeros_like(whole)] * (len(shares) - 2), whole - first]


def check(held: list[torch.Tensor], whole: torch.Tensor, state: State) -> None:
    if isinstance(state, Cut):
        torch.testing.assert_close(joined(held, state), whole, rtol=1e-9, atol=1e-11)
    elif state == PARTIAL:
        torch.testing.assert_close(torch.stack(list(held)).sum(0).to(whole.dtype), whole, rtol=1e-9, atol=1e-11)
    else:
        for part in held:
            torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-11)


def check_rule(graph: Graph, rules: Rules, values: dict[int, torch.Tensor], number: int, rule: Rule) -> int:
    operator = graph.operators[number]
    axis = rules.axis_of(number, rule)
    atoms = 1 if axis is None else rules.axes[axis].atoms
    if axis is not None and atoms == 1:
        return 0
    made = [graph.tensors[t] for t in operator.made]
    for shares in share_lists(atoms) if axis is not None else [(1, 1, 1)]:
        inputs = [parts(values[t], s, shares) for t, s in zip(operator.inputs, rule.inputs, strict=True)]
        results = [
            OwnCall(operator, rule, [t.shape for t in made], [t.dtype for t in made], share, atoms)([p[rank] for p in inputs])
            for rank, share in enumerate(shares)
        ]  # fmt: skip
        for place, tensor in enumerate(operator.made):
            check([result[place] for result in results], values[tensor], rule.outputs[place])
    return 1


Kind = tuple[object, ...]


def kind_of(graph: Graph, number: int, rule: Rule) -> Kind:
    """What a rule's numbers depend on; equal layers have equal rules."""
    operator = graph.operators[number]
    return operator.key, str(operator.args), str(graph.shapes_in(operator)), rule


@cache
def checked(name: str) -> set[Kind]:
    """The rules of a model's operators, each checked with numbers."""
    torch.manual_seed(0)
    graph, values = traced(name)
    rules = Rules(graph)
    assert not rules.unknown
    found: set[Kind] = set()
    for number, operator in enumerate(graph.operators):
        for rule in rules.of[number]:
            if kind_of(graph, number, rule) in found:
                continue
            try:
                if check_rule(graph, rules, values, number, rule):
                    found.add(kind_of(graph, number, rule))
            except Exception as error:
                raise AssertionError(f"{operator.name} ({operator.key}) {operator.args}: {rule}: {error}") from error
    return found


@pytest.mark.parametrize("name", [*NAMES, "llama", "residual"])
def test_every_rule_gives_the_whole_operators_result(name: str) -> None:
    assert len(checked(name)) > 100


@pytest.mark.parametrize("name", [*NAMES, "residual"])
def test_every_rule_that_a_program_follows_is_among_those_checked(name: str) -> None:
    """With shares of none, one, some and all of its atoms."""
    graph, _ = traced(name)
    rules = Rules(graph)
    program = plan_graph(graph, cluster([1.0, 2.0, 5.0], gbytes=0.01))
    for number, chosen in enumerate(program.rules):
        rule = rules.of[number][chosen]
        assert kind_of(graph, number, rule) in checked(name)
        axis = rules.axis_of(number, rule)
        if axis is not None:
            atoms = rules.axes[axis].atoms
            some = {share for shares in share_lists(atoms) for share in shares}
            assert {0, 1, atoms} <= some
            assert atoms < 3 or some - {0, 1, atoms}


def test_a_merged_dimension_is_cut_inside_its_blocks() -> None:
    assert reshaped((8, 6, 5), (48, 5), Cut(1, 1)) == Cut(0, 8)
    assert reshaped((48, 5), (8, 6, 5), Cut(0, 8)) == Cut(1, 1)
    assert reshaped((48, 5), (8, 6, 5), Cut(0, 1)) == Cut(0, 1)
    assert reshaped((4, 6), (6, 4), Cut(1, 1)) is None


def test_an_unknown_operator_is_computed_whole_and_named() -> None:
    class Sorted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(self.layer(values)).sum()

    graph = trace(Sorted(), (torch.randn(4, 4),))
    rules = Rules(graph)
    assert any("matrix_exp" in name for name in rules.unknown)
    number = next(n for n, operator in enumerate(graph.operators) if "matrix_exp" in operator.key)
    assert rules.of[number] == [Rule((WHOLE,), (WHOLE,))]


class Everyday(torch.nn.Module):
    """Every activation of torch and the losses that are means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        kinds = (
            nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.PReLU, nn.Mish, nn.Softplus, nn.ReLU6, nn.LogSigmoid, nn.Hardsigmoid, nn.CELU,
            nn.SELU, nn.Softshrink, nn.Hardshrink, nn.SiLU, nn.GELU, nn.Tanhshrink, nn.Softsign, nn.Hardtanh, nn.GLU,
        )  # fmt: skip
        self.layer, self.activations = nn.Linear(8, 8), nn.ModuleList([kind() for kind in kinds])

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        functional, given = torch.nn.functional, self.layer(values)
        sums = torch.stack([activation(given).sum(-1) for activation in self.activations[:-1]], 1)
        made = self.activations[-1](sums[:, :16] + torch.cat([torch.triu(given.roll(1, -1)[:, None]).squeeze()] * 2, 1))
        losses = (functional.smooth_l1_loss, functional.huber_loss, functional.mse_loss, functional.soft_margin_loss)
        both = made.sigmoid(), target.sigmoid()
        return (
            sum(loss(made, target) for loss in losses)
            + functional.binary_cross_entropy(*both)
            + functional.binary_cross_entropy_with_logits(made, both[1])
            + made.logsumexp(-1).mean() + made.norm(dim=-1).mean()
        )  # fmt: skip


def test_the_usual_activations_and_losses_have_rules() -> None:
    graph = trace(Everyday(), (torch.randn(6, 8), torch.randn(6, 8)))
    rules = Rules(graph)
    assert not rules.unknown
    samples = rules.axis(graph.inputs[0], Cut(0, 1))
    for number, operator in enumerate(graph.operators):
        if graph.shapes_out(operator)[0][:1] == (6,):
            assert samples in {rules.axis_of(number, rule) for rule in rules.of[number]}, operator.key


def test_an_operator_without_rules_is_given_what_lies_in_order() -> None:
    """torch's backward of weight_norm computes something else for a transposed gradient, and says nothing."""
    key = "aten._weight_norm_interface_backward.default"
    given = [torch.randn(16, 8), torch.randn(16, 8), torch.randn(16, 1), torch.rand(16, 1) + 1]
    operator = Operator(
        name=key, key=key, args=(*map(Ref, range(4)), 0), kwargs={}, inputs=tuple(range(4)), outputs=(4, 5),
        has_many_outputs=True, module="", is_forward=False,
    )  # fmt: skip
    rule, shapes = Rule((WHOLE,) * 4, (WHOLE, WHOLE)), [(16, 8), (16, 1)]
    turned = [given[0].t().contiguous().t(), *given[1:]]
    call = OwnCall(operator, rule, shapes, [torch.float32] * 2, 1, 1)
    both = [call(tensors) for tensors in (given, turned)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def moved(world: Any, dtypes: Sequence[torch.dtype]) -> list[bool]:
    """Whether pieces are gathered, and exchanged for pieces along the other dimension, with the values that they had."""
    exchange = Exchange(world.group(range(2)))
    rows, columns, shares, found = Cut(0, 1), Cut(1, 1), (1, 1), []
    wholes = [torch.tensor([[0, 1, 1, 0], [1, 0, 120, 3]]).to(dtype) for dtype in dtypes]
    for whole in (*wholes, torch.empty(2, 0), torch.empty(0, 2)):
        own = piece(whole, rows, shares, exchange.rank)
        for target, kind in ((WHOLE, "all-gather"), (WHOLE, "padded all-gather"), (columns, "all-to-all")):
            result = exchange.move(Move(0, rows, target, kind), own, whole.shape, shares, shares)
            expected = whole if target == WHOLE else piece(whole, columns, shares, exchange.rank)
            found.append(result.dtype == whole.dtype and torch.equal(result, expected))
    return found


def test_pieces_of_every_type_are_moved_empty_ones_too() -> None:
    """torch's Gloo carries no int16; of an empty tensor a dimension could not be told."""
    dtypes = (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128,
    )  # fmt: skip
    for results in run_ranks(2, moved, dtypes):
        assert all(results)


class Unbound(torch.nn.Module):
    """Queries, keys and values as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 24)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        query, key, value = self.layer(values).unflatten(-1, (3, 8)).unbind(2)
        return (query * key + value.squeeze()).square().mean()


def test_what_lies_in_its_inputs_memory_costs_nothing() -> None:
    torch.manual_seed(0)
    module, inputs = Unbound(), (torch.randn(6, 4, 8),)
    graph = trace(module, inputs)
    values = {t: module.get_parameter(name).detach() for name, t in graph.parameters.items()}
    values.update(zip(graph.inputs, inputs, strict=True))
    views = set()
    for operator in graph.operators:
        given = [values[t] for t in operator.inputs]
        made = operator.call(given)
        values.update(zip(operator.made, made, strict=True))
        if given and made[0].untyped_storage().data_ptr() == given[0].untyped_storage().data_ptr():
            views.add(operator.key)
            assert is_view(operator), operator.key
            assert work(graph, operator) is None, operator.key
    assert {"aten.unbind.int", "aten.squeeze.dims", "aten.view.default"} <= views


class Copies(TorchDispatchMode):
    """Counts the elements that operators on this thread write, and notes copies from or to rows that do not lie in order."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.turns = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (aten.copy_.default, aten.clone.default, aten.cat.default):
            given = args[0] if func is aten.cat.default else args
            self.elements += result.numel()
            self.turns |= any(value.stride(-1) != 1 for value in (*given, result))
        return result


def copied(world: Any, cuts: Sequence[Cut]) -> list[tuple[str, float, bool]]:
    """By cut and move, how often the elements of the larger side are written, and whether rows are turned."""
    exchange, whole, found = Exchange(world.group(range(2))), torch.randn(4, 6, 24), []
    for cut in cuts:
        atoms = whole.shape[cut.dim] // cut.blocks
        shares, other = (atoms - 1, 1), Cut(0, 1) if cut.dim else Cut(1, 1)
        held = piece(whole, cut, shares, exchange.rank)
        moves = [
            (Move(0, cut, WHOLE, "all-gather"), held), (Move(0, cut, WHOLE, "padded all-gather"), held),
            (Move(0, cut, PARTIAL, None), held), (Move(0, PARTIAL, cut, "reduce-scatter"), whole),
            (Move(0, WHOLE, cut, None), whole), (Move(0, cut, other, "all-to-all"), held),
        ]  # fmt: skip
        for move, given in moves:
            before, after = (shares if state == cut else (1, 1) for state in (move.source, move.target))
            with Copies() as copies:
                result = exchange.move(move, given, whole.shape, before, after)
            larger = max(given.numel(), result.numel())
            found.append((f"{cut}: {move.source} to {move.target}", copies.elements / larger, copies.turns))
    return found


def test_a_move_writes_twice_what_it_moves_at_most_and_turns_no_rows() -> None:
    """A dimension that is cut was brought to the front and back: 5 to 19 times a copy's time along the last one."""
    for results in run_ranks(2, copied, [Cut(0, 1), Cut(1, 1), Cut(1, 2), Cut(2, 1), Cut(2, 3)]):
        for what, times, turns in results:
            assert times <= 2.0, (what, times)
            assert not turns, what
