"""Stores that end what a test wants ended, between two steps of connecting."""

from collections.abc import Callable

import torch.distributed as dist


class Leaving(dist.Store):
    """The store of a member that goes, as `leave` does, as soon as it has said where it listens."""

    def __init__(self, inner: dist.Store, leave: Callable[[], object]) -> None:
        super().__init__()
        self.inner, self.leave = inner, leave

    def set(self, key, value):
        self.inner.set(key, value)

    def wait(self, *_):
        self.leave()
