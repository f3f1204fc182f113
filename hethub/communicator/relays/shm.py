"""The `shm` relay: messages between ranks of one host through shared memory, with a socket as the doorbell.

Payloads lie in blocks of anonymous memory (memfd) whose descriptors are passed over a Unix socket, so nothing has a
name that could outlive the processes. The sender copies a message into a free block and rings; the receiver reads it
in place and returns the block. A sender never has to wait: where no block is free it makes another, and what a full socket
does not take waits in a queue, since a sender that blocked could be what its peer is waiting for. The queue is bounded:
a peer that leaves tens of thousands of messages unread is an error. The kernel closes the socket of a dead peer, which
ends every wait for it.
"""

import array
import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hethub.communicator.relays.relay import CLOSED, OTHER_CALL, Incoming, Outgoing, PeerError, Relay, Transfer, misfit
from hethub.kernels.device import Device

_BELL = struct.Struct("=BQQQ")
_DATA, _FREE, _BLOCK, _INLINE = 1, 2, 3, 4
_INLINE_BYTES = 4096
"""Messages up to this size ride with the bell: no block, and nothing to give back."""
_SMALLEST_BLOCK_BYTES = 64 << 10
_NUM_TAGS = 1 << 31
_MAX_QUEUED = 1 << 16
_RETRY_SECONDS = 1e-3
Found = TypeVar("Found")


class Block:
    """Shared memory of one message at a time, seen by sender and receiver."""

    def __init__(self, number: int, descriptor: int, size: int, device: Device) -> None:
        self.number = number
        self.num_users = 0
        self.num_sent = self.num_read = 0  # messages
        # Python's own mmap would keep a descriptor per block, of which a process has a thousand.
        with torch.inference_mode(False):  # else one that is made under it could be written under it alone
            self.memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
        device.pin(self.memory)

    def view(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[:num_bytes].view(dtype)


class Carried:
    """A short message that came with the bell."""

    def __init__(self, payload: bytes) -> None:
        self.memory = torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def view(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.view(dtype)


class Sent(Transfer):
    """A message already copied: its tensor may be used again at once. It is the block's last by now; a short one has none."""

    def __init__(self, link: "ShmLink", block: Block | None) -> None:
        self._link, self._block = link, block
        self._number = block.num_sent if block else 0

    def wait(self) -> None:
        return None

    def wait_until_read(self) -> None:
        if (block := self._block) is not None:
            self._link.until(lambda: block.num_read >= self._number or None)


class ShmLink:
    """The connection to one peer: its blocks for our messages, our blocks for its."""

    def __init__(self, sock: socket.socket, peer: int, device: Device, leaving_seconds: float = 0.0) -> None:
        self._socket = sock
        self.peer = peer
        self._device = device
        self._leaving_seconds = leaving_seconds
        self._own_blocks: dict[int, Block] = {}
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._peer_blocks: dict[int, Block] = {}
        self._arrived: dict[tuple[int, int], tuple[Block | Carried, int, int]] = {}
        self._num_expected: dict[int, int] = defaultdict(int)
        self._num_arrived: dict[int, int] = defaultdict(int)
        self._news = threading.Condition(threading.RLock())
        self._is_being_read = False
        self._sending = threading.Lock()
        self._outbox: deque[tuple[bytes, int | None]] = deque()

    def send(self, tensor: torch.Tensor, tag: int) -> Sent:
        source = tensor.view(torch.uint8)
        if source.numel() <= _INLINE_BYTES:
            with self._sending:
                self._send_bell(_BELL.pack(_INLINE, tag, 0, source.numel()), payload=source.numpy())
            return Sent(self, None)
        block = self.take_block(source.numel())
        block.memory[: source.numel()].copy_(source)
        sent = self.ring(block, source.numel(), tag)
        self.release(block)
        return sent

    def take_block(self, num_bytes: int) -> Block:
        """A block to write a message into, in use by the writer until `release`."""
        size = max(_SMALLEST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        self._read_returned_blocks()
        with self._news:
            block = self._free[size].pop() if self._free[size] else None
        block = block or self._make_block(size)
        block.num_users = 1
        return block

    def ring(self, block: Block, num_bytes: int, tag: int) -> Sent:
        """Tells the peer that the block holds a message; it uses the block too from now on."""
        with self._news:
            block.num_users += 1
            block.num_sent += 1
        self._ring(_DATA, tag, block.number, num_bytes)
        return Sent(self, block)

    def release(self, block: Block) -> None:
        """One user less; without users the block is free for the next message."""
        with self._news:
            block.num_users -= 1
            if block.num_users == 0:
                self._free[block.memory.numel()].append(block)

    def expect(self, tag: int) -> int:
        """The number, among all messages with `tag` in whatever call, of the next one not yet expected."""
        tag %= _NUM_TAGS
        with self._news:
            self._num_expected[tag] += 1
            return self._num_expected[tag]

    def take(self, tag: int, number: int) -> tuple[Block | Carried, int, int]:
        """That message, as its block, its size in bytes and its tag with its call; blocks until it is there."""
        return self.until(lambda: self._arrived.pop((tag % _NUM_TAGS, number), None))

    def until(self, found: Callable[[], Found | None]) -> Found:
        """What `found` gives once the peer has told what it waits for.

        Whichever thread finds nobody reading the socket reads it, and hands what it finds to the others: so there is
        no thread that only reads, and a lone waiter is woken by the kernel itself.
        """
        while True:
            with self._news:
                if (what := found()) is not None:
                    return what
                if self._is_being_read:
                    self._news.wait()
                    continue
                self._is_being_read = True
            try:
                self._read_one()
            finally:
                with self._news:
                    self._is_being_read = False
                    self._news.notify_all()

    def give_back(self, block: Block | Carried) -> None:
        if isinstance(block, Block):
            with contextlib.suppress(PeerError):  # a peer that has left after its last message needs no block back
                self._ring(_FREE, 0, block.number, 0)

    def abort(self) -> None:
        """Ends every wait on this link."""
        with contextlib.suppress(OSError):  # the peer may have closed it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket and this side of the memory, when nobody waits any more. Its sender takes a message that is queued
        for one that has left: the peer is waited for, `leaving_seconds` at most, until it has made room on the socket."""
        deadline = time.monotonic() + self._leaving_seconds
        while self._has_messages_queued() and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        self.abort()
        self._socket.close()
        for block in [*self._own_blocks.values(), *self._peer_blocks.values()]:
            self._device.unpin(block.memory)
        self._own_blocks.clear()
        self._peer_blocks.clear()
        self._free.clear()

    def _make_block(self, size: int) -> Block:
        descriptor = os.memfd_create("hethub", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            with self._sending:
                number = len(self._own_blocks)
                block = Block(number, descriptor, size, self._device)
                self._own_blocks[number] = block
                self._send_bell(_BELL.pack(_BLOCK, 0, number, size), descriptor)
        finally:
            os.close(descriptor)
        return block

    def _ring(self, kind: int, tag: int, number: int, num_bytes: int) -> None:
        with self._sending:
            self._send_bell(_BELL.pack(kind, tag, number, num_bytes))

    def _send_bell(self, bell: bytes, descriptor: int | None = None, payload: Any = b"") -> None:
        """Sends, or queues what the socket does not take now; `_sending` is held."""
        if not self._outbox:
            try:
                self._socket.sendmsg([bell, payload], _rights(descriptor), socket.MSG_DONTWAIT)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                    raise PeerError(self.peer, CLOSED) from error
        if len(self._outbox) == _MAX_QUEUED:
            raise PeerError(self.peer, f"has left {_MAX_QUEUED} messages unread")
        self._outbox.append((bell + bytes(payload), None if descriptor is None else os.dup(descriptor)))
        if len(self._outbox) == 1:
            threading.Thread(target=self._empty_outbox, name="hethub-shm-outbox", daemon=True).start()

    def _empty_outbox(self) -> None:
        """Sends what is queued, in order, until nothing is left; everything sent meanwhile joins the queue."""
        left = True
        while left:
            bell, descriptor = self._outbox[0]
            sent = self._send_waiting(bell, descriptor)
            with self._sending:
                done = [self._outbox.popleft()] if sent else list(self._outbox)
                if not sent:
                    self._outbox.clear()  # the connection has ended, as the next sender will find
                left = bool(self._outbox)
            for _, each in done:
                if each is not None:
                    os.close(each)

    def _has_messages_queued(self) -> bool:
        with self._sending:  # a block given back is no message: a peer that has what it wants need not read that
            return any(bell[0] != _FREE for bell, _ in self._outbox)

    def _send_waiting(self, bell: bytes, descriptor: int | None) -> bool:
        """Sends as soon as the socket takes it; False when the connection has ended."""
        while True:
            try:
                self._socket.sendmsg([bell], _rights(descriptor))
                return True
            except OSError as error:
                # The kernel limits descriptors under way between all processes of a user.
                if error.errno != errno.ETOOMANYREFS:
                    return False
                time.sleep(_RETRY_SECONDS)

    def _read_returned_blocks(self) -> None:
        """Takes what is already on the socket, unless another thread is reading it."""
        with self._news:
            if self._is_being_read:
                return
            self._is_being_read = True
        try:
            while self._read_one(socket.MSG_DONTWAIT):
                pass
        finally:
            with self._news:
                self._is_being_read = False
                self._news.notify_all()

    def _receive(self, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        """The next bell; empty when the peer has closed and everything it sent has been read."""
        size = _BELL.size + _INLINE_BYTES
        try:
            return self._socket.recvmsg(size, socket.CMSG_SPACE(4), flags)[:2]
        except ConnectionResetError:
            # The peer closed with bells of ours unread; the kernel says so once, ahead of what the peer sent before.
            return self._socket.recvmsg(size, socket.CMSG_SPACE(4), flags)[:2]

    def _read_one(self, flags: int = 0) -> bool:
        """Reads one bell and files it; False when none is there and `flags` say not to wait."""
        try:
            bell, rights = self._receive(flags)
        except BlockingIOError:
            if flags:
                return False
            raise PeerError(self.peer, "no answer within the timeout") from None
        except OSError as error:
            raise PeerError(self.peer, CLOSED) from error
        if not bell:
            raise PeerError(self.peer, CLOSED)
        kind, tag, number, num_bytes = _BELL.unpack_from(bell)
        with self._news:
            if kind in (_DATA, _INLINE):
                place = self._peer_blocks[number] if kind == _DATA else Carried(bell[_BELL.size :])
                expected = tag % _NUM_TAGS
                self._num_arrived[expected] += 1
                self._arrived[expected, self._num_arrived[expected]] = (place, num_bytes, tag)
            elif kind == _FREE:
                self._own_blocks[number].num_read += 1
                self.release(self._own_blocks[number])
            else:
                self._peer_blocks[number] = _map_block(number, num_bytes, rights, self._device)
        return True


def _rights(descriptor: int | None) -> list[tuple[int, int, Any]]:
    """What passes a descriptor beside a message."""
    return [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


def _map_block(number: int, size: int, rights: list[tuple[int, int, bytes]], device: Device) -> Block:
    (descriptor,) = struct.unpack("i", rights[0][2][:4])
    block = Block(number, descriptor, size, device)
    os.close(descriptor)
    return block


class Borrowed:
    """A message in the sender's block."""

    def __init__(self, link: ShmLink, tag: int, num_elements: int, dtype: torch.dtype) -> None:
        self._link = link
        self._num_bytes = num_elements * dtype.itemsize
        self._tag = tag
        self._number = link.expect(tag)
        self._dtype = dtype

    def wait(self) -> torch.Tensor:
        self._block, num_bytes, tag = self._link.take(self._tag, self._number)
        if num_bytes != self._num_bytes:  # torch would copy one element to many
            raise PeerError(self._link.peer, misfit(num_bytes, self._num_bytes))
        if tag != self._tag:
            raise PeerError(self._link.peer, OTHER_CALL)
        return self._block.view(num_bytes, self._dtype)

    def release(self) -> None:
        self._link.give_back(self._block)


class CopiedOut(Transfer):
    """A message that is copied to its tensor when it is waited for."""

    def __init__(self, incoming: Borrowed, tensor: torch.Tensor) -> None:
        self._incoming = incoming
        self._tensor = tensor

    def wait(self) -> None:
        self._tensor.copy_(self._incoming.wait())
        self._incoming.release()


class Lent:
    """An outgoing message written where the peer reads it."""

    def __init__(self, link: ShmLink, num_elements: int, dtype: torch.dtype) -> None:
        self._link = link
        self._num_bytes = num_elements * dtype.itemsize
        self._block = link.take_block(self._num_bytes)
        self.tensor = self._block.view(self._num_bytes, dtype)

    def send(self, tag: int) -> Transfer:
        return self._link.ring(self._block, self._num_bytes, tag)

    def release(self) -> None:
        self._link.release(self._block)


class ShmRelay(Relay):
    """Any message to a rank of the same host."""

    name = "shm"
    num_tags, num_calls = _NUM_TAGS, 1 << 32

    def __init__(self, links: dict[int, ShmLink]) -> None:
        self._links = links

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._links[peer].send(tensor, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return CopiedOut(Borrowed(self._links[peer], tag, tensor.numel(), tensor.dtype), tensor)

    def expect(self, num_elements: int, dtype: torch.dtype, peer: int, tag: int) -> Incoming:
        return Borrowed(self._links[peer], tag, num_elements, dtype)

    def outgoing(self, num_elements: int, dtype: torch.dtype, peer: int) -> Outgoing:
        if num_elements * dtype.itemsize <= _INLINE_BYTES:
            return super().outgoing(num_elements, dtype, peer)  # rides with the bell
        return Lent(self._links[peer], num_elements, dtype)

    def abort(self) -> None:
        for link in self._links.values():
            link.abort()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
