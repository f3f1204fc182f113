"""Training data: sources of text, tokenizers, and the packed dataset that every rank draws the same batches from.

Start reading: dataset.py, then stream.py and opening.py.
May import: spec, runtime.progress.
"""

from hethub.runtime.data.dataset import Dataset
from hethub.runtime.data.opening import open_dataset

__all__ = ["Dataset", "open_dataset"]
