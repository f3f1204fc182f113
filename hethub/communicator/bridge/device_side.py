"""Collectives of device tensors: the vendor's library inside islands, host memory in between.

Per chunk of a reduction: native reduce-scatter, what this rank tells others encoded for the wire and copied to pinned
memory, exchange with the other islands, arrivals copied to the device and added there; an all-reduce ends with a native
all-gather. An all-gather copies what this rank owns to the host, and what it carries for its island to the device. The
stages of consecutive chunks overlap, and so do both directions: island legs and arithmetic go to the dispatcher's
stream, copies to the host and to the device to a stream each. Only the group's own thread ever waits for them. The
messages are those of host collectives, so other islands may be made of CPUs.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.chunks import Stages, run_pipelined
from hethub.communicator.bridge.collectives import Bridge
from hethub.communicator.bridge.exchange import Exchange, Start, at
from hethub.communicator.bridge.launch_order import Dispatcher, Turn
from hethub.communicator.bridge.links import Stage, wait_for
from hethub.communicator.bridge.routes import Route
from hethub.communicator.bridge.staging import is_plain
from hethub.communicator.bridge.wire import Rounded, Wire
from hethub.communicator.counters import Leg
from hethub.communicator.relays.relay import Transfer
from hethub.kernels.device import Device, Event
from hethub.kernels.reference import TorchKernels
from hethub.spec.ranges import Range, from_sizes

# What NCCL and RCCL add; torch has more types.
_NATIVE_TYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}

Placed = tuple[Range, torch.Tensor]
"""A range of the collective's flat tensor, and its elements on the device."""


class NativeLegs:
    """The island's side of a collective; `native` is its library's group, None for a rank alone in its island.

    Each collective is done when its call returns; tensors are on the device, of any layout.
    """

    def __init__(self, bridge: Bridge, native: Any, device: Device, dispatcher: Dispatcher) -> None:
        self._bridge = bridge
        self.native = native
        self._device = device
        self._dispatcher = dispatcher
        self.streams = dispatcher.stream, device.new_stream(), device.new_stream()
        """What island legs and arithmetic, copies to the host and copies to the device go to."""

    def can_reduce(self, reduction: Reduction) -> bool:
        """Whether the native library knows the operation and the type."""
        return self.native is None or (reduction.is_native and reduction.dtype in _NATIVE_TYPES)

    def can_gather(self, dtype: torch.dtype) -> bool:
        """Whether the native library knows the type."""
        return self.native is None or dtype in _NATIVE_TYPES

    def shutdown(self) -> None:
        """Frees the library's group."""
        if self.native is not None:
            self.native.shutdown()

    def take_turn(self) -> Turn:
        """This operation's place among all that launch legs in this process; taken when it is submitted."""
        return self._dispatcher.take_turn()

    def all_reduce(self, tensor: torch.Tensor, ready: Event, reduction: Reduction, turn: Turn) -> None:
        """`tensor` becomes the reduction over all members."""
        with self._launching(turn, ready):
            flat = reduction.prepared(_flat(tensor))
            self._run(self._reduce_stages(flat, piece, reduction) for piece in self._bridge.chunks_of(flat))
            _write_back(tensor, flat)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        ranges: Sequence[Range],
        out: torch.Tensor,
        ready: Event,
        reduction: Reduction,
        turn: Turn,
    ) -> None:
        """`out` becomes this member's range of the reduction of `tensor`; it may be that very memory."""
        first = ranges[self._bridge.rank].start
        with self._launching(turn, ready):
            flat = reduction.prepared(_flat(tensor))
            result = out.view(-1) if is_plain(out) else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
            self._run(
                self._scatter_stages(flat, pieces, result, first, reduction)
                for pieces in self._bridge.chunks_by_ranges(ranges, flat.itemsize)
            )
            _write_back(out, result)

    def all_gather(
        self, tensor: torch.Tensor, ranges: Sequence[Range], own: torch.Tensor | None, ready: Event, turn: Turn
    ) -> None:
        """Every member's range of `tensor` reaches all members' `tensor`; this one's comes from `own`, if given."""
        with self._launching(turn, ready):
            flat = _flat(tensor)
            if own is not None:
                _sub(flat, ranges[self._bridge.rank]).view(own.shape).copy_(own)
            self._run(
                self._gather_stages(flat, pieces) for pieces in self._bridge.chunks_by_ranges(ranges, flat.itemsize)
            )
            _write_back(tensor, flat)

    @contextlib.contextmanager
    def _launching(self, turn: Turn, ready: Event) -> Iterator[None]:
        """In the operation's turn, on the dispatcher's stream and behind `ready`; waits for what the block submits."""
        self._device.activate()
        stream = self._dispatcher.stream
        with turn, stream.active():
            stream.wait(ready)
            yield
            done = stream.record()
        with self._bridge.clock(Leg.ISLAND_GATHER):
            done.synchronize()

    def _run(self, chunks: Iterator[Stages]) -> None:
        run_pipelined(chunks, self._bridge.lag)

    def _reduce_stages(self, flat: torch.Tensor, whole: Range, reduction: Reduction) -> Iterator[None]:
        route = self._bridge.all_reduce_route(whole)
        with self._bridge.clock(Leg.ISLAND_REDUCE):
            held = self._island_sum(flat, route.held, reduction)
        part = held[0][1]
        yield from self._exchange(held, route, part, reduction)
        with self._bridge.clock(Leg.ISLAND_GATHER):
            self._island_gather(flat, route.held, part)
        yield

    def _scatter_stages(
        self, flat: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor, first: int, reduction: Reduction
    ) -> Iterator[None]:
        route = self._bridge.reduce_scatter_route(ranges)
        with self._bridge.clock(Leg.ISLAND_REDUCE):
            held = self._island_sum(flat, route.held, reduction)
        yield from self._exchange(held, route, _sub(out, route.mine.shift(-first)), reduction)
        yield

    def _exchange(self, held: list[Placed], route: Route, out: torch.Tensor, reduction: Reduction) -> Iterator[None]:
        side = self._side(held, route.mine, out)
        return Exchange(route=route, side=side, reduction=reduction).stages()

    def _gather_stages(self, flat: torch.Tensor, ranges: Sequence[Range]) -> Iterator[None]:
        bridge = self._bridge
        route = bridge.gather_route(ranges)
        side = self._side([], Range(0, 0), flat)
        wire = Rounded(flat.dtype, TorchKernels())
        arrivals = [(piece, side.expect(piece.size, wire, peer, Stage.EXCHANGE)) for peer, piece in route.expected]
        starts = [side.send(_sub(flat, piece), peer, Stage.EXCHANGE) for peer, piece in route.sent]
        yield
        sends = [start() for start in starts]
        yield
        for piece, message in arrivals:
            _sub(flat, piece).copy_(message.wait())
        with bridge.clock(Leg.ISLAND_GATHER):
            self._island_gather(flat, route.held)
        yield
        with bridge.clock(Leg.WIRE):
            wait_for(sends)

    def _side(self, held: list[Placed], mine: Range, out: torch.Tensor) -> "DeviceSide":
        return DeviceSide(self, self._bridge, self._device, held, mine, out)

    def _island_sum(self, flat: torch.Tensor, held: Sequence[Sequence[Range]], reduction: Reduction) -> list[Placed]:
        """The island's sums of all that this rank holds of them, by one native reduce-scatter.

        The library knows equal parts only, so each member's pieces are joined and padded to the size of the longest.
        """
        pieces = held[self._bridge.rank]
        if self.native is None:
            return [(piece, _sub(flat, piece)) for piece in pieces]
        size = max(_size(held[rank]) for rank in self._bridge.home)
        part = torch.empty(size, dtype=flat.dtype, device=flat.device)
        if size:
            joined = _joined(flat, [held[rank] for rank in self._bridge.home], size)
            torch_private.native_reduce_scatter(self.native, part, joined, reduction.native_op)
        return [
            (piece, _sub(part, place))
            for piece, place in zip(pieces, from_sizes([piece.size for piece in pieces]), strict=True)
        ]

    def _island_gather(
        self, flat: torch.Tensor, held: Sequence[Sequence[Range]], part: torch.Tensor | None = None
    ) -> None:
        """Writes what each of the island holds to its place in `flat`; this rank's is there already, or in `part`."""
        home = self._bridge.home
        size = max(_size(held[rank]) for rank in home)
        if self.native is None or not size:
            return
        if part is None or part.numel() < size:
            own = torch.zeros(size, dtype=flat.dtype, device=flat.device)
            sources = [_sub(flat, piece) for piece in held[self._bridge.rank]] if part is None else [part]
            for at_own, source in zip(from_sizes([source.numel() for source in sources]), sources, strict=True):
                _sub(own, at_own).copy_(source)
            part = own
        whole = torch.empty(size * len(home), dtype=flat.dtype, device=flat.device)
        torch_private.native_all_gather(self.native, whole, part)
        for place, rank in enumerate(home):
            start = place * size
            for piece in held[rank]:
                _sub(flat, piece).copy_(whole[start : start + piece.size])
                start += piece.size


def _size(pieces: Sequence[Range]) -> int:
    return sum(piece.size for piece in pieces)


def _sub(flat: torch.Tensor, piece: Range) -> torch.Tensor:
    return flat[piece.start : piece.stop]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in order: its own memory where that holds them so."""
    return (tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()).view(-1)


def _write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if tensor.data_ptr() != flat.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _joined(flat: torch.Tensor, held: Sequence[Sequence[Range]], size: int) -> torch.Tensor:
    """Each member's pieces, one member after another, padded to `size` each: `flat` itself where it lies so."""
    pieces = [piece for of_member in held for piece in of_member if piece]
    in_order = all(before.stop == after.start for before, after in pairwise(pieces))
    if in_order and all(_size(of_member) == size for of_member in held):
        return _sub(flat, Range(pieces[0].start, pieces[-1].stop))
    joined = torch.zeros(size * len(held), dtype=flat.dtype, device=flat.device)
    for place, of_member in enumerate(held):
        start = place * size
        for piece in of_member:
            joined[start : start + piece.size].copy_(_sub(flat, piece))
            start += piece.size
    return joined


class DeviceSide:
    """One chunk on a device: `held` are the island's sums; the total of `mine` is written to `out`.

    Messages are copied through pinned memory, unless their relay takes the device's.
    """

    copies = True

    def __init__(
        self, legs: NativeLegs, bridge: Bridge, device: Device, held: list[Placed], mine: Range, out: torch.Tensor
    ) -> None:
        self.clock = bridge.clock
        self._links = bridge.links
        self._device = device
        self._main, self._down, self._up = legs.streams
        self._held = held
        self._mine = mine
        self._out = out

    def partial(self, piece: Range, only_reader: int | None) -> torch.Tensor:
        return next(at(tensor, whole, piece) for whole, tensor in self._held if whole.contains(piece))

    def place(self, piece: Range) -> torch.Tensor:
        return at(self._out, self._mine, piece)

    def send(self, message: torch.Tensor, peer: int, stage: Stage) -> Start:
        copied = self._main.record()
        if not self._links.takes_device_memory(peer, message.nbytes):
            host = self._device.host_buffer(message.nbytes).view(message.dtype)
            self._down.wait(copied)
            with self._down.active():
                host.copy_(message, non_blocking=True)
            self._down.keep(message)
            copied, message = self._down.record(), host

        def start() -> Transfer:
            with self.clock(Leg.COPY):
                copied.synchronize()
            return self._links.send(message, peer, stage)

        return start

    def expect(self, num_elements: int, wire: Wire, peer: int, stage: Stage) -> "Uploaded":
        size = wire.num_elements(num_elements)
        if self._links.takes_device_memory(peer, size * wire.dtype.itemsize):
            place = torch.empty(size, dtype=wire.dtype, device=self._device.torch_device)
            self._main.record().synchronize()  # what used this memory before must be done with it
        else:
            place = self._device.host_buffer(size * wire.dtype.itemsize).view(wire.dtype)
        return Uploaded(self, place, self._links.receive(place, peer, stage), wire, num_elements)

    def uploaded(self, message: torch.Tensor) -> torch.Tensor:
        """The message on the device, for what the dispatcher's stream does from here on."""
        with self._up.active():
            near = message.to(self._device.torch_device, non_blocking=True)
            there = self._up.record()
        self._main.wait(there)
        self._main.keep(near)
        return near

    def release(self) -> None:
        return None


class Uploaded:
    """A message that is copied to the device, and decoded there, when it has arrived."""

    def __init__(
        self, side: DeviceSide, message: torch.Tensor, transfer: Transfer, wire: Wire, num_elements: int
    ) -> None:
        self._side = side
        self._message = message
        self._transfer = transfer
        self._wire = wire
        self._num_elements = num_elements

    def wait(self) -> torch.Tensor:
        with self._side.clock(Leg.WIRE):
            self._transfer.wait()
        return self._wire.decode(self._side.uploaded(self._message), self._num_elements)

    def release(self) -> None:
        return None
