"""Unlike replicas train what a loop in plain PyTorch trains: autograd, torch's AdamW and clipping, float64.

Samples have unlike numbers of tokens that count, attention stays inside documents, the head is tied, the data begin
anew in the middle of a batch, and the run goes on under another plan and another schedule before its warm-up is over.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hethub.runtime.checkpoint import CheckpointManager
from hethub.runtime.data import Dataset
from hethub.runtime.loop.trainer import Trainer
from hethub.spec.job import TrainSpec
from hethub.spec.layout import state
from hethub.spec.ranges import Range
from tests.support.layouts import MODEL, TOLERANCE, Case, chunked, replica, shards, stage, worst_difference
from tests.support.plain_llama import PlainLlama
from tests.support.ranks import run_ranks

TIED = MODEL.replace(tied_head=True)
BATCH, SEQ_LEN, END = 8, 16, 100  # the last token ends a document
STEPS, RESUMED_BEHIND = 6, 3
# None of AdamW's numbers is the default: what is not passed on shows.
FIRST = {"steps": 20, "warmup_steps": 4, "lr": 0.01, "min_lr": 0.001, "grad_clip": 0.5, "betas": (0.8, 0.97), "eps": 1e-6,
         "weight_decay": 0.2}  # fmt: skip
THEN = {**FIRST, "schedule": "linear", "steps": 12}


def case(name: str, *stages: dict[str, Any], **more: Any) -> Case:
    return Case(name=name, stages=list(stages), model=TIED, document_mask=True, **more)


PLANS = [
    case("zero 3 over two makers", stage((0, 4), replica([0], 5, 2), replica([1], 3), zero=3), vendors="an"),
    case(
        "zero 2 and 1, unlike replicas at both ends",
        stage((0, 1), replica([0], 5, 2), replica([1, 2], 3, 3), zero=2, recompute="full"),
        stage((1, 4), replica([3], 7, 3), replica([4], 1), zero=1),
        vendors="annan",
    ),
    case(
        "ministages, all offloaded",
        chunked(
            [(0, 1), (1, 2), (2, 4)],
            replica([0], 6, 2),
            replica([1], 2),
            zero=3,
            offload=["parameters", "optimizer", "activations"],
        ),
        schedule="ministages",
        vendors="an",
    ),
    case(
        "zero bubble",
        stage((0, 2), replica([0], 8, 2)),
        stage((2, 4), replica([1], 8, 1)),
        schedule="zero_bubble",
    ),
]


def conversations() -> Dataset:
    """Twenty windows, so that every third batch holds two epochs; of some hardly a token is learnt, of some all are."""
    random = np.random.default_rng(5)
    tokens = random.integers(0, END + 1, 20 * SEQ_LEN + 1)
    tokens[random.random(len(tokens)) < 0.1] = END
    learnt = random.random(len(tokens)) < np.repeat(random.random(21) ** 3, SEQ_LEN)[: len(tokens)]
    return Dataset.one(
        name="conversations", tokens=tokens, trained=learnt.astype(np.uint8), seq_len=SEQ_LEN, seed=1, vocab=END + 1,
        max_token=END, end_of_document=END, tokenizer="none",
    )  # fmt: skip


def rate(step: int) -> float:
    """Warm-up over four steps, across the resumption; then the straight line that the resumed run asks for."""
    return 0.01 * step / 4 if step <= 4 else 0.001 + 0.009 * (12 - step) / (12 - 4)


def plain() -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, norms before clipping, and weights of the loop."""
    model = PlainLlama(TIED, Range(0, TIED.layers), seed=1)
    norms, matrices = ([w for w in model.parameters() if w.dim() == dim] for dim in (1, 2))
    adamw = torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.2}],
                              betas=(0.8, 0.97), eps=1e-6)  # fmt: skip
    losses, lengths = [], []
    for step in range(1, STEPS + 1):
        inputs, targets = map(torch.from_numpy, conversations().batch(step - 1, BATCH, 0, BATCH))
        ends = (inputs == END).long()
        document = ends.cumsum(1) - ends
        logits = model(inputs, document.unsqueeze(1) == document.unsqueeze(2))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="mean")
        loss.backward()
        losses.append(loss.item())
        lengths.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in adamw.param_groups:
            group["lr"] = rate(step)
        adamw.step()
        adamw.zero_grad()
    return losses, lengths, {name.replace("/", "."): w.detach().numpy() for name, w in model.named_parameters()}


def trainer_of(world: Any, plan: Case, train: dict[str, Any]) -> Trainer:
    state.BUCKET_ELEMENTS = plan.bucket_elements
    torch.set_num_threads(1)
    made = Trainer(plan.layout(), world, conversations(), TrainSpec.model_validate(train), document_mask=True)
    made.initialise()
    return made


def begin(world: Any, plan: Case, folder: Path) -> Any:
    trainer = trainer_of(world, plan, FIRST)
    outcomes = [trainer.run_step(step) for step in range(1, RESUMED_BEHIND + 1)]
    trainer.save(CheckpointManager(folder, 1, world), RESUMED_BEHIND, blocking=True)
    return [(outcome.loss, outcome.grad_norm) for outcome in outcomes]


def go_on(world: Any, plan: Case, folder: Path) -> Any:
    trainer = trainer_of(world, plan, THEN)
    store = CheckpointManager(folder, 1, world)
    assert trainer.restore(store, store.latest()) == RESUMED_BEHIND
    outcomes = [trainer.run_step(step) for step in range(RESUMED_BEHIND + 1, STEPS + 1)]
    return [(outcome.loss, outcome.grad_norm) for outcome in outcomes], shards(trainer)


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    return plain()


@pytest.mark.parametrize(
    ("first", "then"), list(zip(PLANS, [*PLANS[1:], PLANS[0]], strict=True)), ids=lambda plan: plan.name
)
def test_a_run_and_what_goes_on_from_it_are_the_plain_loop(
    first: Case, then: Case, expected: tuple[Any, ...], tmp_path: Path
) -> None:
    begun = run_ranks(first.size, begin, first, tmp_path, islands=first.islands)
    resumed = run_ranks(then.size, go_on, then, tmp_path, islands=then.islands)
    losses, norms, weights = expected
    counts = [conversations().valid_tokens(step, BATCH) for step in range(STEPS)]
    assert len(set(counts)) > 3
    assert min(norms) > 0.5  # every step is clipped
    steps = list(zip(losses, norms, strict=True))
    for own in begun:
        np.testing.assert_allclose(own, steps[:RESUMED_BEHIND], rtol=TOLERANCE)
    for own, _ in resumed:
        np.testing.assert_allclose(own, steps[RESUMED_BEHIND:], rtol=TOLERANCE)
    stored = [
        (name, 0, value.size, (value.T if name.endswith(("o_proj.weight", "down_proj.weight")) else value).reshape(-1))
        for name, value in weights.items()
    ]
    assert worst_difference([held for _, held in resumed], stored) <= TOLERANCE
