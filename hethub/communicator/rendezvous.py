"""Where the ranks of a job first meet: a store, who they are, and the address each may listen on."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist


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

    @classmethod
    def on_one_host(cls, store: dist.Store, rank: int, size: int) -> "Rendezvous":
        """All ranks on this machine, over loopback; rank 0 draws the token."""
        return cls(
            store=store,
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            address="127.0.0.1",
            interface="lo",
            token=share_token(store, rank),
        )


def share_token(store: dist.Store, rank: int) -> str:
    """A random secret of rank 0, the same on all ranks; as private as the store itself."""
    if rank == 0:
        store.set("token", secrets.token_hex(16))
    return str(store.get("token").decode())
