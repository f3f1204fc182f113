"""torch.distributed.pipelining as the oracle of our schedules on uniform layouts: the order it runs, loss and norm."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hethub.spec.layout.execution import actions
from hethub.spec.ranges import Range
from tests.support.layouts import MODEL, Case, chunked, random_tokens, replica, train
from tests.support.plain_llama import PlainLlama
from tests.support.ranks import run_ranks, start_ranks, values

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}
Order = list[tuple[str, int, int]]  # what, chunk, microbatch


class RecordingStage(PipelineStage):
    """A pipeline stage that notes what it is told to run."""

    def __init__(self, order: Order, chunk: int, *args: Any) -> None:
        super().__init__(*args)
        self.order, self.chunk = order, chunk

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.order.append(("forward", self.chunk, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.order.append(("backward", self.chunk, bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def torch_step(rank: int, store: dist.Store, case: Case) -> tuple[Order, float, float]:
    """One step by torch's pipelining: this rank's order of actions, the loss it computed, its squared gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.size)
    chunks = [Range(*chunk) for chunk in case.stages[rank]["layers"]]
    own = [PlainLlama(case.model, layers, seed=1) for layers in chunks]
    order: Order = []
    chunks = [
        RecordingStage(order, c, module, c * case.size + rank, len(chunks) * case.size, torch.device("cpu"))
        for c, module in enumerate(own)
    ]
    rows = torch.from_numpy(random_tokens(case).samples(0, case.global_batch, 0, case.global_batch))
    tokens, targets = rows[:, :-1], rows[:, 1:]

    def loss_function(logits: Tensor, target: Tensor) -> Tensor:
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return total / targets.numel()

    count = case.global_batch // case.stages[0]["replicas"][0]["micro_batch"]
    held: Any = chunks if case.schedule == "interleaved" else chunks[0]
    schedule = SCHEDULES[case.schedule](held, count, loss_fn=loss_function, scale_grads=False)
    losses: list[Tensor] = []
    if rank == case.size - 1:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step(*([tokens] if rank == 0 else []))
    square = sum(
        float(weight.grad.square().sum()) for module in own for weight in module.parameters() if weight.grad is not None
    )
    dist.barrier()
    dist.destroy_process_group()
    return order, float(sum(losses)), square


def pipeline(num_stages: int, num_microbatches: int, schedule: str, num_chunks: int = 1) -> Case:
    stages = [
        chunked(
            [(c * num_stages + s, c * num_stages + s + 1) for c in range(num_chunks)],
            replica([s], 2 * num_microbatches, 2),
        )
        for s in range(num_stages)
    ]
    model = MODEL.replace(layers=num_stages * num_chunks)
    return Case(
        name=schedule, stages=stages, schedule=schedule, global_batch=2 * num_microbatches, model=model, steps=1
    )


@pytest.mark.parametrize(
    "case",
    [
        pipeline(2, 4, "1f1b"),
        pipeline(4, 6, "1f1b"),
        pipeline(3, 3, "1f1b"),
        pipeline(3, 4, "gpipe"),
        pipeline(2, 4, "interleaved", 2),
        pipeline(3, 6, "interleaved", 2),
    ],
    ids=lambda case: f"{case.schedule} {case.size} stages",
)
def test_torch_runs_the_same_order_to_the_same_loss(case: Case) -> None:
    theirs = values(start_ranks(case.size, torch_step, case))
    for s, (order, _, _) in enumerate(theirs):
        ours = [
            (str(action.kind), action.chunk, action.microbatch.index)
            for action in actions(case.layout(), s, 0)
            if action.microbatch
        ]
        assert ours == order
    losses, norms, _ = run_ranks(case.size, train, case)[0]
    assert losses[0] == pytest.approx(sum(loss for _, loss, _ in theirs), rel=1e-10)
    assert norms[0] == pytest.approx(math.sqrt(sum(square for _, _, square in theirs)), rel=1e-9)
