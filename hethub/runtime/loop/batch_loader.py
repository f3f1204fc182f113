"""A rank's microbatches, from the dataset to its device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hethub.kernels.device import is_gpu
from hethub.runtime.data import Dataset
from hethub.runtime.model.layers import Documents
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
        where = (step - 1, self._global_batch, *samples)
        inputs, targets = self._dataset.batch(*where)
        documents = self._documents(self._dataset.documents(*where, inputs)) if self._document_mask else None
        return MicrobatchInput(
            batch=samples.size, tokens=self._on_device(inputs), targets=self._on_device(targets), documents=documents
        )

    def _documents(self, segments: NDArray[np.int64]) -> Documents:
        """Return the documents of a batch, given the number of every token's document within its sample, (samples, seq_len)."""
        sizes = np.concatenate([np.bincount(row) for row in segments])
        starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        return Documents(sizes=tuple(sizes.tolist()), starts=self._on_device(starts))

    def _on_device(self, values: NDArray[Any]) -> torch.Tensor:
        """On its way there: a device copies from pinned memory while the host goes on, if that is one piece."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        if not is_gpu(self._device):
            return host.to(self._device)
        return host.pin_memory().to(self._device, non_blocking=True)
