"""What a process listens on, as the kernel tells it."""

import ipaddress
import os
import socket
import struct
from pathlib import Path

_LISTEN = "0A"


def listening_addresses(process: int | str = "self") -> set[str]:
    """The addresses on which `process` accepts TCP connections (0.0.0.0 or :: for every interface)."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            own.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == _LISTEN and words[9] in own:
                found.add(_address(words[1].split(":")[0]))
    return found


def _address(text: str) -> str:
    """The kernel's hexadecimal words of host byte order as an address."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return str(ipaddress.ip_address(socket.inet_ntop(family, packed)))
