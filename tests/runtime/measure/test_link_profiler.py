"""What is reported of links whose speed is known, by a clock that only their messages move."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

import torch

from hethub.runtime.measure import link_profiler
from hethub.runtime.measure.link_profiler import LARGE_BYTES, SMALL_BYTES, measure_links

ISLANDS, MACHINES = ((0, 1, 2), (3,)), (0, 0, 1, 1)
LINKS = {  # a pair, and a group, of each level: who they are, their latency in seconds and their bytes a second
    "in_node": ((0, 1), (0, 1), 1e-6, 50e9),
    "between_nodes": ((0, 2), (0, 1, 2), 1e-5, 10e9),
    "between_islands": ((0, 3), (0, 1, 2, 3), 1e-4, 1e9),
}
SLOWEST = 1.5
"""How many times as long as this rank another takes."""


class KnownWorld:
    """One rank's view. What it is asked for costs time only where the device is waited for."""

    size, islands = 4, ISLANDS

    def __init__(self, rank: int) -> None:
        self.rank, self.seconds, self._pending = rank, 0.0, 0.0
        self.messages: list[tuple[str, int, int]] = []
        self.device = SimpleNamespace(torch_device=torch.device("cpu"), synchronize=self._synchronize)

    def _synchronize(self) -> None:
        self.seconds, self._pending = self.seconds + self._pending, 0.0

    def island_of(self, rank: int) -> int:
        return next(number for number, island in enumerate(ISLANDS) if rank in island)

    def all_gather_objects(self, value: float) -> list[float]:
        return [value, SLOWEST * value, 0.0, 0.0]

    def group(self, members: Sequence[int]) -> Sequence[int]:
        return members

    def _take(self, num_bytes: float, latency: float, rate: float) -> None:
        self._pending += latency + num_bytes / rate

    def _message(self, name: str, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        pair = tuple(sorted((self.rank, peer)))
        ((latency, rate),) = [of for members, _, *of in LINKS.values() if members == pair]
        self.messages.append((name, peer, tag))
        return SimpleNamespace(wait=lambda: self._take(buffer.nbytes, latency, rate))

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        return self._message("send", buffer, peer, tag)

    def receive(self, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        return self._message("receive", buffer, peer, tag)

    def all_reduce(self, buffer: torch.Tensor, group: Sequence[int]) -> None:
        ((latency, rate),) = [of for _, members, *of in LINKS.values() if members == group]
        self._take(2 * buffer.nbytes * (len(group) - 1) / len(group), latency, rate)


def measured(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[KnownWorld, dict[tuple[str, str], Any]]:
    world = KnownWorld(rank)
    monkeypatch.setattr(link_profiler, "perf_counter", lambda: world.seconds)
    monkeypatch.setattr(link_profiler, "dist", SimpleNamespace(all_reduce=world.all_reduce))
    links = measure_links(world, MACHINES)  # type: ignore[arg-type]
    return world, {(link.level, link.operation): link for link in links}


def test_every_level_is_reported_as_fast_as_its_slowest_rank_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, links = measured(0, monkeypatch)
    assert len(links) == 2 * len(LINKS)
    for level, (pair, group, latency, rate) in LINKS.items():
        for operation, members in ("send", pair), ("all_reduce", group):
            small = SMALL_BYTES * (1.0 if operation == "send" else 2 * (len(members) - 1) / len(members))
            link = links[level, operation]
            assert link.ranks == len(members)
            assert link.latency_seconds == pytest.approx(SLOWEST * (latency + small / rate))
            # What a small message takes is no part of a large one's way.
            assert link.gbytes_per_second * (1 - SMALL_BYTES / LARGE_BYTES) == pytest.approx(rate / SLOWEST / 1e9)


def test_a_message_goes_there_and_back_and_ranks_beside_it_only_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = (measured(rank, monkeypatch)[0].messages for rank in (0, 3))
    there, back = ("send", 3, 1), ("receive", 3, 2)
    assert [each for each in first if each[1] == 3] == [there, back] * (len(last) // 2)
    assert set(last) == {("receive", 0, 1), ("send", 0, 2)}
    assert last[:2] == [("receive", 0, 1), ("send", 0, 2)]


def test_a_group_lies_on_the_level_that_it_is_measured_for() -> None:
    """The first island is one rank; the second lies on one machine, as the third does not."""
    islands = (0,), (1, 2), (3, 4, 5)
    machines = [0, 1, 1, 2, 2, 3]
    world = SimpleNamespace(size=6, islands=islands)
    assert link_profiler._groups(world, machines) == {  # type: ignore[arg-type]
        "in_node": (1, 2),
        "between_nodes": (3, 4, 5),
        "between_islands": tuple(range(6)),
    }
