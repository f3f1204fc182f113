"""The world of an emulation: real messages and collectives that arrive when the emulated network would deliver them.

Nothing here is used outside emulations. A message is followed by the time at which it is there, told to the receiver
beside it; the members of a collective agree on the time at which all of them have come, and on its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.context import Context
from hethub.communicator.groups import backend
from hethub.communicator.groups.process_group import HethubGroup, Run, Tensors, Words
from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.setup import connecting, make_context
from hethub.communicator.work import HethubWork
from hethub.communicator.world import World
from hethub.kernels.device import Device
from hethub.runtime.emulate.network import EmulatedClock, EmulatedNetwork, Fabric, Transfer
from hethub.spec.errors import BadInput
from hethub.spec.ranges import Range

_STAMP_TAGS = 2**29  # beyond all tags of the runtime's messages

# Operations whose members hand in only their own part of the whole, which is the sum of them.
_BY_PARTS = ("reduce_scatter", "reduce_scatter_by_ranges", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What a rank's emulated communication works with."""

    clock: EmulatedClock
    network: EmulatedNetwork
    fabric: Fabric

    def group(
        self, context: Context, members: Sequence[int], name: str, gloo: torch_private.GlooGroup, timeout_seconds: float
    ) -> "EmulatedGroup":
        """The group of `members`, as the backend makes groups."""
        return EmulatedGroup(self, context, members, name, gloo, timeout_seconds)

    def end_of(self, transfer: Transfer, entered: float) -> float:
        """When something that enters the network at `entered` is there."""
        start = self.fabric.reserve(transfer.interfaces, entered, transfer.hold_seconds * self.clock.scale)
        return start + (transfer.hold_seconds + transfer.latency_seconds) * self.clock.scale


def connect_emulated(
    rendezvous: Rendezvous,
    network: EmulatedNetwork,
    *,
    device: Device,
    islands: Sequence[Sequence[int]],
    relay: str = "auto",
    wire: str = "exact",
    timeout_seconds: float = 120.0,
) -> "EmulatedWorld":
    """The connected world of an emulation; all its ranks are on one host, whose clock they share. Raises BadInput."""
    with connecting(rendezvous):
        if rendezvous.local_size < rendezvous.size:
            raise BadInput(
                f"an emulation runs on one machine, whose clock all ranks share; {rendezvous.local_size} of {rendezvous.size} ranks "
                "were started on this one. Start all of them here."
            )
        context = make_context(
            rendezvous, device=device, islands=islands, relay=relay, wire=wire, timeout_seconds=timeout_seconds
        )
        fabric = Fabric(rendezvous, network.num_interfaces)
        context.emulation = Emulation(clock=EmulatedClock(), network=network, fabric=fabric)
        world = EmulatedWorld(context, backend.init_default_group(context))
    world.barrier()
    return world


class EmulatedWorld(World):
    """A world whose messages, collectives and agreements keep the emulated clock."""

    @property
    def emulation(self) -> Emulation:
        found: Emulation = self._context.emulation
        return found

    @property
    def clock(self) -> EmulatedClock:
        return self.emulation.clock

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> torch_private.WorkBase:
        transfer = self.emulation.network.message(self.rank, dst, tensor.nbytes)
        there = self.emulation.end_of(transfer, self.clock.at)
        stamp = torch.tensor([there], dtype=torch.float64)
        works = [super().send(tensor, dst, tag), super().send(stamp, dst, tag + _STAMP_TAGS)]
        return EmulatedWork(works, self.clock, stamp, delay=-transfer.latency_seconds * self.clock.scale)

    def receive(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch_private.WorkBase:
        stamp = torch.zeros(1, dtype=torch.float64)
        works = [super().receive(tensor, src, tag), super().receive(stamp, src, tag + _STAMP_TAGS)]
        return EmulatedWork(works, self.clock, stamp)

    def all_gather_objects(self, value: Any, patience: timedelta | None = None) -> list[Any]:
        """Gather as any world does. It takes no emulated time, but the clock waits for the last rank."""
        with self.clock.waiting():
            rows = super().all_gather_objects([self.clock.at, value], patience)
        self.clock.advance(max(row[0] for row in rows))
        return [row[1] for row in rows]

    def close(self) -> None:
        super().close()
        self.emulation.fabric.close()


class EmulatedGroup(HethubGroup):
    """A group whose operations end for all members when they would on the emulated network."""

    def __init__(self, emulation: Emulation, *args: Any) -> None:
        super().__init__(*args)
        self._emulation = emulation
        self._free_at = 0.0  # when the operation before ends: a group runs them one at a time
        self._parts: list[int] = []  # that the members own of the next operation by ranges
        context, members, name = args[:3]
        self._stamps = context.gloo_group(f"stamps/{name}", members)
        self._name_of_stamps = f"stamps/{name}"

    def shutdown(self) -> None:
        super().shutdown()
        self.context.release(self._name_of_stamps)

    def reduce_scatter_ranges(
        self, output: torch.Tensor, sources: Tensors, ranges: Sequence[Range], op: Any, name: str
    ) -> HethubWork:
        self._parts = [own.size for own in ranges]
        return super().reduce_scatter_ranges(output, sources, ranges, op, name)

    def all_gather_ranges(self, flat_output: torch.Tensor, ranges: Sequence[Range], name: str) -> HethubWork:
        self._parts = [own.size for own in ranges]
        return super().all_gather_ranges(flat_output, ranges, name)

    def _submit(self, name: str, job: Run, tensors: Tensors, opts: Any = None, chosen: Words | None = None) -> Any:
        parts, self._parts = self._parts, []
        entered, end = self._emulation.clock.at, torch.zeros(1, dtype=torch.float64)
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)

        def timed() -> None:
            job()
            self._agree_on_end(name, entered, num_bytes, parts, end)

        return EmulatedWork([super()._submit(name, timed, tensors, opts, chosen)], self._emulation.clock, end)

    def _agree_on_end(self, name: str, entered: float, num_bytes: int, parts: Sequence[int], end: torch.Tensor) -> None:
        """Writes to `end` when the operation ends: it starts when the last member has come and the one before is over."""
        own = torch.tensor([entered, num_bytes], dtype=torch.float64)
        rows = [torch.empty(2, dtype=torch.float64) for _ in self.members]
        self._stamps.allgather([rows], [own]).wait()
        if self._rank == 0:
            entries, sizes = torch.stack(rows).unbind(1)
            whole = sizes.sum() if name in _BY_PARTS else sizes.max()
            transfer = self._emulation.network.collective(name, self.members, int(whole), parts)
            self._free_at = self._emulation.end_of(transfer, max(self._free_at, float(entries.max())))
            end[0] = self._free_at
        self._stamps.broadcast(end, 0).wait()


class EmulatedWork(torch_private.WorkBase):
    """Operations of an emulation under way: done when they really are, and not before the emulated time in `end`."""

    def __init__(self, works: Sequence[Any], clock: EmulatedClock, end: torch.Tensor, *, delay: float = 0.0) -> None:
        super().__init__()
        self._works, self._clock, self._end, self._delay = works, clock, end, delay

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._clock.waiting():
            for work in self._works:
                work.wait() if timeout is None else work.wait(timeout)
        self._clock.advance(float(self._end) + self._delay)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works) and monotonic() >= float(self._end) + self._delay

    def result(self) -> list[torch.Tensor]:
        return list(self._works[0].result())

    def exception(self) -> Any:
        return self._works[0].exception()
