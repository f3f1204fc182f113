"""A plan bound to its model and cluster: everything a rank or a simulator derives from it, checked as a whole."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec
from hethub.spec.ranges import Range
from hethub.spec.tensors import RankShares, rank_shares
from hethub.spec.tiling import Tile, Transfer, deal, in_flight_limits, is_regular, regular_limits, transfers


class Seat(NamedTuple):
    """A rank's place in the plan."""

    rank: int
    stage: int
    replica: int
    position: int  # within the replica


@dataclass(frozen=True)
class Layout:
    """A plan that fits its model and cluster. Build it with `bind`, which checks; then everything here is consistent."""

    plan: PlanSpec
    model: ModelSpec
    cluster: ClusterSpec

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        return self.plan.stages

    @property
    def num_stages(self) -> int:
        return len(self.plan.stages)

    def replica(self, stage: int, replica: int) -> ReplicaSpec:
        return self.plan.stages[stage].replicas[replica]

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """One seat per rank, in rank order."""
        seats = [
            Seat(rank, s, r, position)
            for s, stage in enumerate(self.plan.stages)
            for r, replica in enumerate(stage.replicas)
            for position, rank in enumerate(replica.ranks)
        ]
        return tuple(sorted(seats))

    @cached_property
    def tiles(self) -> tuple[tuple[Tile, ...], ...]:
        """Per stage, its tiles in order of the sample axis."""
        return tuple(deal(index, stage.replicas) for index, stage in enumerate(self.plan.stages))

    def parts(self, stage: int) -> tuple[Range, ...]:
        """The layers that each of a stage's parts runs: its chunks, or under `layered` its layers one by one."""
        chunks = self.plan.stages[stage].chunks
        if self.plan.schedule != "layered":
            return chunks
        return tuple(Range(layer, layer + 1) for chunk in chunks for layer in range(*chunk))

    def tiles_of(self, stage: int, replica: int) -> tuple[Tile, ...]:
        """A replica's tiles in order."""
        return self._tiles_by_replica[stage][replica]

    @cached_property
    def _tiles_by_replica(self) -> tuple[tuple[tuple[Tile, ...], ...], ...]:
        result = []
        for stage, tiles in zip(self.plan.stages, self.tiles, strict=True):
            own: list[list[Tile]] = [[] for _ in stage.replicas]
            for tile in tiles:
                own[tile.replica].append(tile)
            result.append(tuple(map(tuple, own)))
        return tuple(result)

    @cached_property
    def in_flight(self) -> list[list[int]]:
        """Per stage and replica, the tiles held before their backward."""
        if self.plan.schedule == "gpipe":
            return [[len(own) for own in stage] for stage in self._tiles_by_replica]
        return regular_limits(self.plan) if is_regular(self.plan) else in_flight_limits(self.plan, self.tiles)

    @cached_property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """Per stage boundary, what crosses it; tags are unique over all boundaries."""
        crossing: list[tuple[Transfer, ...]] = []
        for sources, targets in pairwise(self.tiles):
            first_tag = sum(map(len, crossing))
            crossing.append(tuple(transfers(sources, targets, first_tag)))
        return tuple(crossing)

    def leader(self, tile: Tile) -> int:
        """The rank that sends and receives for a tile; turns go round the replica, so its links share the load."""
        ranks = self.replica(tile.stage, tile.replica).ranks
        return ranks[tile.index % len(ranks)]

    def shares(self, stage: int, replica: int) -> list[RankShares]:
        """What each rank of a replica holds of heads, columns and vocabulary."""
        return rank_shares(self.model, self.replica(stage, replica), f"stages[{stage}].replicas[{replica}]")

    def islands_of(self, ranks: tuple[int, ...]) -> set[str]:
        """The islands that some ranks lie in."""
        return {self.cluster.places[rank].island for rank in ranks}

    @property
    def head_is_apart(self) -> bool:
        """Whether a tied head lives on another stage than the embedding that owns its weight."""
        return self.model.tied_head and self.num_stages > 1


def bind(plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> Layout:
    """The plan on this model and cluster. Raises BadInput naming the first rule it breaks and what to change."""
    _check_names(plan, model, cluster)
    if plan.num_layers != model.layers:
        raise BadInput(
            f"the plan's stages hold layers [0, {plan.num_layers}), but model '{model.name}' has {model.layers}; "
            f"let the last stage stop at layer {model.layers}."
        )
    if len(plan.ranks) != cluster.size:
        raise BadInput(
            f"the plan places {len(plan.ranks)} ranks, but cluster '{cluster.name}' has {cluster.size} accelerators; plan again "
            "for this cluster, or name the cluster the plan was made for."
        )
    if plan.seq_len > model.max_seq_len:
        raise BadInput(
            f"the plan's seq_len {plan.seq_len} exceeds the {model.max_seq_len} tokens that model '{model.name}' takes; shorten it."
        )
    layout = Layout(plan, model, cluster)
    _check_precision(layout)
    _check_islands(layout)
    for stage, spec in enumerate(plan.stages):
        for replica in range(len(spec.replicas)):
            layout.shares(stage, replica)
    _ = layout.in_flight
    return layout


def _check_names(plan: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> None:
    for kind, wanted, given in (("model", plan.model, model.name), ("cluster", plan.cluster, cluster.name)):
        if wanted != given:
            raise BadInput(
                f"the plan was made for {kind} '{wanted}', but the job has {kind} '{given}'; plan again (`hethub plan`), or "
                f"set the plan's `{kind}` to '{given}' if it is meant for it."
            )


def _check_precision(layout: Layout) -> None:
    for place in layout.cluster.places:
        if not place.accelerator.peak_flops(layout.plan.precision):
            raise BadInput(
                f"precision {layout.plan.precision}: accelerator {place.accelerator.name} (rank {place.rank}, node "
                f"'{place.node.name}') does not compute in it; choose fp16 or fp32, or leave that node out."
            )


def _check_islands(layout: Layout) -> None:
    for index, stage in enumerate(layout.stages):
        for position, replica in enumerate(stage.replicas):
            if len(vendors := layout.islands_of(replica.ranks)) > 1:
                raise BadInput(
                    f"stages[{index}].replicas[{position}]: ranks {list(replica.ranks)} are a tensor-parallel group over islands "
                    f"{' and '.join(sorted(vendors))}; a replica lies inside one island. Give each island a replica of its own."
                )
        if stage.zero == 0 and len(stage.replicas) > 1 and len(layout.islands_of(stage.ranks)) > 1:
            raise BadInput(
                f"stages[{index}]: zero: 0 with replicas on islands {' and '.join(sorted(layout.islands_of(stage.ranks)))} would let "
                "unlike kernels drift apart in the last bits; set zero: 1, so that every byte is stepped at one owner."
            )
        if layout.plan.schedule == "gpipe" and any(replica.in_flight for replica in stage.replicas):
            raise BadInput(
                f"stages[{index}]: schedule gpipe holds all tiles at once, so in_flight has no meaning; remove it or choose 1f1b."
            )
