"""A hub and two ranks of one process."""

import json
import socket

from hethub.communicator.joining.hub import Hub
from hethub.communicator.joining.liveness import Liveness

TOKEN = "the job's secret"


class Job:
    """Two ranks of one process and their hub."""

    def __init__(self, **options):
        self.hub = Hub(address="127.0.0.1", size=2, token=TOKEN, silence_seconds=20, meeting_seconds=60, **options)
        self.ranks = [self.join(rank) for rank in range(2)]
        for rank in self.ranks:
            rank.wait_for_all(20)

    def join(self, rank, token=TOKEN):
        return Liveness(hub_address=("127.0.0.1", self.hub.port), rank=rank, token=token, silence_seconds=20)

    def knock(self):
        """A stranger's connection, and the nonce it was greeted with."""
        stranger = socket.create_connection(("127.0.0.1", self.hub.port), timeout=20)
        return stranger, json.loads(stranger.makefile("rb").readline())["nonce"]

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.hub.close()


def check_alive(job):
    """No failure so far, and one that a rank reports reaches the other: the hub hears and speaks."""
    assert [rank.failure for rank in job.ranks] == [None, None]
    job.ranks[1].report("failed: on purpose")
    assert [str(rank.wait_for_failure(20)) for rank in job.ranks] == ["rank 1 failed: on purpose"] * 2
