"""Connects the ranks of one host for the `shm` relay."""

import hmac
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from hethub.communicator.joining.connection import proof
from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.relays.shm import ShmLink, ShmRelay
from hethub.kernels.device import Device

_LOOK_SECONDS = 1.0
_HELLO = struct.Struct("=i64s")
_PEER_CREDENTIALS = struct.Struct("3i")


def host_identity() -> str:
    """Equal for two processes exactly where they can share memory and reach each other's abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def connect_same_host(rendezvous: Rendezvous, hosts: Sequence[str], timeout_seconds: float, device: Device) -> ShmRelay:
    """A relay to every other rank whose entry in `hosts` equals this rank's; all of them call it together.

    Its memory is pinned for `device`.
    """
    rank = rendezvous.rank
    peers = [other for other, host in enumerate(hosts) if host == hosts[rank] and other != rank]
    store = dist.PrefixStore("shm", rendezvous.store)
    links = {}
    # An abstract address has no file that could be left behind; autobind picks a free one.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen(len(hosts))
        listener.settimeout(_LOOK_SECONDS)
        deadline = time.monotonic() + timeout_seconds
        store.set(str(rank), listener.getsockname())
        for peer in [p for p in peers if p < rank]:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(store.get(str(peer)))
            sock.send(_HELLO.pack(rank, proof(rendezvous.token, "shm", rank).encode()))
            links[peer] = ShmLink(_with_timeout(sock, timeout_seconds), peer, device, timeout_seconds)
        while len(links) < len(peers):
            sock = _accepted(listener, rendezvous, deadline)
            admitted = _admitted(sock, rendezvous.token, timeout_seconds)
            if admitted is not None:
                links[admitted] = ShmLink(_with_timeout(sock, timeout_seconds), admitted, device, timeout_seconds)
    store.delete_key(str(rank))  # whoever asks for it has
    return ShmRelay(links)


def _accepted(listener: socket.socket, rendezvous: Rendezvous, deadline: float) -> socket.socket:
    """A new connection. Raises TimeoutError at the deadline, and OSError where a rank has failed: it may never come."""
    while True:
        try:
            return listener.accept()[0]
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
        if rendezvous.watch is not None and rendezvous.watch.liveness.failure is not None:
            raise ConnectionError(str(rendezvous.watch.liveness.failure))


def _admitted(sock: socket.socket, token: str, timeout_seconds: float) -> int | None:
    """The rank behind a new connection; None, and closed, unless it is this user's and knows the token."""
    _with_timeout(sock, min(timeout_seconds, 10.0))
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    if _PEER_CREDENTIALS.unpack(credentials)[1] == os.getuid():
        try:
            hello = sock.recv(_HELLO.size)
        except OSError:  # it says nothing, or has gone: a stranger like any other
            hello = b""
        if len(hello) == _HELLO.size:
            peer, given = _HELLO.unpack(hello)
            if hmac.compare_digest(given, proof(token, "shm", peer).encode()):
                return int(peer)
    sock.close()
    return None


def _with_timeout(sock: socket.socket, seconds: float) -> socket.socket:
    """The socket, blocking, with the kernel's own receive timeout: one system call per message instead of two."""
    whole, part = divmod(seconds, 1)
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))
    return sock
