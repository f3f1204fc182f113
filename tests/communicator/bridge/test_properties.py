"""Random islands, operations, types and sizes: within the rounding bound of float64, and one set of bits for all.

Sizes are 0, 1, primes, and numbers no rank count divides; the chunk limits are lowered, so that a small message goes
through every path of a large one.
"""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from hethub.communicator import all_gather_by_ranges, reduce_scatter_by_ranges
from hethub.communicator.bridge.chunks import Tuning
from hethub.spec.ranges import from_sizes
from tests.support.ranks import run_ranks

FLOATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTEGERS = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}
TYPES = FLOATS | INTEGERS
OPERATIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BXOR"]
SIZES = [0, 1, 2, 3, 7, 61, 127, 509, 1021, 4099, 10_007]
SMALL_LIMITS = Tuning(chunk_bytes=1000, small_bytes=300, lag=2)


@st.composite
def layouts(draw):
    """Two to four ranks in one to four islands, in any order."""
    size = draw(st.integers(2, 4))
    labels = draw(st.lists(st.sampled_from("abcd"), min_size=size, max_size=size))
    names = draw(st.permutations(sorted(set(labels))))
    return [[rank for rank in range(size) if labels[rank] == name] for name in names]


@st.composite
def cases(draw):
    operation = draw(st.sampled_from(OPERATIONS))
    types = INTEGERS if operation.startswith("B") else FLOATS if operation == "AVG" else TYPES
    return operation, draw(st.sampled_from(sorted(types))), draw(st.sampled_from(SIZES)), draw(st.integers(0, 99))


def contribution(rank, dtype, size, seed):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 12, (size,), generator=generator).to(dtype)


def lower_all_limits(world):
    """From here on the bridges made by now (a group's first operation makes its own) cut small messages too."""
    for bridge in world._context._bridges.values():
        bridge._tuning = SMALL_LIMITS


def reduce_cases(world, drawn, lower_limits):
    """Each case's result, twice over, in bits."""
    dist.all_reduce(torch.ones(10))
    if lower_limits:
        lower_all_limits(world)
    found = []
    for operation, name, size, seed in drawn:
        results = []
        for _ in range(2):
            tensor = contribution(world.rank, TYPES[name], size, seed)
            dist.all_reduce(tensor, op=getattr(ReduceOp, operation))
            results.append(tensor)
        assert torch.equal(results[0].view(torch.uint8), results[1].view(torch.uint8)), "another run, other bits"
        found.append(results[0])
    return found


def exact(operation, tensors):
    """The result in float64, or in the integers' own wrapping arithmetic; and what its rounding may amount to."""
    if not tensors[0].is_floating_point():
        combine = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
                   "BXOR": torch.bitwise_xor}[operation]  # fmt: skip
        total = tensors[0]
        for tensor in tensors[1:]:
            total = combine(total, tensor)
        return total, torch.zeros(total.shape)
    wide, epsilon = torch.stack([tensor.double() for tensor in tensors]), torch.finfo(tensors[0].dtype).eps
    roundings = (len(tensors) + 2) * epsilon
    if operation in ("SUM", "AVG"):
        divisor = len(tensors) if operation == "AVG" else 1
        # What cannot be told from the least positive number may be rounded to it.
        least = torch.finfo(tensors[0].dtype).smallest_normal
        return wide.sum(0) / divisor, roundings * wide.abs().sum(0) / divisor + least
    if operation == "PRODUCT":
        return wide.prod(0), roundings * wide.prod(0).abs() + math.ldexp(
            torch.finfo(tensors[0].dtype).smallest_normal, 4
        )
    return (wide.amin(0) if operation == "MIN" else wide.amax(0)), torch.zeros(wide.shape[1:])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    islands=layouts(),
    drawn=st.lists(cases(), min_size=12, max_size=25),
    relay=st.sampled_from(["gloo", "shm"]),
    lower_limits=st.booleans(),
)
def test_reductions_are_near_float64_and_the_same_bits_everywhere(islands, drawn, relay, lower_limits):
    size = sum(map(len, islands))
    results = run_ranks(size, reduce_cases, drawn, lower_limits, islands=islands, relay=relay)
    for number, (operation, name, length, seed) in enumerate(drawn):
        ours = results[0][number]
        if len(islands) > 1:  # one island is the native library's own, whose ranks agree as it pleases
            for other in results[1:]:
                assert torch.equal(ours.view(torch.uint8), other[number].view(torch.uint8)), (operation, name, length)
        expected, bound = exact(operation, [contribution(rank, TYPES[name], length, seed) for rank in range(size)])
        if TYPES[name].is_floating_point:
            assert ((ours.double() - expected).abs() <= bound).all(), (operation, name, length)
        else:
            assert torch.equal(ours, expected), (operation, name, length)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=list(FLOATS))
def test_the_bound_would_notice_a_lost_contribution(dtype):
    tensors = [contribution(rank, dtype, 509, 1) for rank in range(4)]
    expected, bound = exact("SUM", tensors)
    without_one, _ = exact("SUM", tensors[:3])
    assert ((without_one - expected).abs() > bound).float().mean() > 0.8


@st.composite
def cuts(draw):
    """Sizes of four ranks' shares, some of them empty, none divisible by anything in particular."""
    return draw(st.lists(st.sampled_from([0, 1, 13, 257, 4099]), min_size=4, max_size=4))


def by_ranges_cases(world, drawn, lower_limits):
    """Per case, this rank's share of the sum, and the whole put together again."""
    all_gather_by_ranges(world.default_group, torch.ones(world.size), from_sizes([1] * world.size)).wait()
    if lower_limits:
        lower_all_limits(world)
    found = []
    for sizes, name, seed in drawn:
        ranges = from_sizes(sizes[: world.size])
        own, whole = ranges[world.rank], ranges[-1].stop
        flat = contribution(world.rank, TYPES[name], whole, seed)
        share = torch.empty(own.size, dtype=flat.dtype)
        reduce_scatter_by_ranges(world.default_group, flat, ranges, share).wait()
        gathered = torch.zeros(whole, dtype=flat.dtype)
        gathered[own.start : own.stop] = share
        all_gather_by_ranges(world.default_group, gathered, ranges).wait()
        found.append((share, gathered))
    return found


@pytest.mark.parametrize("lower_limits", [False, True], ids=["as usual", "many chunks"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    islands=layouts(),
    drawn=st.lists(st.tuples(cuts(), st.sampled_from(sorted(FLOATS)), st.integers(0, 99)), min_size=6, max_size=12),
    relay=st.sampled_from(["gloo", "shm"]),
)
def test_uneven_shares_add_up_and_come_back_whole(islands, drawn, relay, lower_limits):
    size = sum(map(len, islands))
    results = run_ranks(size, by_ranges_cases, drawn, lower_limits, islands=islands, relay=relay)
    for number, (sizes, name, seed) in enumerate(drawn):
        ranges = from_sizes(sizes[:size])
        expected, bound = exact("SUM", [contribution(r, TYPES[name], ranges[-1].stop, seed) for r in range(size)])
        for rank, own in enumerate(ranges):
            share, gathered = results[rank][number]
            assert ((share.double() - expected[own.start : own.stop]).abs() <= bound[own.start : own.stop]).all(), sizes
            assert torch.equal(gathered.view(torch.uint8), results[0][number][1].view(torch.uint8)), sizes
            assert torch.equal(gathered[own.start : own.stop], share), sizes
