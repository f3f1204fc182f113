"""The rows of collectives, messages and their speed: a number that is wrong is told by operation and place."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

import torch
import torch.distributed as dist

from hethub.spec.cluster import ClusterSpec
from tests.support.ranks import run_ranks

DEVICES_AND_CPUS = ClusterSpec.model_validate(
    {
        "name": "mixed",
        "nodes": [
            {"name": "h100", "accelerator": "H100-SXM5-80GB", "accelerators": 2, "gbps_per_nic": 100},
            {"name": "cpu", "accelerator": "CPU-core", "accelerators": 2, "gbps_per_nic": 100},
        ],
    }
)


def exchange_with(wrong: str | None, world: Any) -> list[dict[str, Any]]:
    """The rows of a world whose rank 1 gets one number wrong in one way of communicating, or its own messages back."""
    from hethub.runtime.acceptance import exchange

    broadcast, all_reduce, receive, send = dist.broadcast, dist.all_reduce, world.receive, world.send
    sent: dict[int, torch.Tensor] = {}

    def spoilt(tensor: torch.Tensor, **options: Any) -> Any:
        if options.get("async_op"):  # the large ones
            return broadcast(tensor, **options)
        broadcast(tensor, **options)
        tensor[5] += 1
        return None

    def spoilt_behind_the_first_chunks(tensor: torch.Tensor, **options: Any) -> Any:
        work = all_reduce(tensor, **options)
        if options.get("async_op"):
            work.wait()
            tensor[-1] += 1
        return work

    def received(tensor: torch.Tensor, src: int, tag: int) -> Any:
        receive(tensor, src, tag).wait()
        tensor[-1] += 1
        return SimpleNamespace(wait=lambda: None)

    def noted(tensor: torch.Tensor, target: int, tag: int) -> Any:
        sent[target] = tensor
        return send(tensor, target, tag)

    def echoed(tensor: torch.Tensor, src: int, tag: int) -> Any:
        work = receive(torch.empty_like(tensor), src, tag)
        return SimpleNamespace(wait=lambda: (work.wait(), tensor.copy_(sent[src])))

    if world.rank == 1 and wrong == "broadcast":
        dist.broadcast = spoilt
    if world.rank == 1 and wrong == "large":
        dist.all_reduce = spoilt_behind_the_first_chunks
    exchange.bench.run = lambda *given: []  # times are another test's
    if world.rank == 1 and wrong == "messages":
        world.receive = received
    if world.rank == 1 and wrong == "echoes":
        world.send, world.receive = noted, echoed
    cluster = ClusterSpec.model_validate(
        {"name": "c", "nodes": [{"name": "n", "accelerator": "CPU-core", "accelerators": world.size}]}
    )
    return [row.to_dict() for row in exchange.check_exchange(world, cluster, lambda what: None)]


def exchange_on_rank(world: Any, wrong: str | None) -> list[dict[str, Any]]:
    return exchange_with(wrong, world)


@pytest.mark.parametrize("wrong", [None, "broadcast", "large", "messages"])
def test_a_wrong_number_is_told_by_operation_and_place(wrong: str | None) -> None:
    told = run_ranks(3, exchange_on_rank, wrong, islands=[[0, 1], [2]])
    assert told[0] == told[1] == told[2]
    failed = {(row["what"], row["where"]): row["reason"] for row in told[0] if row["state"] == "fail"}
    expected = {
        None: {},
        "broadcast": {("collectives", place): "wrong: broadcast" for place in ("all islands, bridged", "island 0")},
        "large": {
            ("large collectives", place): "wrong: all_reduce, mean in bf16"
            for place in ("all islands, bridged", "island 0")
        },
        "messages": {("messages", "all ranks"): "wrong: 0 to 1, 2 to 1"},
    }
    assert failed == expected[wrong]


def test_a_rank_that_is_given_its_own_message_back_is_told() -> None:
    """Of two ranks each sent the numbers that it waited for."""
    told = run_ranks(2, exchange_on_rank, "echoes", islands=[[0], [1]])
    failed = {(row["what"], row["where"]): row["reason"] for row in told[0] if row["state"] == "fail"}
    assert failed == {("messages", "all ranks"): "wrong: 0 to 1"}


def test_devices_of_one_island_exchange_messages_without_a_circle() -> None:
    """A message's first use of the library waits for its peer: three ranks that receive first would wait in a ring."""
    told = run_ranks(3, exchange_on_rank, None, islands=[[0, 1, 2]], staged_ranks=range(3), timeout_seconds=60)
    assert all(row["state"] != "fail" for row in told[0])


def bridged_row(world: Any, gpus: list[bool]) -> dict[str, Any]:
    """That of a world whose ranks are these, and whose bridge reaches half of its bound."""
    from hethub.runtime.acceptance import exchange

    reached = {
        "operation": "all_reduce", "path": "world", "ranks": 2, "bytes": 64 << 20, "bytes_per_second": 1e9, "seconds": 2.0,
        "bound_seconds": 1.0,
    }  # fmt: skip
    exchange.bench.run = lambda *given: [reached]
    told = SimpleNamespace(device=world.device, islands=((0,), (1,)), all_gather_objects=lambda value: gpus)
    [row] = exchange._bandwidth(told, None)  # type: ignore[arg-type]
    return row.to_dict()


@pytest.mark.parametrize(("gpus", "state"), [([True, True], "fail"), ([True, False], "note")])
def test_a_bridge_is_held_to_its_bound_between_devices_alone(gpus: list[bool], state: str) -> None:
    """CPUs of the acceptance test have one core each, to move and to add."""
    assert run_ranks(1, bridged_row, gpus)[0]["state"] == state


def island_rows(world: Any) -> list[dict[str, Any]]:
    """Those of two devices and of two CPUs beside them."""
    from hethub.runtime.acceptance import exchange

    row = {
        "operation": "all_reduce",
        "path": "island",
        "ranks": 2,
        "bytes": 64 << 20,
        "seconds": 1.0,
        "bound_seconds": None,
    }
    exchange.bench.run = lambda *given: [{**row, "bytes_per_second": 90e9}, {**row, "bytes_per_second": 2e9}]
    told = SimpleNamespace(
        device=world.device, islands=((0, 1), (2, 3)), all_gather_objects=lambda value: [True, True, False, False]
    )
    return [found.to_dict() for found in exchange._bandwidth(told, DEVICES_AND_CPUS)]  # type: ignore[arg-type]


def test_an_island_is_held_against_its_own_link() -> None:
    """CPUs beside devices were told how little of the devices' link they reach."""
    devices, cpus = run_ranks(1, island_rows)[0]
    assert devices["where"] == "island of ranks 0, 1"
    assert devices["figures"]["share_of_link"] == pytest.approx(0.2)
    assert cpus["where"] == "island of ranks 2, 3"
    assert "share_of_link" not in cpus["figures"]
