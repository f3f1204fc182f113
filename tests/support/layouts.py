"""Named layouts and their training in rank processes, for tests that compare any plan with one process."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from hethub.kernels.bodies import choose
from hethub.kernels.device import choose_device
from hethub.runtime.data import Dataset
from hethub.runtime.loop.trainer import Trainer, TrainingRank
from hethub.runtime.measure.measurement_cache import device_name
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import TrainSpec
from hethub.spec.layout import state
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.ranks import run_ranks

SEQ_LEN, STEPS = 16, 2
MODEL = ModelSpec(
    name="tiny", layers=4, hidden=32, heads=8, kv_heads=4, ffn=48, vocab=101, max_seq_len=64, init_std=0.05
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout by name: its stages as in a plan file and the vendor of each rank."""

    name: str
    stages: list[dict[str, Any]]
    vendors: str = ""  # one letter per rank; empty: all of one vendor
    unused: tuple[int, ...] = ()
    schedule: str = "1f1b"
    global_batch: int = 8
    precision: str = "fp64"
    model: ModelSpec = MODEL
    seq_len: int = SEQ_LEN
    steps: int = STEPS
    document_mask: bool = False
    relay: str = "auto"
    bucket_elements: int = 1 << 12  # half a layer; with the product's all of the model would be one
    one_host: bool = False  # all ranks on one machine, as they are here; else each on its own
    staged: bool = False  # tensors take the ways of a device's
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.unused) + sum(len(replica["ranks"]) for stage in self.stages for replica in stage["replicas"])

    @property
    def islands(self) -> list[list[int]]:
        vendors = self.vendors or "n" * self.size
        return [[rank for rank, own in enumerate(vendors) if own == vendor] for vendor in dict.fromkeys(vendors)]

    def layout(self) -> Layout:
        vendors = self.vendors or "n" * self.size
        nodes = [
            {
                "name": f"node{rank}",
                "accelerator": "CPU-core",
                "accelerators": 1,
                "vendor": f"vendor-{vendor}",
                "gbps_per_nic": 10,
            }
            for rank, vendor in enumerate(vendors)
        ]
        if self.one_host:
            nodes = [{**nodes[0], "accelerators": self.size}]
        cluster = ClusterSpec.model_validate({"name": "test", "nodes": nodes})
        plan = PlanSpec.model_validate(
            {
                "model": self.model.name, "cluster": "test", "global_batch": self.global_batch, "seq_len": self.seq_len,
                "precision": self.precision, "schedule": self.schedule, "stages": self.stages,
                "unused": self.unused,
            }
        )  # fmt: skip
        return bind(plan, self.model, cluster)

    def alone(self) -> "Case":
        """The same training in one process, which compiles nothing."""
        stages = [stage((0, self.model.layers), replica([0], self.global_batch, self.global_batch))]
        return Case(
            name="alone", stages=stages, global_batch=self.global_batch, precision=self.precision, model=self.model,
            seq_len=self.seq_len, steps=self.steps, document_mask=self.document_mask,
            train={key: value for key, value in self.train.items() if key != "compile"},
        )  # fmt: skip


def replica(ranks: list[int], samples: int, micro_batch: int = 1, **more: Any) -> dict[str, Any]:
    return {"ranks": ranks, "samples": samples, "micro_batch": micro_batch, **more}


def stage(layers: tuple[int, int], *replicas: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"layers": [list(layers)], "replicas": list(replicas), **more}


def chunked(chunks: list[tuple[int, int]], *replicas: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"layers": [list(chunk) for chunk in chunks], "replicas": list(replicas), **more}


def random_tokens(case: Case) -> Dataset:
    """Random tokens of the model's vocabulary, its last id ending documents."""
    tokens = np.random.default_rng(0).integers(0, case.model.vocab, 5000)
    return Dataset.one(
        name="random", tokens=tokens, seq_len=case.seq_len, seed=1, vocab=case.model.vocab,
        max_token=case.model.vocab - 1, end_of_document=case.model.vocab - 1, tokenizer="none",
    )  # fmt: skip


def build_trainer(world: Any, case: Case) -> Any:
    """A trainer of this rank with initial weights, or what answers for an unused rank."""
    state.BUCKET_ELEMENTS = case.bucket_elements
    torch.set_num_threads(1)
    train = TrainSpec.model_validate({"steps": 20, "warmup_steps": 2, "lr": 0.01, "min_lr": 0.001, **case.train})
    choose(train.compile)
    if world.rank in case.unused:
        return TrainingRank(case.layout(), world, random_tokens(case), train)
    trainer = Trainer(case.layout(), world, random_tokens(case), train, document_mask=case.document_mask)
    trainer.initialise()
    return trainer


Shards = list[tuple[str, int, int, np.ndarray]]  # tensor name, start, stop, values


def shards(trainer: TrainingRank) -> Shards:
    """Every run of every tensor that this rank keeps, wide enough for numpy."""
    result: Shards = []
    if not isinstance(trainer, Trainer):
        return result
    trainer.stepping.flush()
    for placed, run, values in trainer.storage.persistent():
        values = values.float() if values.dtype == torch.bfloat16 else values
        result.append(
            (placed.info.name, run.start - placed.span.start, run.stop - placed.span.start, values.cpu().numpy().copy())
        )
    return result


def train(
    world: Any, case: Case, before_step: Callable[[int], None] = lambda step: None
) -> tuple[list[float], list[float], Shards]:
    """Losses and gradient norms of the case's steps on this rank, and its weights at the end."""
    trainer, outcomes = build_trainer(world, case), []
    for step in range(1, case.steps + 1):
        before_step(step)
        outcomes.append(trainer.run_step(step))
    norms = [outcome.grad_norm or float("nan") for outcome in outcomes]
    return [outcome.loss for outcome in outcomes], norms, shards(trainer)


def trained(case: Case) -> str:
    """A digest of the losses, gradient norms and weights of all ranks after five steps: bits, for tests/reference."""
    case = replace(case, steps=5)
    results = run_ranks(case.size, train, case, islands=case.islands, timeout_seconds=120)
    return hashlib.sha256(
        b"".join(
            repr((losses, norms)).encode() + b"".join(repr(held[:3]).encode() + held[3].tobytes() for held in shards)
            for losses, norms, shards in results
        )
    ).hexdigest()[:16]


def machine() -> str:
    """What those bits depend on: by the processor, libraries choose how they multiply matrices."""
    processor = device_name(choose_device(0, 1, kind="cpu"))
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


TOLERANCE = 1e-10


def check_against_one_process(case: Case, timeout_seconds: float = 120) -> None:
    """Trains the case; losses and norms of every step and the weights at the end are those of one process."""
    losses, norms, weights = _alone(repr(case.alone()), case)
    staged = range(case.size) if case.staged else ()
    results = run_ranks(
        case.size, train, case, islands=case.islands, staged_ranks=staged, timeout_seconds=timeout_seconds
    )
    for rank_losses, rank_norms, _ in results:
        assert rank_losses == pytest.approx(losses, rel=TOLERANCE)
        assert rank_norms == pytest.approx(norms, rel=TOLERANCE)
    assert len(set(losses)) == case.steps  # it trained
    assert worst_difference([held for _, _, held in results], weights) <= TOLERANCE


_REFERENCES: dict[str, tuple[list[float], list[float], Shards]] = {}


def _alone(key: str, case: Case) -> tuple[list[float], list[float], Shards]:
    """What one process trains, once for all cases of the same training."""
    if key not in _REFERENCES:
        _REFERENCES[key] = run_ranks(1, train, case.alone())[0]
    return _REFERENCES[key]


def worst_difference(result: list[Shards], reference: Shards) -> float:
    """The largest max|Δ| / max|ref| of any tensor, over every rank's shards."""
    whole = {name: values for name, _, _, values in reference}
    worst = 0.0
    for held in result:
        for name, start, stop, values in held:
            difference = np.abs(values - whole[name][start:stop]).max() / np.abs(whole[name]).max()
            worst = max(worst, float(difference))
    return worst
