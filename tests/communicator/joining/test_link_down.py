"""A link between two hosts goes down in mid-collective: every rank is told, and once it is up again a new world
works."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import Rendezvous, connect
from hethub.communicator.joining.rendezvous import agree_on_token
from hethub.spec.errors import RunFailed
from tests.support.hosts.namespaces import ADDRESSES, namespaces, why_no_namespaces
from tests.support.ranks import start_ranks

TIMEOUT_SECONDS = 8
ISLANDS = [[0, 2], [1, 3]]


def meet(store, name, rank, side):
    meeting = Rendezvous(
        store=dist.PrefixStore(name, store),
        rank=rank,
        size=4,
        local_rank=rank % 2,
        local_size=2,
        address=ADDRESSES[side],
        interface=None,
        token=agree_on_token(dist.PrefixStore(name, store), rank, None),
    )
    return connect(meeting, islands=ISLANDS, timeout_seconds=TIMEOUT_SECONDS)


def lose_the_link(rank, _, found, port):
    """(error, seconds it took, a sum in the world rebuilt after it); ranks 0 and 1 are on one host, 2 and 3 on
    another. They meet in a store that a launcher serves, which the link does not lead to."""
    side = rank // 2
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    found.enter(side)
    world = meet(store, "first", rank, side)
    error, seconds = None, None
    for step in range(1000):
        if step == 3 and rank == 0:
            found.set_link("down")
        start = time.monotonic()
        try:
            dist.all_reduce(torch.ones(500_000))
        except RunFailed as failure:
            error, seconds = str(failure), time.monotonic() - start
            break
    world.close()
    store.add("gave up", 1)
    while store.add("gave up", 0) < 4:
        time.sleep(0.05)
    if rank == 0:
        found.set_link("up")
    second = meet(store, "second", rank, side)
    tensor = torch.full((500_000,), float(rank))
    dist.all_reduce(tensor)
    second.close()
    return error, seconds, tensor[0].item()


def test_a_link_that_goes_down_is_an_error_on_every_rank():
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(f"a link that can be taken down {reason}")
    with namespaces(f"hethub-down-{os.getpid()}") as found:
        launchers = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outcomes = start_ranks(4, lose_the_link, found, launchers.port, timeout_seconds=100)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.traceback
        error, seconds, total = outcome.value
        # Operation, group and this rank; then who is not there any more: a rank of the other host.
        said = re.match(r"all_reduce in group '0' \(ranks 0-3\) failed on rank (\d).*: rank (\d) has stopped", error)
        assert said is not None, error
        assert int(said[1]) == rank
        assert int(said[2]) // 2 != rank // 2
        assert seconds < 2 * TIMEOUT_SECONDS
        assert total == 6.0
