"""Checkpoints that any plan on any number of ranks can read, written while training goes on.

Start reading: manager.py, then elements.py, dcp.py (writing), reader.py and index.py.
May import: spec, kernels, communicator, runtime.data, runtime.model, runtime.run_claim, runtime.run_folder, runtime.state.
"""

from hethub.runtime.checkpoint.export import iterate_weights
from hethub.runtime.checkpoint.integrity import candidates, check_present, finish_cut_off, newest_marker, none_whole
from hethub.runtime.checkpoint.manager import CheckpointManager
from hethub.runtime.checkpoint.record import CheckpointRecord, LoopState, read_record

# CheckpointManager saves and restores a run's state on all ranks; the functions read a checkpoint in one process,
# without process groups.
__all__ = [
    "CheckpointManager",
    "CheckpointRecord",
    "LoopState",
    "candidates",
    "check_present",
    "finish_cut_off",
    "iterate_weights",
    "newest_marker",
    "none_whole",
    "read_record",
]
