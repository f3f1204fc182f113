"""Where the ranks of a job first meet: a store, who they are, and the address each may listen on."""

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hethub.communicator.joining.connection import proof
from hethub.communicator.joining.liveness import Liveness
from hethub.communicator.joining.watch import Watch
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.network import TOKEN_VARIABLE

NEWS_SECONDS = 2.0  # a lost store is often felt before its cause is told
_LEAVE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One rank's place in the world and the store all ranks share.

    `address` is the local address to listen on (the interface the user named; loopback when all ranks are local);
    `token` is a secret only ranks of this job know: connections that cannot prove it are dropped.
    """

    store: dist.Store
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    interface: str | None
    token: str
    launcher: str = "alone"
    finalize: Callable[[], None] | None = None
    """Ends the launcher's own library, when the world has closed cleanly."""
    watch: Watch | None = None
    """Who is alive, where it is known before the ranks connect; else `connect` sees to it."""

    def close(self) -> None:
        """Leaves, where no world has done so."""
        if self.watch is None or self.watch.is_closed:
            return
        if self.finalize is not None and self.watch.liveness.failure is None:
            self.finalize()
        self.watch.close()

    @classmethod
    def on_one_host(cls, store: dist.Store, rank: int, size: int, token: str | None = None) -> "Rendezvous":
        """All ranks on this machine, over loopback; without a token rank 0 draws one."""
        return cls(
            store=store,
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            address="127.0.0.1",
            interface="lo",
            token=agree_on_token(store, rank, token),
        )


def exchanged(store: dist.Store, rank: int, size: int, own: str) -> list[str]:
    """What every rank says, in rank order; `store` is for this alone.

    Rank 0 may serve the store: should it refuse what it has read and end, the others must have read it too. So it
    waits for them, and nobody for it; then it clears the store. Raises RunFailed naming a rank that says nothing within
    the store's timeout, and DistError where the store is gone, or where a rank is before it has read.
    """
    places = [str(other) for other in range(size)]
    store.set(str(rank), own)
    try:
        said = [each.decode() for each in store.multi_get(places)]
    except dist.DistStoreError as error:
        silent, reason = unheard(store, places, error)
        raise RunFailed(f"rank {rank} heard nothing from rank {silent} when the ranks met: {reason}") from None
    _leave(store, size)
    if rank == 0:
        store.get("all-read")
        for key in (*places, "read", "all-read"):  # a launcher's store outlives many worlds
            store.delete_key(key)
    return said


def exchange_last_words(store: dist.Store, rank: int, size: int, own: str) -> None:
    """Do what `exchanged` does for a rank that ends, which need not hear the others nor know whether they are there."""
    with contextlib.suppress(dist.DistError):
        store.set(str(rank), own)
        _leave(store, size)
        if rank == 0:
            store.wait(["all-read"], timedelta(seconds=_LEAVE_SECONDS))


@contextlib.contextmanager
def reaching(
    rank: int, liveness: Liveness | None = None, failures: type[RuntimeError] = RuntimeError
) -> Iterator[None]:
    """The block, whose `failures` become RunFailed: the store is gone, or a rank has not come to what all do, or has gone.
    What has failed is named where that is known. Of a block that does more than to ask a store, failures are DistError; a
    FileStore's own errors are not."""
    try:
        yield
    except RunFailed:
        raise
    except failures as error:
        if liveness is not None:
            liveness.require_whole(NEWS_SECONDS)
        raise RunFailed(f"rank {rank} could not meet the other ranks: {_reason(error)}") from error


def unheard(store: dist.Store, places: Sequence[str], error: Exception) -> tuple[int, str]:
    """Return the first empty one of the places that a store was asked for in vain, or 0 if it does not say, and its reason
    without the names of the places, of which there may be thousands."""
    silent = 0
    with contextlib.suppress(dist.DistError):
        silent = next((number for number, place in enumerate(places) if not store.check([place])), 0)
    return silent, _reason(error)


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, dist.DistError):
        text = text.splitlines()[0]  # behind it comes torch's own stack
    return text.partition(", keys: ")[0]


def _leave(store: dist.Store, size: int) -> None:
    if store.add("read", 1) == size:
        store.set("all-read", "")


def agree_on_token(store: dist.Store, rank: int, given: str | None) -> str:
    """The job's secret: `given`, which the launcher has handed to every rank, else a random one of rank 0.

    A given token never enters the store; rank 0 proves that it has the same, so that no rank takes part in another
    job, or in a stranger's. One that rank 0 draws is as private as the store. Raises BadInput where tokens differ.
    """
    if rank == 0:
        token, nonce = given or secrets.token_hex(16), secrets.token_hex(16)
        public = {"nonce": nonce, "proof": proof(token, nonce, 0)}
        store.set("token", json.dumps(public if given else {**public, "token": token}))
        return token
    record = json.loads(store.get("token"))
    token = given or record.get("token", "")
    if proof(token, record["nonce"], 0) != record["proof"]:
        raise BadInput(
            f"rank {rank} ({socket.gethostname()}) and rank 0 do not have the same {TOKEN_VARIABLE}, the secret that the"
            " ranks of one job share: they were started by different commands. Start all ranks with one `hethub launch`,"
            f" or set {TOKEN_VARIABLE} to the same value for all of them."
        )
    return str(token)
