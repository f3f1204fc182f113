"""Which nodes to add next to those owned."""

from dataclasses import dataclass
from math import inf

from hethub.capacity.catalogue import CatalogueSpec, cluster_of
from hethub.capacity.options import LeftOut
from hethub.capacity.sizing import Evaluator, Progress
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Addition:
    """More nodes of one type: what they bring, and what of it for each unit of money an hour."""

    node: str
    count: int
    tokens_per_second: float
    gained_tokens_per_second: float
    gained_per_price: float | None


def rank_additions(
    catalogue: CatalogueSpec, evaluate: Evaluator, have: ClusterSpec, count: int = 1, progress: Progress | None = None
) -> tuple[list[Addition], list[LeftOut]]:
    """`count` nodes of every type added to what is owned, best tokens/s per price first (what costs nothing before all
    others, per node where there is no price), and those that cannot be added. Raises BadInput where nothing fits the owned
    nodes themselves, and where no type can be added."""
    try:
        now = evaluate(have)
    except BadInput as error:
        raise BadInput(f"cluster '{have.name}' as it is: {error} Or ask for a size instead of an addition.") from None
    found, left_out = [], []
    for index, node in enumerate(catalogue.nodes):
        if progress is not None:
            progress(index, len(catalogue.nodes), f"{count} {node.name} more")
        try:
            if count > node.count:
                raise BadInput(f"the catalogue has {node.count} of them.")
            with_it = evaluate(cluster_of(catalogue, {node.name: count}, have)).tokens_per_second
        except BadInput as error:
            left_out.append(LeftOut(nodes={node.name: count}, why=str(error)))
            continue
        rate = max(with_it, now.tokens_per_second)  # where the search found nothing better they stay unused
        gained = rate - now.tokens_per_second
        per_price = gained / (count * node.price_per_hour) if node.price_per_hour else None
        found.append(
            Addition(
                node=node.name,
                count=count,
                tokens_per_second=rate,
                gained_tokens_per_second=gained,
                gained_per_price=per_price,
            )
        )
    if not found:
        first = left_out[0]
        raise BadInput(
            f"none of the catalogue's {len(left_out)} node types can be added to cluster '{have.name}'; "
            f"{next(iter(first.nodes))}: {first.why}"
        )
    free = {node.name for node in catalogue.nodes if node.price_per_hour == 0}

    def worth(addition: Addition) -> float:
        return inf if addition.node in free and addition.gained_tokens_per_second else addition.gained_per_price or 0.0

    return sorted(found, key=lambda a: (-worth(a), -a.gained_tokens_per_second)), left_out
