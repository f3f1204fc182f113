"""What the ranks of a stage with one share of heads and columns hold and keep, whatever their microbatches."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.cost.software import Software
from hethub.predictor.memory.activations import KeptPerSample, kept_per_sample, score_bytes
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import BUCKET_ELEMENTS
from hethub.spec.plan import StageSpec
from hethub.spec.ranges import Range, from_sizes


class Holdings(NamedTuple):
    """Elements of a stage that a rank with some share of heads, columns and vocabulary computes with."""

    units: tuple[float, ...]  # per layer of the stage
    tied: float  # an embedding that both ends of the stage use: a unit of its own
    norms: float
    apart: float  # an embedding tied to a head on another stage: held by both

    @property
    def total(self) -> float:
        return sum(self.units) + self.tied + self.norms + self.apart

    @staticmethod
    def of(layout: Layout, stage: int, share: float) -> "Holdings":
        model, num_layers = layout.model, layout.stages[stage].num_layers
        columns = (3 if model.is_gated else 2) * model.ffn
        kv = max(model.num_kv_heads * share, 1.0) * model.head_size * 2
        layer = model.hidden * (2 * model.heads * model.head_size * share + kv + columns * share)
        whole = model.hidden * (2 * model.head_size * (model.heads + model.num_kv_heads) + columns)
        norms = float(num_layers * (model.layer_parameters - whole))
        units, apart = [layer] * num_layers, 0.0
        table = model.vocab * model.hidden * share
        if stage == 0:
            units[0] += model.embedding_parameters * share
        if stage == layout.num_stages - 1:
            head = 0.0 if model.tied_head else table
            units[-1] += head
            norms += model.head_parameters * share - head
        if model.tied_head and stage == 0:
            units[0] -= table
        if layout.head_is_apart and stage in (0, layout.num_stages - 1):
            apart = table
        tied = table if model.tied_head and layout.num_stages == 1 else 0.0
        return Holdings(tuple(units), tied, norms, apart)


class Descent(NamedTuple):
    """A moment on the way down through a stage's chunks: what has been freed, and elements of units at hand."""

    chunk: int
    layers_passed: int  # in that chunk, by the first microbatch
    weights: float
    gradients: float


@dataclass(frozen=True, eq=False)
class Shard:
    """One share of one stage. What is asked of it is computed once for all ranks that hold it."""

    layout: Layout
    stage: int
    share: float
    software: Software
    width: int  # bytes of an activation and a weight

    @property
    def spec(self) -> StageSpec:
        return self.layout.stages[self.stage]

    @cached_property
    def holdings(self) -> Holdings:
        return Holdings.of(self.layout, self.stage, self.share)

    @cached_property
    def held_elements(self) -> float:
        return self.holdings.total

    @cached_property
    def kept(self) -> KeptPerSample:
        """What one sample keeps, the scores of unfused attention included."""
        found = kept_per_sample(self.layout, self.share, self.software, self.width)
        if self.software.fused_attention or self.spec.recompute != "none":
            return found
        return found._replace(layer=found.layer + score_bytes(self.layout, self.share, self.software, self.width))

    @cached_property
    def chunks(self) -> list[Range]:
        """The stage's chunks as ranges of its own layers."""
        return from_sizes(chunk.size for chunk in self.layout.chunks(self.stage))

    @cached_property
    def bucket_elements(self) -> float:
        """Elements of the two largest neighbouring buckets: of units where these move, of a chunk's matrices else.

        A bucket is cut where it is full.
        """
        model, units = self.layout.model, self.holdings.units
        table = model.vocab * model.hidden if self.stage in (0, self.layout.num_stages - 1) else 0
        full = BUCKET_ELEMENTS + max(model.hidden * model.ffn, table)
        chunks = [units[chunk.start : chunk.stop] for chunk in self.chunks]
        chunks[0] = (self.holdings.tied, *chunks[0])
        if not self.layout.plan.steps_chunk_by_chunk:
            chunks = [tuple(unit for chunk in chunks for unit in chunk)]
        if self.spec.zero >= 2 or "parameters" in self.spec.offload:
            return max(a + b for chunk in chunks for a, b in pairwise([min(unit, full) for unit in (0.0, *chunk)]))
        return min(2 * full, max(map(sum, chunks)))

    @cached_property
    def descents(self) -> tuple[Descent, ...]:
        """All microbatches on their way down through a chunk: its layers stay until the last of them has passed.

        The first microbatch enters them one by one, the next announced, and frees what it kept of those above.
        """
        chunks = [self.holdings.units[own.start : own.stop] for own in self.chunks]
        above, tied, found = 0.0, self.holdings.tied, []
        for chunk in range(len(chunks) - 1, -1, -1):
            at_hand = tied * (chunk in (0, len(chunks) - 1))
            downward = [*chunks[chunk][::-1], chunks[chunk - 1][-1] if chunk else 0.0]
            for passed in range(len(chunks[chunk])):
                entered = sum(downward[: passed + 1])
                weights = entered + downward[passed + 1] + at_hand
                found.append(Descent(chunk, passed, weights, entered + above + tied))
            above = chunks[chunk][0]
        return tuple(found)
