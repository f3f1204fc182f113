"""This node's network interfaces, the one a job uses, and what may carry bytes between islands."""

import array
import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hethub.spec.errors import BadInput

RelayName = Literal["gloo", "shm", "mpi"]
WireName = Literal["exact", "bf16", "int8", "fp8"]  # how sums of fp32 pass the bridge

TOKEN_VARIABLE = "HETHUB_TOKEN"
"""Where a launcher hands the job's secret to its ranks."""

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # struct ifreq: a name of 16 bytes, then the address, which begins with family and port
_NAME_IT = (
    "Name the job's network as a CIDR in the cluster file (network: 10.0.0.0/16), or in HETHUB_NETWORK for a program"
    " that calls init_process_group itself"
)
_LOOPBACK_NAME = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface and its IPv4 address."""

    name: str | None
    address: str


def interfaces() -> list[Interface]:
    """All IPv4 addresses of this node with their interfaces, which may have several; none where the kernel is not Linux."""
    if sys.platform != "linux":
        return []
    table = _address_table()
    entries = [table[at : at + _ENTRY_BYTES] for at in range(0, len(table), _ENTRY_BYTES)]
    return [
        Interface(name=entry[:16].split(b"\0")[0].decode(), address=socket.inet_ntoa(entry[20:24])) for entry in entries
    ]


def _address_table() -> bytes:
    """What the kernel answers to SIOCGIFCONF: an entry for each IPv4 address."""
    num_entries = 16
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        while True:
            place = array.array("B", bytes(num_entries * _ENTRY_BYTES))
            request = struct.pack("iP", len(place), place.buffer_info()[0])
            used, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
            if used < len(place):
                return place.tobytes()[:used]
            num_entries *= 2  # full: there may be more


def choose_interface(
    network: str | None,
    *,
    is_multi_node: bool,
    available: Sequence[Interface] | None = None,
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> Interface:
    """The interface to listen on.

    With `network`, a CIDR, the one that has an address in it; else loopback when all ranks are on this node; else the
    one the host name resolves to. Raises BadInput where there is none, or where that is loopback and nodes are many.
    """
    here = list(available) if available is not None else interfaces()
    host = socket.gethostname()
    known = ", ".join(f"{i.name} {i.address}" for i in here)
    if network is not None:
        return _in_network(network, here, host, known)
    if not is_multi_node:
        return Interface(name=_LOOPBACK_NAME, address="127.0.0.1")
    try:
        address = resolve(host)
    except OSError as error:
        raise BadInput(
            f"the host name {host} does not resolve ({error}), so other nodes cannot reach it. {_NAME_IT}; this node"
            f" has {known}."
        ) from None
    if ipaddress.ip_address(address).is_loopback:
        raise BadInput(
            f"the host name {host} resolves to {address}, which is loopback: other nodes cannot reach it. {_NAME_IT};"
            f" this node has {known}."
        )
    name = next((interface.name for interface in here if interface.address == address), None)
    return Interface(name=name, address=address)


def cidr(network: str) -> ipaddress.IPv4Network:
    """The network that a CIDR names. Raises BadInput."""
    try:
        wanted = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise BadInput(f"the network {network!r} is not a CIDR; write e.g. 10.0.0.0/16.") from None
    if not isinstance(wanted, ipaddress.IPv4Network):
        raise BadInput(
            f"the network {network!r} is an IPv6 network, and ranks meet and talk over IPv4 alone; name an IPv4 network."
        )
    return wanted


def _in_network(network: str, here: Sequence[Interface], host: str, known: str) -> Interface:
    wanted = cidr(network)
    inside = [interface for interface in here if ipaddress.ip_address(interface.address) in wanted]
    if not inside:
        raise BadInput(
            f"node {host} has no address in the network {network}; it has {known}. Name a network that every node is in."
        )
    return inside[0]
