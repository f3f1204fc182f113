"""Connects the relays that a choice needs, and makes the choice where the user leaves it to `auto`."""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.relays.choice import PROBED_BYTES, Carriers, RelayChoice, check_relay, faster_by_size
from hethub.communicator.relays.gloo import GlooRelay, connect_gloo
from hethub.communicator.relays.relay import Relay
from hethub.communicator.relays.shm_connection import connect_same_host
from hethub.communicator.torch_private import GlooGroup
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput

_PROBES = 5
_PROBE_TAG = 0  # groups' tags begin above it


class Connector:
    """Connects each relay once, for all ranks that need it; all ranks call its methods together."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        hosts: Sequence[str],
        device: Device,
        timeout_seconds: float,
        num_lanes: int,
    ) -> None:
        self._rendezvous = rendezvous
        self._hosts = hosts
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._num_lanes = num_lanes
        self._connected: dict[str, Relay] = {}

    @property
    def spans_hosts(self) -> bool:
        return len(set(self._hosts)) > 1

    def choose(self, relay: str, stored: RelayChoice | None) -> RelayChoice:
        """What to use for `relay` as the user names it; a stored choice replaces what `auto` would find anew."""
        check_relay(relay)
        if relay == "shm" and self.spans_hosts:
            raise BadInput(
                "communicator.relay is shm, but the ranks are on several hosts: shared memory joins ranks of one host."
                " Choose auto (shm inside a host, gloo between hosts)."
            )
        if relay != "auto":
            return RelayChoice.always(relay, relay)
        if stored is not None and self._can_connect(stored):
            return stored
        if not self.spans_hosts or not self._has_mpi:
            return RelayChoice.always("shm", "gloo")
        return RelayChoice(near=((0, "shm"),), far=faster_by_size(self._times_between_hosts()))

    def _can_connect(self, stored: RelayChoice) -> bool:
        """Whether this job has what an earlier one used: it may have been started by mpirun, or on one host."""
        near, far = stored.names(far=False), stored.names(far=True)
        return (self._has_mpi or "mpi" not in near | far) and not (self.spans_hosts and "shm" in far)

    def carriers(self, choice: RelayChoice) -> dict[int, Carriers]:
        """The relays to each rank, this one included (a group of one rank asks for them too)."""
        rank = self._rendezvous.rank
        wanted = choice.names(far=False) | (choice.names(far=True) if self.spans_hosts else set())
        relays = {name: self.connected(name) for name in sorted(wanted)}
        return {
            peer: Carriers(choice.near if host == self._hosts[rank] else choice.far, relays)
            for peer, host in enumerate(self._hosts)
        }

    def connected(self, name: str) -> Relay:
        if name not in self._connected:
            self._connected[name] = self._connect(name)
            self._connected[name].device = self._device
        return self._connected[name]

    def _connect(self, name: str) -> Relay:
        return {"gloo": self._gloo, "shm": self._shm, "mpi": self._mpi}[name]()

    def _shm(self) -> Relay:
        return connect_same_host(self._rendezvous, self._hosts, self._timeout_seconds, self._device)

    def _mpi(self) -> Relay:
        from hethub.communicator.relays.mpi import MpiRelay

        return MpiRelay.create(self._rendezvous, self._timeout_seconds, self._device.vendor)

    @property
    def _has_mpi(self) -> bool:
        return self._rendezvous.launcher in ("openmpi", "mpich")

    def _gloo(self) -> GlooRelay:
        world = range(self._rendezvous.size)

        def lanes(way: str) -> list[GlooGroup]:
            names = [f"gloo/relay/{way}/{lane}" for lane in range(self._num_lanes)]
            return [connect_gloo(self._rendezvous, name, world, self._timeout_seconds) for name in names]

        return GlooRelay((lanes("up"), lanes("down")), self._rendezvous.rank, len(world))

    def _times_between_hosts(self) -> Mapping[str, Sequence[float]]:
        """Seconds there and back of each probed size over Gloo and MPI, between the first ranks of two hosts."""
        pair = (0, next(rank for rank, host in enumerate(self._hosts) if host != self._hosts[0]))
        relays = {name: self.connected(name) for name in ("gloo", "mpi")}
        store = dist.PrefixStore("relay-times", self._rendezvous.store)
        if self._rendezvous.rank in pair:
            peer = pair[1] if self._rendezvous.rank == pair[0] else pair[0]
            for name, relay in relays.items():
                for size in PROBED_BYTES:
                    seconds = there_and_back(relay, peer, size, first=self._rendezvous.rank == pair[0])
                    if self._rendezvous.rank == pair[0]:
                        store.set(f"{name}/{size}", str(seconds))
        return {name: [float(store.get(f"{name}/{size}")) for size in PROBED_BYTES] for name in relays}


def there_and_back(relay: Relay, peer: int, num_bytes: int, *, first: bool) -> float:
    """Median seconds of a message to `peer` and one back; the other side calls it with `first` False."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    times = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        arrival = relay.receive(received, peer, _PROBE_TAG)
        if first:
            relay.send(sent, peer, _PROBE_TAG).wait()
            arrival.wait()
        else:
            arrival.wait()
            relay.send(sent, peer, _PROBE_TAG).wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
