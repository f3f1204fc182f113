"""A message is not held up by another that goes the other way, on a link between two hosts that is slow for both."""

import os

import pytest
import torch

from tests.support.hosts.namespaces import namespaces, why_no_namespaces
from tests.support.hosts.wire import PLANS, meet
from tests.support.ranks import start_ranks, values

LARGE, SMALL = 1_000_000, 1_000  # bytes: at 4 Mbit/s the large one is on the wire for two seconds
TAG = 3


def cross(rank, store, found, way):
    """On the rank to which the large message goes, whether all of that had come before the small one, which this rank
    sends meanwhile, was asked for and gone; None on the other."""
    found.enter(rank)
    world = meet(store, rank, PLANS["pp, two islands"])
    carrier = world if way == "messages" else world._context.relays[1 - rank].carrier(LARGE)
    large, small = torch.full((LARGE,), 1 - rank, dtype=torch.uint8), torch.zeros(SMALL, dtype=torch.uint8)
    if rank == 1:
        arrival = carrier.receive(large, 0, TAG)
        store.set("asked", "1")
        carrier.send(small, 0, TAG).wait()
        came_first = bool(large[-1])
        arrival.wait()
        assert large.all()
    else:
        store.wait(["asked"])
        leaving, came_first = carrier.send(large, 1, TAG), None
        carrier.receive(small, 1, TAG).wait()
        leaving.wait()
    world.barrier()
    world.close()
    return came_first


@pytest.mark.skipif(why_no_namespaces() is not None, reason=f"two hosts: {why_no_namespaces()}")
@pytest.mark.parametrize("way", ["messages", "relay"])
def test_a_receive_is_asked_for_beside_what_leaves(way):
    with namespaces(f"hethub-ways-{os.getpid()}") as found:
        found.set_gbps(0.004)
        assert values(start_ranks(2, cross, found, way, timeout_seconds=60))[1] is False
