"""Every collective on tensors of every layout, in native groups, over islands and staged, against plain arithmetic."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed import ReduceOp

from hethub.communicator.groups import native
from hethub.spec.errors import BadInput
from tests.support.ranks import run_ranks

SHAPE = (4, 6)


def every_second(values: Tensor) -> Tensor:
    return torch.full((4, 12), -7.0, dtype=values.dtype)[:, ::2].copy_(values)


def transposed(values: Tensor) -> Tensor:
    return torch.empty(6, 4, dtype=values.dtype).t().copy_(values)


def inner_columns(values: Tensor) -> Tensor:
    return torch.full((4, 9), -7.0, dtype=values.dtype)[:, 2:8].copy_(values)


def by_rank(values: Tensor) -> Tensor:
    """A layout that is another one on every other rank, which c10d allows."""
    return transposed(values) if dist.get_rank() % 2 else values.clone()


def as_they_lie(values: Tensor) -> Tensor:
    return values.clone()


LAYOUTS = [every_second, transposed, inner_columns, by_rank, as_they_lie]


def data(rank: int) -> Tensor:
    return torch.arange(24.0).view(SHAPE).remainder(5) + rank + 1


def wrong_cases(world: Any, members: list[int]) -> list[tuple[str, str]]:
    """The operations whose result was not the plain one, with the layout."""
    group = world.group(members)
    if group is None:
        return []
    place, size, wrong = members.index(world.rank), len(members), []
    inputs = torch.stack([data(rank) for rank in range(size)])
    for lay in LAYOUTS:

        def check(name: str, found: Tensor | list[Tensor], expected: Any, lay: Any = lay) -> None:
            found = found if isinstance(found, list) else [found]
            expected = expected if isinstance(expected, list) else [expected]
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append((name, lay.__name__))

        def empties(count: int, shape: Any = SHAPE, lay: Any = lay) -> list[Tensor]:
            if shape == SHAPE:
                return [lay(torch.zeros(shape)) for _ in range(count)]
            return [torch.zeros(shape[0], 2 * shape[1])[:, ::2] for _ in range(count)]

        own = inputs[place]
        sums = {
            ReduceOp.SUM: inputs.sum(0),
            ReduceOp.AVG: inputs.mean(0),
            ReduceOp.PRODUCT: inputs.prod(0),
            ReduceOp.MAX: inputs.amax(0),
        }
        for op, total in sums.items():
            dist.all_reduce(tensor := lay(own), op=op, group=group)
            check(f"all_reduce {op}", (tensor - total).abs() < 1e-5, torch.ones(SHAPE, dtype=torch.bool))
            dist.reduce(tensor := lay(own), op=op, group=group, group_dst=1)
            if place == 1:
                check(f"reduce {op}", (tensor - total).abs() < 1e-5, torch.ones(SHAPE, dtype=torch.bool))
        for op, total in ((ReduceOp.BOR, 7 * torch.ones(4, 6, dtype=torch.int64)),):
            bits = torch.full(SHAPE, [1, 2, 4, 4][place] if size == 4 else [1, 2, 4][place])
            dist.all_reduce(tensor := lay(bits), op=op, group=group)
            check("all_reduce BOR", tensor, total)
        both = [lay(own), lay(own + 1)]
        with dist._coalescing_manager(group):
            for each in both:
                dist.all_reduce(each, group=group)
        check("coalesced all_reduce", both, [inputs.sum(0), inputs.sum(0) + size])
        tensor = lay(own)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        check("all_reduce, its future", [work.get_future().wait()[0], tensor], [inputs.sum(0)] * 2)
        dist.broadcast(tensor := lay(own), group=group, group_src=1)
        check("broadcast", tensor, inputs[1])
        dist.all_gather(gathered := empties(size), lay(own), group=group)
        check("all_gather", gathered, list(inputs))
        dist.gather(lay(own), gathered := empties(size) if place == 1 else None, group=group, group_dst=1)
        check("gather", gathered or [], list(inputs) if place == 1 else [])
        (part,) = empties(1)
        dist.scatter(part, [lay(row) for row in inputs] if place == 1 else None, group=group, group_src=1)
        check("scatter", part, own)
        whole = torch.zeros(4 * size, 12)[:, ::2]
        dist.all_gather_into_tensor(whole, lay(own), group=group)
        check("all_gather_into_tensor", whole, inputs.view(-1, 6))
        (part,) = empties(1)
        dist.reduce_scatter(part, [lay(own + rank) for rank in range(size)], group=group)
        check("reduce_scatter", part, inputs.sum(0) + size * place)
        if size == 4:
            (part,) = empties(1, (1, 6))
            dist.reduce_scatter_tensor(part, lay(own), group=group)
            check("reduce_scatter_tensor", part, inputs.sum(0)[place : place + 1])
            exchanged = lay(torch.zeros(SHAPE))
            dist.all_to_all_single(exchanged, lay(own), group=group)
            check("all_to_all_single", exchanged, inputs[:, place])
        dist.all_to_all(pieces := empties(size), [lay(own + rank) for rank in range(size)], group=group)
        check("all_to_all", pieces, [inputs[rank] + place for rank in range(size)])
        (received,) = empties(1)
        sending = dist.isend(lay(own), group=group, group_dst=(place + 1) % size)
        dist.recv(received, group=group, group_src=(place - 1) % size)
        assert sending is not None
        sending.wait()
        check("send and recv", received, inputs[(place - 1) % size])
    negated = torch.complex(inputs, inputs)[place].conj().imag
    assert negated.is_neg()
    dist.all_reduce(negated, group=group)
    if not torch.equal(negated.resolve_neg(), -inputs.sum(0)):
        wrong.append(("all_reduce", "a negative view"))
    plain, negative = torch.zeros(SHAPE), torch._neg_view(torch.zeros(SHAPE))
    for sent, received in ((torch._neg_view(data(place)), plain), (data(place), negative)):
        sending = dist.isend(sent, group=group, group_dst=(place + 1) % size)
        dist.recv(received, group=group, group_src=(place - 1) % size)
        assert sending is not None
        sending.wait()
    before = inputs[(place - 1) % size]
    if not (torch.equal(plain, -before) and torch.equal(negative.resolve_neg(), before)):
        wrong.append(("send and recv", "a negative view"))
    return wrong


def all_groups(world: Any) -> list[tuple[str, str]]:
    return wrong_cases(world, [0, 1, 2, 3]) + wrong_cases(world, [1, 2, 3])


@pytest.mark.parametrize(
    ("islands", "staged"),
    [
        pytest.param([[0], [1, 2, 3]], [], id="native, and over islands"),
        pytest.param([[0, 1, 2, 3]], [], id="native"),
        pytest.param([[0, 2], [1], [3]], [0, 1, 2], id="staged"),
    ],
)
def test_every_layout_gives_the_plain_result(islands: list[list[int]], staged: list[int]) -> None:
    for wrong in run_ranks(4, all_groups, islands=islands, staged_ranks=staged):
        assert wrong == []


def column_of_a_row(value: float, size: int) -> Tensor:
    """One element, or none, of a stride that is not 1."""
    return torch.full((1, 3), float(value))[:size, 0]


def single_elements(world: Any) -> list[str]:
    """The operations whose result was not the plain one, on tensors of one or no element."""
    rank, world_size = world.rank, world.size
    wrong: list[str] = []

    def check(name: str, found: list[Tensor], expected: list[float], size: int) -> None:
        if [each.tolist() for each in found] != [[value] * size for value in expected]:
            wrong.append(f"{name} of {size}: {found}")

    everybody = [float(other) for other in range(world_size)]
    for size in (1, 0):

        def columns(values: list[float], size: int = size) -> list[Tensor]:
            return [column_of_a_row(value, size) for value in values]

        (own,), (taken,) = columns([rank]), columns([-1.0])
        dist.all_reduce(own)
        check("all_reduce", [own], [sum(everybody)], size)
        (own,) = columns([rank])
        dist.broadcast(own, 1)
        check("broadcast", [own], [1.0], size)
        dist.all_gather(places := columns([-1.0] * world_size), *columns([rank]))
        check("all_gather", places, everybody, size)
        dist.all_to_all(places := columns([-1.0] * world_size), columns([rank] * world_size))
        check("all_to_all", places, everybody, size)
        dist.reduce_scatter(taken, columns(everybody))
        check("reduce_scatter", [taken], [float(world_size * rank)], size)
        dist.scatter(taken, columns(everybody) if rank == 0 else None, 0)
        check("scatter", [taken], [float(rank)], size)
        dist.gather(*columns([rank]), places := columns([-1.0] * world_size) if rank == 2 else None, 2)
        check("gather", places or [], everybody if rank == 2 else [], size)
        works = [world.send(*columns([rank]), (rank + 1) % world_size)]
        works.append(world.receive(taken, (rank - 1) % world_size))
        for work in works:
            work.wait()
        check("message", [taken], [float((rank - 1) % world_size)], size)
    return wrong


@pytest.mark.parametrize("relay", ["gloo", "shm"])
@pytest.mark.parametrize("staged", [[], [0, 2], [0, 1, 2]])
def test_one_element_may_have_any_stride(relay: str, staged: list[int]) -> None:
    for wrong in run_ranks(3, single_elements, islands=[[0, 2], [1]], staged_ranks=staged, relay=relay):
        assert wrong == []


def stacked_parts(world: Any) -> list[str]:
    """The reduce-scatters whose part was not the plain one: torch takes the parts joined or stacked, of any dimensions."""
    wrong, size = [], world.size
    for shape in ((), (1,), (3,), (1, 4), (2, 3), (0,)):
        inputs = [torch.arange(float(size * Size(shape).numel())).view(size, *shape) + rank for rank in range(size)]
        expected = sum(inputs)[world.rank]
        for name, given in (("stacked", inputs[world.rank]), ("flat", inputs[world.rank].flatten())):
            for lay in (Tensor.clone, lambda values: torch.stack([values, values], -1)[..., 0]):
                part = torch.full(shape, -1.0)
                dist.reduce_scatter_tensor(part, lay(given))
                both = [torch.full(shape, -1.0) for _ in range(2)]
                with dist._coalescing_manager():
                    for each in both:
                        dist.reduce_scatter_tensor(each, lay(given))
                wrong += [f"{name} {shape}" for found in (part, *both) if not torch.equal(found, expected)]
    return wrong


@pytest.mark.parametrize("islands", [[[0, 1]], [[0], [1]]])
def test_a_reduce_scatter_takes_its_parts_joined_or_stacked(islands: list[list[int]]) -> None:
    for wrong in run_ranks(2, stacked_parts, islands=islands):
        assert wrong == []


def stacked_wholes(world: Any) -> list[str]:
    """The all-gathers whose whole was not the plain one: torch gives the parts joined or stacked, of any dimensions."""
    wrong, size = [], world.size
    for shape in ((), (1,), (3,), (1, 4), (2, 3), (0,)):
        expected = torch.arange(float(size * Size(shape).numel())).view(size, *shape)
        for name, whole_shape in (("stacked", expected.shape), ("flat", (expected.numel(),))):
            for lay in (Tensor.clone, lambda values: torch.stack([values, values], -1)[..., 0]):
                places = [lay(torch.full(whole_shape, -1.0)) for _ in range(3)]
                dist.all_gather_into_tensor(places[0], lay(expected[world.rank]))
                with dist._coalescing_manager():
                    for place in places[1:]:
                        dist.all_gather_into_tensor(place, lay(expected[world.rank]))
                wrong += [f"{name} {shape}" for found in places if not torch.equal(found, expected.view(whole_shape))]
    return wrong


@pytest.mark.parametrize("islands", [[[0, 1]], [[0], [1]]])
def test_an_all_gather_gives_its_parts_joined_or_stacked(islands: list[list[int]]) -> None:
    for wrong in run_ranks(2, stacked_wholes, islands=islands):
        assert wrong == []


def refuse_strangers(world: Any) -> float:
    """The sum behind messages to and from ranks that the group does not have."""
    for stranger in (-1, 2):
        with pytest.raises(BadInput, match=f"send was given rank {stranger} of the group, whose ranks are 0 to 1"):
            dist.isend(torch.ones(3), group_dst=stranger)
        with pytest.raises(BadInput, match=f"recv was given rank {stranger} of the group, whose ranks are 0 to 1"):
            dist.irecv(torch.ones(3), group_src=stranger)
    dist.all_reduce(tensor := torch.ones(3))
    return float(tensor[0])


def test_messages_of_ranks_that_a_group_does_not_have_are_refused() -> None:
    """Gloo waits for their addresses until the timeout, or ends the process."""
    assert run_ranks(2, refuse_strangers, islands=[[0, 1]], timeout_seconds=30) == [2.0, 2.0]


class Library:
    """What NCCL does with messages, on the host: gathered ones have no Work and come at the end."""

    def __init__(self) -> None:
        self.posted: list[Tensor] = []
        self.gathers = False

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.posted += tensors
        return None

    def begin(self, device: torch.device) -> None:
        self.gathers = True

    def end(self, device: torch.device) -> Any:
        return Arrived(self.posted)


class Arrived:
    """The Work of all that was gathered: `wait` brings it."""

    def __init__(self, places: list[Tensor]) -> None:
        self.places = places

    def wait(self) -> None:
        for place in self.places:
            place.fill_(7)


class OfNccl:
    """A Work of NCCL: `isSuccess` is gone, `wait` raises what has failed."""

    def __init__(self, place: Tensor, *, fails: bool) -> None:
        self.place, self.fails, self.done = place, fails, False

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self) -> None:
        if self.fails:
            raise dist.DistBackendError("NCCL error")
        self.place.fill_(7)


@pytest.mark.parametrize("fails", [False, True])
def test_an_operation_of_nccl_is_asked_whether_it_is_done(fails: bool) -> None:
    place, column = torch.zeros(4), torch.zeros(4, 3)[:, 2]
    library = OfNccl(place, fails=fails)
    work = native.CopiedBack(library, [(column, place)])
    assert (work.is_completed(), work.is_success()) == (False, False)
    library.done = True
    assert (work.is_completed(), work.is_success()) == (True, not fails)
    assert column.tolist() == [0.0 if fails else 7.0] * 4


def test_gathered_messages_land_where_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's batch_isend_irecv calls a group over NCCL: it drops what each receive returns."""
    library, device = Library(), torch.device("cuda")
    monkeypatch.setattr(native, "_ours", {library: lambda tensors: contextlib.nullcontext()})
    begin, end = native.begun_gathering(Library.begin), native.ended_gathering(Library.end)
    receive = native.watched("recv", Library.recv, "w")
    column, plain = torch.zeros(4, 3)[:, 2], torch.zeros(4)
    begin(library, device)
    receive(library, [column], 1, 0)
    receive(library, [plain], 1, 0)
    end(library, device).wait()
    assert column.tolist() == plain.tolist() == [7.0] * 4
    library.posted = []
    begin(library, device)
    receive(library, [plain], 1, 0)
    assert isinstance(end(library, device), Arrived)  # nothing to copy, nothing of ours in between


def test_what_has_no_work_is_copied_back_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns none for `async_op=False`: its collective is ordered on the caller's stream by then."""
    group = Library()
    monkeypatch.setattr(native, "_ours", {group: lambda tensors: contextlib.nullcontext()})

    def all_reduce(self: Library, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(3)

    column = torch.ones(4, 3)[:, 2]
    assert native.watched("allreduce", all_reduce, "w")(group, [column]) is None
    assert column.tolist() == [3.0] * 4


class Derived(dist.ProcessGroup):
    """A group of somebody else's that derives from torch's in Python and overrides nothing."""


def other_groups(world: Any) -> bool:
    """What this library does to torch's class leaves the groups of others as they are."""
    plain = dist.new_group([0, 1], backend="gloo")
    assert plain is not None
    derived = Derived(world.rank, 2)
    derived._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, plain._get_backend(torch.device("cpu"))
    )
    derived._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    # The derived one first, and once: torch calls what it wraps with the GIL held, and Gloo's threads want that to end the
    # operation before (torch 2.13 waits for itself so in one process of ten that calls it some hundred times).
    for group in (derived, plain):
        tensor = torch.ones(3) + world.rank
        group.allreduce([tensor]).wait()
        assert (tensor == 3).all()
    return True


def test_groups_of_others_are_left_alone() -> None:
    assert all(run_ranks(2, other_groups))
