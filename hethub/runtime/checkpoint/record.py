"""What a checkpoint says of itself: step, updates, model, precision, tokenizer, and what the trainer wants back."""

from pathlib import Path
from typing import Any, Literal

from hethub.runtime.checkpoint.index import WholeNumber
from hethub.runtime.state.learning_rate import ScheduleState
from hethub.spec.accelerator import Positive, Precision
from hethub.spec.base import Spec, build
from hethub.spec.documents import Source, read_json
from hethub.spec.errors import BadInput
from hethub.spec.model import ModelSpec

RECORD = "record.json"

# None of them says how weights are laid out or what they compute.
_FREE = {"name", "max_seq_len", "init_std"}


class LoopState(Spec):
    """What the trainer wants back: where it was in which data, and the scale of its loss."""

    step: WholeNumber
    seed: int
    tokens: str  # the data's fingerprint
    loss_scale: Positive
    good_steps: WholeNumber
    schedule: ScheduleState | None = None  # None, as below: of an earlier version
    samples: tuple[WholeNumber, ...] | None = None  # that each source of the data has given
    sources: tuple[str, ...] | None = None  # the fingerprint of each


class CheckpointRecord(Spec):
    """The file record.json, one to one. `updates` is below `step` where fp16 skipped some."""

    version: Literal[1] = 1
    step: WholeNumber
    updates: WholeNumber
    precision: Precision
    model: ModelSpec
    extra: LoopState
    tokenizer: str | None = None  # the data's, by its identity; None, as below: of an earlier version
    end_of_document: int | None = None

    def check(self, model: ModelSpec, precision: Precision, path: Path) -> None:
        """Raises BadInput, naming both sides, unless a run of this model in this precision can go on from here."""
        check_model(self.model, model, path)
        if self.precision != precision:
            raise BadInput(
                f"{path} was saved in precision {self.precision}, but the job has {precision}: masters and moments would not be "
                f"the same numbers. Resume with train.precision: {self.precision}, or export the weights and start from them."
            )


def check_model(saved: ModelSpec, given: ModelSpec, path: Path) -> None:
    """Raises BadInput, naming every fact that differs, unless the model saved in `path` is the one given."""
    there, here = _facts(saved), _facts(given)
    if differing := [f"{key} {there[key]} there, {here[key]} here" for key in there if there[key] != here[key]]:
        raise BadInput(
            f"{path} was saved from model '{saved.name}', but the job has model '{given.name}': {', '.join(differing)}. "
            "Resume with the model that was saved, or start a new run."
        )


def _facts(model: ModelSpec) -> dict[str, Any]:
    resolved = {"kv_heads": model.num_kv_heads, "head_dim": model.head_size, "gated": model.is_gated}
    return {key: value for key, value in (model.model_dump() | resolved).items() if key not in _FREE}


def read_record(path: Path) -> CheckpointRecord:
    """The record of the checkpoint in `path`. Raises BadInput."""
    file = path / RECORD
    return build(CheckpointRecord, read_json(file, "checkpoint's record"), Source(str(file)), "checkpoint's record")
