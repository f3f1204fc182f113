"""Checkpoints that any plan on any number of ranks can read, written while training goes on.

`CheckpointStore` saves and restores a run's state; `newest_intact`, `read_record` and `iterate_weights` read a
checkpoint in one process, without process groups.
"""

from hethub.runtime.checkpoint.export import iterate_weights
from hethub.runtime.checkpoint.integrity import newest_intact
from hethub.runtime.checkpoint.record import CheckpointRecord, read_record
from hethub.runtime.checkpoint.store import CheckpointStore

__all__ = ["CheckpointRecord", "CheckpointStore", "iterate_weights", "newest_intact", "read_record"]
