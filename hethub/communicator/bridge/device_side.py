"""Collectives of device tensors: the vendor's library inside islands, host memory in between.

Per chunk of a reduction: native reduce-scatter, what this rank tells others encoded for the wire and copied to the
memory that the relay lends, exchange with the other islands, arrivals copied to the device and added there; an
all-reduce ends with a native all-gather. An all-gather copies what this rank owns to the host, and what it carries for
its island to the device. Reduce and broadcast are those whose shares are all one rank's. An all-to-all goes natively
inside the island and chunk by chunk between islands. The stages of consecutive chunks overlap, and so do both
directions: island legs and arithmetic go to the dispatcher's stream, copies to the host and to the device to a stream
each. Only the group's own thread ever waits for them. The messages are those of host collectives, so other islands may
be made of CPUs.

Legs that begin an operation need nothing from the network: they are launched as soon as the operation's turn comes
(`begin_...`), so that what other groups launch behind them does not wait for the network either. Each chunk leaves as
soon as it is launched.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import torch

from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.chunks import Stages, run_pipelined
from hethub.communicator.bridge.collectives import Bridge, Messages
from hethub.communicator.bridge.exchange import Exchange, Start, at
from hethub.communicator.bridge.island_library import IslandLibrary, Placed, Tensors
from hethub.communicator.bridge.launch_order import Dispatcher, Launched, Turn
from hethub.communicator.bridge.links import CopiedDown, Stage, wait_for
from hethub.communicator.bridge.routes import Route
from hethub.communicator.bridge.staging import flat_of, place_for
from hethub.communicator.counters import Leg
from hethub.communicator.relays.relay import Incoming, ReceivedInto, Transfer
from hethub.communicator.work import writing
from hethub.kernels.device import Device, Event
from hethub.spec.ranges import Range, from_sizes

Sums = tuple[Route, list[Placed]]
"""The island's sums of one chunk that this rank holds."""
Begun = TypeVar("Begun")


class NativeLegs:
    """The island's side of a collective.

    Each collective is done when its call returns; tensors are on the device, of any layout.
    """

    def __init__(self, bridge: Bridge, library: IslandLibrary, device: Device, dispatcher: Dispatcher) -> None:
        self._bridge = bridge
        self.library = library
        self._device = device
        self._dispatcher = dispatcher
        self.streams = dispatcher.stream, dispatcher.down, dispatcher.up

    def take_turn(self, ready: Event) -> Turn:
        """This operation's place among all that launch legs in this process; taken when it is submitted.

        Between members that are each alone in their island there are none to launch. All that the turn is for then is that
        the dispatcher's stream waits for the operations' `ready` in order, so what comes behind does not wait for the network.
        """
        return self._begin(lambda: iter(()), ready) if self._bridge.has_lone_ranks else self._dispatcher.take_turn()

    def all_reduce(self, tensor: torch.Tensor, ready: Event, reduction: Reduction, turn: Turn) -> None:
        """`tensor` becomes the reduction over all members."""
        self._bridge.links.call += reduction.mark
        with self._launching(turn, ready):
            flat = reduction.prepared(flat_of(tensor))
            self._run(self._reduce_stages(flat, piece, reduction) for piece in self._bridge.chunks_of(flat))
            _write_back(tensor, flat)

    def begin_reduce_scatter(
        self, sources: Sequence[torch.Tensor], ranges: Sequence[Range], ready: Event, reduction: Reduction
    ) -> Launched[Sums]:
        """The turn, taken now, in which the island's sums of all chunks are launched."""

        def legs() -> Iterator[Sums]:
            flat = reduction.prepared(_joined_flat(sources))
            for pieces in self._bridge.chunks_by_ranges(ranges, flat.itemsize):
                route = self._bridge.reduce_scatter_route(pieces)
                yield route, self.library.sum(flat, route.held, reduction)

        return self._begin(legs, ready)

    def reduce_scatter(self, begun: Launched[Sums], first: int, out: torch.Tensor, reduction: Reduction) -> None:
        """`out` becomes this member's range of the reduction, which begins at `first`; it may be memory of `sources`."""
        self._bridge.links.call += reduction.mark
        with self._working():
            result = place_for(out)
            self._run(self._scatter_stages(*sums, result, first, reduction) for sums in begun.results())
            _write_back(out, result)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        ranges: Sequence[Range],
        own: torch.Tensor | None,
        ready: Event,
        turn: Turn,
    ) -> None:
        """Every member's range of the joined outputs reaches all members' outputs; this one's comes from `own`, if
        given."""
        with self._launching(turn, ready):
            if len(outputs) == 1:
                flat = flat_of(outputs[0])
            else:
                flat = torch.empty(ranges[-1].stop, dtype=outputs[0].dtype, device=outputs[0].device)
            if own is not None:
                _sub(flat, ranges[self._bridge.rank]).view(own.shape).copy_(own)
            self._run(
                self._gather_stages(flat, pieces) for pieces in self._bridge.chunks_by_ranges(ranges, flat.itemsize)
            )
            for output, place in zip(outputs, from_sizes([output.numel() for output in outputs]), strict=True):
                _write_back(output, _sub(flat, place))

    def begin_all_to_all(self, sent: Tensors, received: Tensors, ready: Event) -> Launched[tuple[Tensors, Tensors]]:
        """The turn, taken now, in which what stays in the island is launched: `sent[rank]` to each rank, `received[rank]`
        from each."""

        def legs() -> Iterator[tuple[Tensors, Tensors]]:
            sources = {peer: flat_of(tensor) for peer, tensor in sent.items()}
            places = {peer: place_for(tensor) for peer, tensor in received.items()}
            if self._bridge.rank in places:
                places[self._bridge.rank].copy_(sources[self._bridge.rank])
            self.library.exchange(sources, places)
            yield sources, places

        return self._begin(legs, ready, received.values())

    def all_to_all(self, begun: Launched[tuple[Tensors, Tensors]], received: Tensors) -> None:
        """The rest of it."""
        [(sources, places)] = begun.results()
        foreign = [{peer: of[peer] for peer in of if peer not in self._bridge.home} for of in (sources, places)]
        with self._working():
            self._run(self._move_stages(*pieces) for pieces in self._bridge.chunks_of_messages(*foreign))
            for peer, tensor in received.items():
                _write_back(tensor, places[peer])

    def _begin(
        self, legs: Callable[[], Iterator[Begun]], ready: Event, written: Collection[torch.Tensor] = ()
    ) -> Launched[Begun]:
        stream = self._dispatcher.stream

        def launch() -> Iterator[Begun]:
            self._device.activate()
            with writing(written), stream.active():
                stream.wait(ready)
                yield from legs()

        return self._dispatcher.take_turn_of(launch)

    @contextlib.contextmanager
    def _launching(self, turn: Turn, ready: Event) -> Iterator[None]:
        """In the operation's turn, on the dispatcher's stream and behind `ready`; waits for what the block submits."""
        with self._working(), turn:
            self._dispatcher.stream.wait(ready)
            yield

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """On the dispatcher's stream; waits for what the block submits."""
        self._device.activate()
        with self._dispatcher.stream.active():
            yield
            done = self._dispatcher.stream.record()
        with self._bridge.clock(Leg.ISLAND_GATHER):
            done.synchronize()

    def _run(self, chunks: Iterator[Stages]) -> None:
        run_pipelined(chunks, self._bridge.lag)

    def _reduce_stages(self, flat: torch.Tensor, whole: Range, reduction: Reduction) -> Iterator[None]:
        route = self._bridge.all_reduce_route(whole)
        with self._bridge.clock(Leg.ISLAND_REDUCE):
            held = self.library.sum(flat, route.held, reduction)
        part = held[0][1]
        yield from self._exchange(held, route, part, reduction)
        with self._bridge.clock(Leg.ISLAND_GATHER):
            self.library.gather(flat, route.held, part)
        yield

    def _scatter_stages(
        self, route: Route, held: list[Placed], out: torch.Tensor, first: int, reduction: Reduction
    ) -> Iterator[None]:
        yield from self._exchange(held, route, _sub(out, route.mine.shift(-first)), reduction)
        yield

    def _exchange(self, held: list[Placed], route: Route, out: torch.Tensor, reduction: Reduction) -> Iterator[None]:
        side = self._side(held, route.mine, out)
        return Exchange(route=route, side=side, reduction=reduction).stages()

    def _gather_stages(self, flat: torch.Tensor, ranges: Sequence[Range]) -> Iterator[None]:
        route = self._bridge.gather_route(ranges)
        sent = [(peer, _sub(flat, piece)) for peer, piece in route.sent]
        yield from self._moved(sent, [(peer, _sub(flat, piece)) for peer, piece in route.expected], Stage.EXCHANGE)
        with self._bridge.clock(Leg.ISLAND_GATHER):
            self.library.gather(flat, route.held)
        yield

    def _move_stages(self, sent: Messages, received: Messages) -> Iterator[None]:
        yield from self._moved(sent, received, Stage.DIRECT)
        yield

    def _moved(self, sent: Messages, received: Messages, stage: Stage) -> Iterator[None]:
        """Pieces that leave and arrive as they are."""
        side = self._side([], Range(0, 0), None)
        arrivals = [(place, side.expect(place.numel(), place.dtype, peer, stage)) for peer, place in received]
        starts = [side.send(piece, peer, stage) for peer, piece in sent]
        yield
        sends = [start() for start in starts]
        yield
        with self._bridge.clock(Leg.WIRE):
            for place, message in arrivals:
                place.copy_(message.wait())
            wait_for(sends)
        for _, message in arrivals:
            message.release()

    def _side(self, held: list[Placed], mine: Range, out: torch.Tensor | None) -> "DeviceSide":
        return DeviceSide(self, self._bridge, self._device, held, mine, out)


def _sub(flat: torch.Tensor, piece: Range) -> torch.Tensor:
    return flat[piece.start : piece.stop]


def _joined_flat(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    return flat_of(sources[0]) if len(sources) == 1 else torch.cat([flat_of(source) for source in sources])


def _write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if tensor.data_ptr() != flat.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


class DeviceSide:
    """One chunk on a device: `held` are the island's sums; the total of `mine` is written to `out`.

    Messages are copied through pinned memory, unless their relay takes the device's.
    """

    copies = True

    def __init__(
        self,
        legs: NativeLegs,
        bridge: Bridge,
        device: Device,
        held: list[Placed],
        mine: Range,
        out: torch.Tensor | None,
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
        assert self._out is not None
        return at(self._out, self._mine, piece)

    def send(self, message: torch.Tensor, peer: int, stage: Stage) -> Start:
        ready = self._main.record()
        if self._links.takes_device_memory(peer, message.nbytes):

            def start() -> Transfer:
                with self.clock(Leg.COPY):
                    ready.synchronize()
                return self._links.send(message, peer, stage)

            return start
        return CopiedDown(self._links, message, peer, stage, ready, self._down, self.clock)

    def expect(self, num_elements: int, dtype: torch.dtype, peer: int, stage: Stage) -> Incoming:
        if self._links.takes_device_memory(peer, num_elements * dtype.itemsize):
            with self._up.active():  # its memory is given out again when the main stream is done with it, as kept here
                place = torch.empty(num_elements, dtype=dtype, device=self._device.torch_device)
            self._main.keep(place)
            return ReceivedInto(place, self._links.receive(place, peer, stage))
        return Uploaded(self, self._links.expect(num_elements, dtype, peer, stage))

    def uploaded(self, message: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """The message on the device, for what the dispatcher's stream does from here on, and when it is there."""
        with self._up.active():
            near = message.to(self._device.torch_device, non_blocking=True)
            there = self._up.record()
        self._main.wait(there)
        self._main.keep(near)
        return near, there

    def release(self) -> None:
        return None


class Uploaded:
    """A message that is copied to the device when it has arrived; the relay has its memory back when it has been copied
    from."""

    def __init__(self, side: DeviceSide, incoming: Incoming) -> None:
        self._side = side
        self._incoming = incoming

    def wait(self) -> torch.Tensor:
        near, self._there = self._side.uploaded(self._incoming.wait())
        return near

    def release(self) -> None:
        with self._side.clock(Leg.COPY):
            self._there.synchronize()
        self._incoming.release()
