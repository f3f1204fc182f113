"""One process group over accelerators of several makers.

Start reading: world.py, then groups/ (what c10d calls) and bridge/ (where bytes cross vendors).
May import: spec, kernels.
"""

# `connect(rendezvous)` gives a `World`: groups (native inside an island, bridged between islands), tagged messages between
# any two ranks, barriers and small objects, and failures that name the rank. Importing this package makes torch know the
# c10d backend "hethub", so that `init_process_group("hethub")` works in any program.

from hethub.communicator.groups.backend import register
from hethub.communicator.groups.uneven import (
    all_gather_by_ranges,
    all_reduce_with_feedback,
    prepare_by_ranges,
    reduce_scatter_by_ranges,
)
from hethub.communicator.joining.connection import Failure
from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.world import World, connect

__all__ = [
    "Failure",
    "Rendezvous",
    "World",
    "all_gather_by_ranges",
    "all_reduce_with_feedback",
    "connect",
    "prepare_by_ranges",
    "reduce_scatter_by_ranges",
]

register()
