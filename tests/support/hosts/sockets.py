"""What a process listens on, as the kernel tells it; and ports that nobody else is handed."""

import ipaddress
import itertools
import os
import secrets
import socket
import struct
from pathlib import Path

_LISTEN = "0A"
_PORTS_PER_WORKER = 500
_offsets = itertools.count(secrets.randbelow(_PORTS_PER_WORKER))


def free_port() -> int:
    """A free port of 127.0.0.1 for a program that is told it and listens later.

    It lies below those that the kernel hands out by itself, and tests that run beside this one (pytest-xdist's workers)
    are given others: nobody takes it in between.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 16_000 + worker % 32 * _PORTS_PER_WORKER + next(_offsets) % _PORTS_PER_WORKER
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def listening_addresses(process: int | str = "self") -> set[str]:
    """The addresses on which `process` accepts TCP connections (0.0.0.0 or :: for every interface)."""
    return local_addresses(process)[0]


def local_addresses(process: int | str = "self") -> tuple[set[str], set[str]]:
    """The addresses of this host on which `process` accepts TCP connections, and those that its connections have."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            own.add(target[8:-1])
    listening, connected = set[str](), set[str]()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[9] in own:
                (listening if words[3] == _LISTEN else connected).add(_address(words[1].split(":")[0]))
    return listening, connected


def _address(text: str) -> str:
    """The kernel's hexadecimal words of host byte order as an address."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    found = ipaddress.ip_address(socket.inet_ntop(family, packed))
    return str(getattr(found, "ipv4_mapped", None) or found)  # an IPv4 connection of an IPv6 socket
