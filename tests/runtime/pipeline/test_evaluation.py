"""The loss on held-out samples is that of one process under every plan, and training does not notice it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hethub.runtime.data import Dataset
from hethub.spec.ranges import Range
from tests.support.layouts import MODEL, Case, build_trainer, chunked, random_tokens, replica, stage
from tests.support.plain_llama import PlainLlama
from tests.support.ranks import run_ranks

BATCHES = 3
EVERYTHING_OFF = {"offload": ["parameters", "optimizer", "activations"]}

CASES = [
    Case(name="tp2 beside dp", stages=[stage((0, 4), replica([0, 1], 5, 2), replica([2], 3), zero=1)], vendors="nna"),
    Case(
        name="zero 3, layered, offloaded",
        stages=[stage((0, 4), replica([0], 5, 2), replica([1], 3), zero=3, **EVERYTHING_OFF)],
        schedule="layered",
    ),
    Case(
        name="zero 2 and 1, tied head over two stages, recompute",
        stages=[
            stage((0, 2), replica([0], 6, 2), replica([1], 2), zero=2, recompute="full"),
            stage((2, 4), replica([2, 3], 8, 2), zero=1, recompute="selective"),
        ],
        model=MODEL.replace(tied_head=True),
    ),
    Case(
        name="ministages, which step late",
        stages=[chunked([(0, 1), (1, 2), (2, 4)], replica([0], 5, 2), replica([1], 3), zero=3)],
        schedule="ministages",
    ),
    Case(
        name="zero 3 in rounds, two of them without a microbatch on rank 1",
        stages=[stage((0, 4), replica([0], 6, 2), replica([1], 2, 2), zero=3)],
    ),
    Case(
        name="rank 0 unused",
        stages=[stage((0, 2), replica([1], 8, 2)), stage((2, 4), replica([2], 8, 2))],
        unused=(0,),
    ),
    Case(
        name="interleaved",
        stages=[chunked([(0, 1), (2, 3)], replica([0], 8, 2)), chunked([(1, 2), (3, 4)], replica([1], 8, 2))],
        schedule="interleaved",
    ),
    Case(
        name="zero bubble, document mask",
        stages=[stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 4))],
        schedule="zero_bubble",
        document_mask=True,
    ),
]


def held_out(case: Case) -> Dataset:
    """Other samples than the training's, some of whose targets count for nothing."""
    (stream,) = random_tokens(case).streams
    random = np.random.default_rng(9)
    tokens = random.integers(0, case.model.vocab, 4000)
    return Dataset([replace(stream, tokens=tokens, trained=random.integers(0, 2, 4000))])


def evaluate(world: Any, case: Case) -> tuple[list[float], list[float]]:
    """Held-out losses before, between and behind two steps, and the steps' own."""
    trainer = build_trainer(world, case)
    samples = held_out(case)
    found, losses = [trainer.evaluate(samples, BATCHES)], []
    for step in (1, 2):
        losses.append(trainer.run_step(step).loss)
        found.append(trainer.evaluate(samples, BATCHES))
    return found, losses


def train_alone(world: Any, case: Case) -> list[float]:
    trainer = build_trainer(world, case)
    return [trainer.run_step(step).loss for step in (1, 2)]


def plain_loss(case: Case) -> float:
    """What autograd's own Llama says of the untrained model."""
    model = PlainLlama(case.model, Range(0, case.model.layers), 1)
    total, count = 0.0, 0
    for number in range(BATCHES):
        inputs, targets = map(torch.from_numpy, held_out(case).batch(number, case.global_batch, 0, case.global_batch))
        with torch.no_grad():
            logits = model(inputs)
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_plan_has_the_held_out_loss_of_one_process(case: Case) -> None:
    ((expected, _),) = run_ranks(1, evaluate, case.alone())
    (untouched,) = run_ranks(1, train_alone, case.alone())
    results = run_ranks(case.size, evaluate, case, islands=case.islands, timeout_seconds=120)
    for found, losses in results:
        assert found == pytest.approx(expected, rel=1e-10)
        assert losses == pytest.approx(untouched, rel=1e-10)
    assert len(set(expected)) == 3  # it moves with the weights
    if not case.document_mask:
        assert expected[0] == pytest.approx(plain_loss(case), rel=1e-10)
