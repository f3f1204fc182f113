"""One rank of a run under a program: its step, AdamW on its shards, and its part of every checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World
from hethub.kernels.device import Device
from hethub.runtime.checkpoint.dcp import Part
from hethub.runtime.checkpoint.elements import FIRST_MOMENT, SECOND_MOMENT, WEIGHTS, entry
from hethub.runtime.checkpoint.manager import CheckpointFolder
from hethub.runtime.checkpoint.record import check_model
from hethub.runtime.data import Dataset
from hethub.runtime.data.dataset import Batch as TokenBatch
from hethub.runtime.loop.step_report import StepOutcome, StepReporter, gather_outcome, not_finite
from hethub.runtime.metrics import StepMetrics
from hethub.runtime.program.checkpoint import load, read_record
from hethub.runtime.program.subject import Batch, Subject
from hethub.runtime.state.gradient_norm import clip_scale
from hethub.runtime.state.learning_rate import Schedule, ScheduleState
from hethub.spec.base import build
from hethub.spec.documents import Source
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import TrainSpec
from hethub.spec.model import ModelSpec
from hethub.synthesis.lower import Step

ALIKE_EVERY = 100  # steps after which what all ranks have whole becomes rank 0's again


def on_device(rows: TokenBatch, device: Device) -> Batch:
    """Tokens and targets as a module takes them."""
    return tuple(torch.from_numpy(each).contiguous().to(device.torch_device) for each in rows)


class ProgramTrainer:
    """Trains step by step with all other ranks. Weight decay applies to matrices, not to vectors."""

    def __init__(self, world: World, subject: Subject, dataset: Dataset | None, step: Step, train: TrainSpec) -> None:
        self._world, self._subject, self._dataset, self._train = world, subject, dataset, train
        self.step, self.schedule = step, Schedule(train)
        shards = [shard for shard in step.parameters() if shard.numel()]
        groups = [
            {"params": [shard for shard in shards if shard.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [shard for shard in shards if shard.dim() <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": []}], lr=train.lr, betas=train.betas, eps=train.eps, fused=True
        ) if shards else None  # fmt: skip
        self._updates = 0
        self._samples = train.global_batch  # of the last step; a factory's batches may differ
        self._reporter = StepReporter(world)

    @property
    def num_items(self) -> int:
        """Tokens of a step, or its samples where the factory has batches of its own."""
        per_sample = self._train.seq_len if self._subject.batches is None else 1
        return self._train.global_batch * per_sample

    def _batch(self, step: int) -> Batch:
        if self._dataset is None:
            assert self._subject.batches is not None
            batch: Batch = self._subject.batches.at(step)
        else:
            count = self._train.global_batch
            return on_device(self._dataset.batch(step - 1, count, 0, count), self._world.device)
        return tuple(value.to(self._world.device.torch_device) for value in batch)

    def run_step(self, step: int, stop_requested: Callable[[], bool]) -> StepOutcome:
        """Trains step `step` (counted from 1); what all ranks agree on. Raises RunFailed where the gradient is
        not finite."""
        shards = dict(self.step.named_parameters())
        for shard in shards.values():
            shard.grad = None
        batch = self._batch(step)
        try:
            loss = float(self.step(*batch))
        except BadInput as error:  # the first batch was looked at before anything was written
            raise RunFailed.everywhere(
                self._world.rank,
                f"step {step}: {error} Batches that differ from the first, of {self._train.global_batch} samples, are refused where the"
                " program does not hold for them: let every step have as many (DataLoader: drop_last=True).",
            ) from error
        self._samples = len(batch[0])
        outcome = gather_outcome(
            self._world,
            loss=loss if self._world.rank == 0 else 0.0,
            square_sum=self.step.square_sum(),
            memory_bytes=self.memory_bytes,
            stop_requested=stop_requested(),
            busy_seconds=None,
            loss_scale=1.0,
        )
        if outcome.grad_norm is None:
            raise not_finite(self._world.rank, step, outcome)
        self._update(step, shards, clip_scale(outcome.grad_norm, self._train.grad_clip))
        if step % ALIKE_EVERY == 0:
            self._make_alike(shards)
        return outcome

    def flush(self) -> None:
        """Completes what goes on beside the next step: a program leaves nothing behind."""

    def evaluate(self, held_out: Dataset, batches: int) -> float:
        """The mean loss of the first `batches` batches of held-out samples, on all ranks. The program computes gradients
        on the way, which nobody takes."""
        count = self._train.global_batch
        rows = (held_out.batch(number, count, 0, count) for number in range(batches))
        return sum(float(self.step.loss(*on_device(each, self._world.device))) for each in rows) / batches

    @torch.no_grad()
    def _update(self, step: int, shards: dict[str, torch.nn.Parameter], scale: float) -> None:
        if scale != 1.0:
            for shard in shards.values():
                if shard.grad is not None:
                    shard.grad.mul_(scale)
        self._updates += 1
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self.schedule.rate(step)
            self._optimizer.step()

    @torch.no_grad()
    def _make_alike(self, shards: dict[str, torch.nn.Parameter]) -> None:
        """What all ranks have whole becomes rank 0's, as after a resume: each steps its own copy, and devices of unlike
        makers round unlike."""
        for name, state in self._states():
            if self.step.is_whole(name):
                for tensor in (shards[name].detach(), state[FIRST_MOMENT], state[SECOND_MOMENT]):
                    dist.broadcast(tensor, group=self._world.default_group, group_src=0)

    @property
    def memory_bytes(self) -> int:
        """This rank's peak: the allocator's on a device, the living storages of a step on a CPU."""
        reserved = self._world.device.peak_memory_bytes()
        return reserved if reserved is not None else self.step.peak_bytes or 0

    def metrics(self, step: int, outcome: StepOutcome, seconds: float, predicted: float) -> StepMetrics:
        """The line of metrics.jsonl for a step."""
        items = self.num_items * self._samples // self._train.global_batch
        return self._reporter.metrics(
            step,
            outcome,
            tokens=items,
            step_seconds=seconds,
            predicted_step_seconds=predicted,
            lr=self.schedule.rate(step),
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, checkpoints: CheckpointFolder, step: int) -> None:
        """Saves the state behind `step`, complete on return."""
        record = {"strategy": "hap", "step": step, "updates": self._updates, "has_fixed": True, **self._origin()}
        record["schedule"] = self.schedule.state.to_dict()
        if self._subject.described is not None:
            record["described"] = self._subject.described.to_dict()
        if self._dataset is not None:
            record["samples"] = self._dataset.position(step, self._train.global_batch)
            record["sources"] = self._dataset.fingerprints
        checkpoints.write(step, list(self._parts(to_save=True)), record)

    def restore(self, path: Path) -> int:
        """Takes up the state saved at `path`, under this or another program; the step that it was saved behind."""
        record, source = read_record(path), Source(f"{path}, record")
        origin = self._origin()
        if self._subject.described is not None and "described" in record:  # older ones have a name alone
            saved_model = build(ModelSpec, record["described"], source, "model", ("described",))
            check_model(saved_model, self._subject.described, path)
            del origin["model"]
        for key, own in origin.items():
            is_same = key == "data" and self._dataset is not None and self._dataset.is_of(record[key])
            if record[key] != own and not is_same:
                data = self._dataset if key == "data" else None
                what = key if data is None else f"data {data.changed(record.get('sources'))}"
                raise BadInput(
                    f"{path}: the checkpoint was trained with {what} {record[key]}, the job has {own}; give the same, or start "
                    "a new run."
                )
        with torch.no_grad():
            has_fixed = record.get("has_fixed", False)  # older ones have not
            load(path, list(self._parts(to_save=False, has_fixed=has_fixed)))
        self._updates = int(record["updates"])
        if "schedule" in record:
            saved = build(ScheduleState, record["schedule"], source, "schedule", ("schedule",))
            self.schedule.resume(saved, int(record["step"]))
        if self._dataset is not None and "samples" in record:
            self._dataset.resume(int(record["step"]), record["samples"])
        for _, state in self._states():
            state["step"].fill_(float(self._updates))
        return int(record["step"])

    def _origin(self) -> dict[str, Any]:
        data = "the factory's batches" if self._dataset is None else self._dataset.fingerprint
        return {"model": self._subject.name, "data": data, "seed": self._train.seed, "precision": self._train.precision}

    def _states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """What the optimizer keeps of each shard, made where it has not been stepped yet."""
        for name, shard in self.step.named_parameters():
            if shard.numel():
                assert self._optimizer is not None
                state = self._optimizer.state[shard]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
                    state[FIRST_MOMENT], state[SECOND_MOMENT] = torch.zeros_like(shard), torch.zeros_like(shard)
                yield name, state

    def _parts(self, *, to_save: bool, has_fixed: bool = True) -> Iterator[Part]:
        """This rank's part of every entry; what all ranks have whole, rank 0 saves."""
        shards = dict(self.step.named_parameters())
        for name, state in self._states():
            if to_save and self.step.is_whole(name) and self._world.rank:
                continue
            values = {
                WEIGHTS: shards[name].detach(),
                FIRST_MOMENT: state[FIRST_MOMENT],
                SECOND_MOMENT: state[SECOND_MOMENT],
            }
            for kind, tensor in values.items():
                for offsets, view in self.step.chunks(name, tensor):
                    yield Part(entry(kind, name), self.step.shape(name), offsets, view)
        if to_save and self._world.rank:
            return
        for name, buffer in {**self.step.statistics(), **(self.step.fixed() if has_fixed else {})}.items():
            yield Part(entry(WEIGHTS, name), tuple(buffer.shape), (0,) * buffer.dim(), buffer)
