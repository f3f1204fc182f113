"""A rank's microbatches, from the dataset to its device."""

import torch

from hethub.runtime.data import Dataset
from hethub.runtime.model.stage import MicrobatchInput, Stage
from hethub.spec.schedule.microbatches import MicrobatchRange


class BatchLoader:
    """Loads what a rank's stage needs of each microbatch: tokens at the model's ends, documents where they are
    masked."""

    def __init__(self, dataset: Dataset, stage: Stage, *, document_mask: bool) -> None:
        self._dataset, self._document_mask = dataset, document_mask
        self._global_batch = stage.layout.plan.global_batch
        self._device = stage.storage.device
        self._needs_tokens = stage.is_first or stage.is_last or document_mask

    def load(self, step: int, microbatch: MicrobatchRange) -> MicrobatchInput:
        """The microbatch of step `step` (counted from 1)."""
        samples = microbatch.samples
        if not self._needs_tokens:
            return MicrobatchInput(batch=samples.size)
        rows = self._dataset.samples(step - 1, self._global_batch, *samples)  # (batch, seq + 1)
        tokens = torch.from_numpy(rows).to(self._device)
        segments = None
        if self._document_mask:
            segments = torch.from_numpy(self._dataset.documents(rows)).to(self._device)
        return MicrobatchInput(batch=samples.size, tokens=tokens[:, :-1], targets=tokens[:, 1:], segments=segments)
