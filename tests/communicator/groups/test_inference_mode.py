"""What is made under inference_mode, and parameters, are written to in any thread and at any time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import start_ranks, values

LARGE = 100_000


def evaluate_then_train(rank, store):
    """One element each of sums and gathers under inference_mode, then of a sum outside it."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    found = []
    with torch.inference_mode():
        for async_op in (False, True):
            total, rows = torch.ones(LARGE), torch.zeros(3, 2).t()
            dist.all_reduce(total)
            for work in (
                dist.all_reduce(total, async_op=async_op),
                dist.all_to_all([rows[:, r] for r in range(3)], [torch.full((2,), float(rank))] * 3, async_op=async_op),
            ):
                if async_op:
                    work.wait()
            found += [total[-1].item(), *rows[1].tolist()]
    total = torch.ones(LARGE)
    dist.all_reduce(total)
    received = torch.inference_mode()(torch.zeros)(4, 2).t()
    sending = dist.isend(torch.ones(2, 4), (rank + 1) % 3)
    dist.recv(received, (rank - 1) % 3)
    sending.wait()
    dist.destroy_process_group()
    return [*found, total[-1].item(), received.sum().item()]


@pytest.mark.parametrize("staged", ["", "0,2"])
def test_an_evaluation_under_inference_mode_leaves_training_alone(staged):
    environment = {"HETHUB_ISLANDS": "0,2|1", "HETHUB_STAGED_RANKS": staged}
    expected = [9.0, 0.0, 1.0, 2.0] * 2 + [3.0, 8.0]
    assert values(start_ranks(3, evaluate_then_train, environment=environment, timeout_seconds=60)) == [expected] * 3


def receive_parameters(rank, store):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    found = []
    for parameter in (nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3, 4).t())):
        sending = dist.isend(torch.ones(4, 3), (rank + 1) % 3)
        dist.recv(parameter, (rank - 1) % 3)
        sending.wait()
        found.append(parameter.sum().item())
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("staged", ["", "0,2"])
def test_messages_are_received_into_parameters(staged):
    environment = {"HETHUB_ISLANDS": "0,2|1", "HETHUB_STAGED_RANKS": staged}
    outcomes = start_ranks(3, receive_parameters, environment=environment, timeout_seconds=60)
    assert values(outcomes) == [[12.0, 12.0]] * 3
