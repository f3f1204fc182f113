"""Every operation, reduction and type over every layout of islands, against plain arithmetic."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hethub.communicator import all_reduce_with_feedback
from tests.support.ranks import run_ranks

LAYOUTS = {
    "2+2": [[0, 1], [2, 3]],
    "2+2 interleaved": [[0, 2], [1, 3]],
    "1+3": [[0], [1, 2, 3]],
    "1+2+1": [[3], [0, 2], [1]],
    "four islands": [[0], [1], [2], [3]],
}
RELAYS = {"2+2": "gloo", "1+3": "gloo"}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
SIZES = [0, 1, 17, 4099]

COMBINED = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
ARITHMETIC = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG]
BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
CASES = (
    [(dtype, op) for dtype in FLOATS for op in ARITHMETIC]
    + [(dtype, op) for dtype in INTEGERS for op in [*ARITHMETIC, *BITWISE]]
    + [(dtype, op) for dtype in (torch.complex64, torch.complex128) for op in (ReduceOp.SUM, ReduceOp.AVG)]
    + [(torch.bool, op) for op in [*ARITHMETIC[:4], *BITWISE]]  # SUM is "or" and PRODUCT "and", as Gloo has it
    + [(dtype, op) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for op in (ReduceOp.SUM, ReduceOp.AVG)]
)


def data(rank, size, dtype):
    generator = torch.Generator().manual_seed(7 * rank + size)
    if dtype == torch.bool:
        return torch.rand(size, generator=generator) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(size, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        return values.to(dtype)
    return torch.randint(0, 50, (size,), generator=generator).to(dtype)


def expected(op, tensors):
    """The exact result: floats in float64, integers with the type's own wrapping, their mean rounded towards zero."""
    wide = {True: torch.float64, False: tensors[0].dtype}[tensors[0].is_floating_point()]
    wide = torch.complex128 if tensors[0].is_complex() else wide
    tensors = [tensor.to(wide) for tensor in tensors]
    if op == ReduceOp.AVG:
        total = functools.reduce(operator.add, tensors)
        return total.div(len(tensors), rounding_mode=None if wide.is_floating_point or wide.is_complex else "trunc")
    return functools.reduce(COMBINED[op], tensors)


def close(result, exact, dtype):
    """Within the bound of a fixed-order sum, two roundings to the type on top."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.equal(result, exact)
    real = torch.float32 if dtype == torch.complex64 else torch.float64 if dtype == torch.complex128 else dtype
    epsilon = torch.finfo(real).eps
    error = (result.to(exact.dtype) - exact).abs()
    return bool((error <= 4 * epsilon * (exact.abs() + 4)).all())


def reduce_all_cases(world):
    """The bits of every result, for comparison between ranks, and the cases that were wrong."""
    bits, wrong = [], []
    for dtype, op in CASES:
        for size in SIZES:
            inputs = [data(rank, size, dtype) for rank in range(world.size)]
            exact = expected(op, inputs)
            tensor = inputs[world.rank].clone()
            dist.all_reduce(tensor, op=op)
            bits.append(hash(tensor.view(torch.uint8).numpy().tobytes()) if size else 0)
            if size and not close(tensor, exact, dtype):
                wrong.append(("all_reduce", str(dtype), str(op), size))
            root = size % world.size
            tensor = inputs[world.rank].clone()
            dist.reduce(tensor, root, op=op)
            if size and world.rank == root and not close(tensor, exact, dtype):
                wrong.append(("reduce", str(dtype), str(op), size))
            if (
                size
                and world.rank != root
                and not torch.equal(tensor.view(torch.uint8), inputs[world.rank].view(torch.uint8))
            ):
                wrong.append(("reduce left another tensor on a rank that is not the root", str(dtype), size))
            part = torch.empty_like(inputs[0].tensor_split(world.size)[world.rank])
            dist.reduce_scatter(part, [piece.clone() for piece in inputs[world.rank].tensor_split(world.size)], op=op)
            if not close(part, exact.tensor_split(world.size)[world.rank], dtype):
                wrong.append(("reduce_scatter", str(dtype), str(op), size))
    return bits, wrong


SLOW = ("1+3", "four islands")  # the other three hold every relay, any order of ranks, and three islands


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LAYOUTS])
def test_reductions(layout):
    results = run_ranks(
        4,
        reduce_all_cases,
        islands=LAYOUTS[layout],
        relay=RELAYS.get(layout, "auto"),
        environment={"PYTHONHASHSEED": "0"},
    )
    assert results[0][1] == []
    for bits, wrong in results:
        assert wrong == []
        assert bits == results[0][0]


def move_all_types(world):
    """Every operation without arithmetic, in every type, contiguous and not; the ones that were wrong."""
    rank, size, wrong = world.rank, world.size, []

    def check(name, ok):
        if not ok:
            wrong.append((name, str(dtype)))

    for dtype in [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]:
        own = [data(r, 12, dtype) for r in range(size)]
        same = functools.partial(bitwise_equal)

        tensor = own[rank].clone()
        dist.broadcast(tensor, 2)
        check("broadcast", same(tensor, own[2]))

        columns = own[rank].clone().view(3, 4).t()
        dist.broadcast(columns, 1)
        check("broadcast of a transposed tensor", same(columns, own[1].view(3, 4).t()))

        gathered = [torch.empty(12, dtype=dtype) for _ in range(size)]
        dist.all_gather(gathered, own[rank])
        check("all_gather", all(same(a, b) for a, b in zip(gathered, own, strict=True)))

        whole = torch.empty(12 * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, own[rank])
        check("all_gather_into_tensor", same(whole, torch.cat(own)))

        uneven = [torch.empty(r, dtype=dtype) for r in range(size)]
        dist.all_gather(uneven, own[rank][:rank].clone())
        check("all_gather of unequal tensors", all(same(a, own[r][:r]) for r, a in enumerate(uneven)))

        gathered = [torch.empty(12, dtype=dtype) for _ in range(size)] if rank == 3 else None
        dist.gather(own[rank], gathered, dst=3)
        check("gather", rank != 3 or all(same(a, b) for a, b in zip(gathered, own, strict=True)))

        tensor = torch.empty(12, dtype=dtype)
        dist.scatter(tensor, own if rank == 1 else None, src=1)
        check("scatter", same(tensor, own[rank]))

        exchanged = torch.empty(12, dtype=dtype)
        dist.all_to_all_single(exchanged, own[rank])
        check("all_to_all_single", same(exchanged, torch.cat([t[3 * rank : 3 * rank + 3] for t in own])))

        pieces = [torch.empty(rank + 1, dtype=dtype) for _ in range(size)]
        dist.all_to_all(pieces, [own[rank][: r + 1].clone() for r in range(size)])
        check("all_to_all uneven", all(same(a, own[r][: rank + 1]) for r, a in enumerate(pieces)))

        received = torch.empty(12, dtype=dtype)
        sending = dist.isend(own[rank], (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        check("send and recv", same(received, own[(rank - 1) % size]))

        part = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_tensor(part, own[rank].clone())
        check("reduce_scatter_tensor", close(part, expected(ReduceOp.SUM, own)[3 * rank : 3 * rank + 3], dtype))
        uneven_part = torch.empty(rank, dtype=dtype)
        dist.reduce_scatter(uneven_part, [own[rank][:r].clone() for r in range(size)])
        check("reduce_scatter of unequal tensors", close(uneven_part, expected(ReduceOp.SUM, own)[:rank], dtype))
    return wrong


def bitwise_equal(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves(layout):
    for wrong in run_ranks(4, move_all_types, islands=LAYOUTS[layout], relay=RELAYS.get(layout, "auto")):
        assert wrong == []


def premul_and_coalesced(world):
    factor = torch.distributed._make_nccl_premul_sum(0.5)
    tensor = torch.full((10,), 4.0)
    dist.all_reduce(tensor, op=factor)
    assert (tensor == 2.0 * world.size).all()
    whole, part = torch.arange(2.0 * world.size), torch.empty(2)
    dist.reduce_scatter_tensor(part, whole, op=factor)
    assert torch.equal(part, 0.5 * world.size * whole.view(-1, 2)[world.rank])
    assert torch.equal(whole, torch.arange(2.0 * world.size))
    tensor = torch.full((10,), 4.0)
    all_reduce_with_feedback(world.default_group, tensor, torch.zeros(10), op=factor, async_op=False)
    assert (tensor == 2.0 * world.size).all()

    tensors = [torch.full((3,), float(world.rank)), torch.full((5,), 1.0)]
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each)
    assert (tensors[0] == sum(range(world.size))).all()
    assert (tensors[1] == world.size).all()

    outputs = [torch.empty(2 * world.size), torch.empty(world.size)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], torch.full((2,), float(world.rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((1,), -float(world.rank)))
    assert outputs[1].tolist() == [-float(r) for r in range(world.size)]

    parts = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(parts[0], torch.arange(2.0 * world.size))
        dist.reduce_scatter_tensor(parts[1], torch.full((world.size,), float(world.rank)))
    assert parts[0].tolist() == [world.size * (2.0 * world.rank + i) for i in range(2)]
    assert parts[1].item() == sum(range(world.size))
    counted = {row["operation"] for row in world.counters()["operations"]}
    assert {"all_reduce_coalesced", "reduce_scatter_tensor_coalesced"} <= counted

    objects = [None] * world.size
    dist.all_gather_object(objects, {"rank": world.rank})
    assert objects == [{"rank": r} for r in range(world.size)]
    return True


def test_premul_sum_coalesced_and_objects():
    assert all(run_ranks(3, premul_and_coalesced, islands=[[0, 2], [1]]))


def many_out_of_order(world):
    """Forty operations under way on three groups, waited for in reverse."""
    groups = [world.group([0, 1, 2, 3]), world.group([0, 1, 3]), world.group([1, 2])]
    members = [[0, 1, 2, 3], [0, 1, 3], [1, 2]]
    under_way = []
    for step in range(40):
        which = step % 3
        if groups[which] is not None:
            tensor = torch.full((1000 + step,), float(world.rank + step))
            under_way.append((step, which, tensor, dist.all_reduce(tensor, group=groups[which], async_op=True)))
    for step, which, tensor, work in reversed(under_way):
        work.wait()
        assert (tensor == sum(rank + step for rank in members[which])).all()
    return len(under_way)


def test_many_operations_waited_for_out_of_order():
    assert run_ranks(4, many_out_of_order, islands=[[0, 1], [2, 3]])[1] == 40


def scatter_and_look_at_the_input(world):
    given = torch.arange(300_000.0) + world.rank
    dist.reduce_scatter_tensor(torch.empty(100_000), given)
    return torch.equal(given, torch.arange(300_000.0) + world.rank)


def test_a_reduce_scatter_leaves_its_input_as_it_was():
    assert all(run_ranks(3, scatter_and_look_at_the_input, islands=[[0, 1], [2]]))
