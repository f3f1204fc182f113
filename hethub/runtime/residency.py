"""What a rank has at hand while it computes: weights and gradients of its layers, and what tiles keep of them.

The executor says which layer it is about to enter, which comes next, and when it is through with one; the answer
depends on where the stage's state lives. Here everything is resident for the whole step.
"""

from torch import Tensor

from hethub.runtime.accounting import Kept, MemoryMeter
from hethub.runtime.reduction import Reducer
from hethub.spec.schedule import Kind


class Residency:
    """One rank's weights and gradients as its executor meets them, layer by layer.

    A layer's number counts the stage's layers in model order; the embedding goes with the first layer of the model,
    final norm and head with its last.
    """

    def __init__(self, reducer: Reducer, meter: MemoryMeter) -> None:
        self.reducer, self._meter = reducer, meter

    def start_step(self, num_contributions: int) -> None:
        """Expects the gradients of `num_contributions` tiles for every parameter."""
        self.reducer.start_step(num_contributions)

    def acquire(self, kind: Kind, layer: int) -> None:
        """Returns when the layer's weights (backward: and gradient buffers) may be used."""

    def prefetch(self, kind: Kind, layer: int) -> None:
        """Starts what the next `acquire`, of this layer, will wait for."""

    def release(self, kind: Kind, layer: int) -> None:
        """Ends one tile's use of the layer; on the way back its contribution to the gradients is complete."""

    def join(self, kind: Kind, layer: int) -> None:
        """Takes part in a round that has no tile for this rank, with an empty contribution."""

    def keep(self, x: Tensor) -> Kept:
        """Keeps a layer's input until its backward runs the layer again; `.tensor` gives it back."""
        return self._meter.keep(x)

    def finish(self) -> None:
        """Returns when all reductions are through: owned gradients are complete sums."""
        self.reducer.finish()
