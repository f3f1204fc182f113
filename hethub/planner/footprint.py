"""Bytes of a rank by its number of layers, in closed form: bounds the search; the predictor's memory judges.

The figures are those of hethub.predictor.memory for equal tensor shares (a test compares them).
"""

from dataclasses import dataclass

import numpy as np

from hethub.planner.problem import Problem, Unit
from hethub.predictor.memory import FRAMEWORK_BYTES, FRAMEWORK_BYTES_ELSE, LOSS_CHUNK_TOKENS
from hethub.predictor.software import HETHUB, element_bytes
from hethub.spec.plan import Recompute


@dataclass(frozen=True)
class Footprint:
    """Of one rank, by layers held: what is there whatever the replicas, and the state that replicas share."""

    fixed: np.ndarray
    shared: np.ndarray

    def least_replicas(self, capacity: float, sharded: bool) -> np.ndarray:
        """By layers, the fewest replicas with which a rank fits into `capacity` bytes; a huge number where none do."""
        room = capacity - self.fixed
        if not sharded:
            return np.where(room >= self.shared, 1, _NEVER)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.ceil(self.shared / room)
        return np.where(room > 0, np.maximum(1, needed), _NEVER).astype(np.int64)


_NEVER = 1 << 40


def footprint(
    problem: Problem, unit: Unit, micro_batch: int, in_flight: int, recompute: Recompute, *, first: bool, last: bool
) -> Footprint:
    """The footprint for 0, 1, … all layers on a rank of `unit`, with `in_flight` tiles held."""
    model, share = problem.model, 1.0 / unit.tp
    width = element_bytes(HETHUB.math_precision(problem.batch.precision))
    wide = max(4, width)
    layers = np.arange(model.layers + 1)
    parameters = layers * layer_parameters(problem, unit.tp) + end_parameters(problem, unit.tp, first, last)
    held, once = tile_bytes(problem, unit.tp, micro_batch, recompute)
    vendor = problem.kinds[unit.kind].accelerator.vendor
    rest = once + FRAMEWORK_BYTES.get(vendor, FRAMEWORK_BYTES_ELSE)
    if last:
        tokens = micro_batch * problem.batch.seq_len
        rest += min(LOSS_CHUNK_TOKENS, tokens) * model.vocab * share * wide * 3
    fixed = parameters * (width + wide) + in_flight * layers * held + rest
    master = wide if width < 4 else 0
    return Footprint(fixed, parameters * (master + 2 * wide))


def tile_bytes(problem: Problem, tp: int, micro_batch: int, recompute: Recompute) -> tuple[float, float]:
    """What a held tile keeps per layer on one of `tp` ranks; and bytes besides, whatever is held: buffers between stages
    and, where the forward runs again, one layer in full."""
    model = problem.model
    width = element_bytes(HETHUB.math_precision(problem.batch.precision))
    tokens = micro_batch * problem.batch.seq_len
    heads = (2 * model.heads + 2 * model.num_kv_heads) * model.head_size / tp
    columns = model.ffn / tp * (4 if model.is_gated else 2)
    layer = tokens * width * (4.0 * model.hidden + heads + columns)
    hidden = float(tokens * model.hidden * width)
    return (hidden, 4 * hidden + layer) if recompute == "full" else (layer, 4 * hidden)


def layer_parameters(problem: Problem, tp: int) -> float:
    """Parameters of a layer on one of `tp` ranks: norms are on every rank, KV heads at least one."""
    model = problem.model
    matrices = (3 if model.is_gated else 2) * model.ffn
    cut = 2 * model.heads * model.head_size + matrices
    kv = 2 * model.num_kv_heads * model.head_size
    kept = model.layer_parameters - model.hidden * (cut + kv)
    return kept + model.hidden * (cut / tp + max(kv / tp, 2 * model.head_size))


def end_parameters(problem: Problem, tp: int, first: bool, last: bool) -> float:
    """Parameters of the embedding and the head on one of `tp` ranks; a tied head apart from it is a second copy."""
    model = problem.model
    count = model.embedding_parameters / tp if first else 0.0
    if last:
        count += model.head_parameters / tp
        if model.tied_head and not first:
            count += model.vocab * model.hidden / tp
    return count
