"""What leaves over every link in a step, counted by the plan and the state map, and what links carry a second, by the
cluster file and the fitted fractions of its figures."""

from collections import Counter, defaultdict
from typing import Any

from hethub.predictor.cost.constants import packaged
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import Piece, StateMap


def bytes_per_second(layout: Layout, kind: str, owner: Any) -> float:
    """What a link carries, by the cluster file's figures and the fitted fractions of them."""
    links, fraction, places = layout.cluster.links, packaged().links, layout.cluster.places
    if kind == "port":  # PCIe, so slow are all links drawn
        return places[owner].accelerator.link_gbytes_per_second * 1e9 * fraction["pcie_fraction"]
    if kind in ("staging", "host"):
        own = links.staging.gbytes_per_second if kind == "staging" else links.staging.per_host_gbytes_per_second
        return (own or 0.0) * 1e9
    if kind == "regions":
        assert links.regions is not None
        here, there = map(links.regions.names.index, owner)
        return links.regions.gbps[here][there] / 8 * 1e9
    machines = {place.machine: place.node.gbps for place in places}
    racks = {rack.name: rack.gbps for rack in links.racks}
    gbps = links.between_islands.gbps_per_node if kind == "bridge" else (machines if kind == "cards" else racks)[owner]
    return fraction["between_nodes_fraction"] * (gbps or 0.0) / 8 * 1e9


def sent_bytes(layout: Layout) -> dict[tuple[str, Any], float]:
    """What leaves an accelerator for its neighbours or its relay, and a machine, a rack and a region in a step:
    messages between leaders, rings over replicas, and what islands exchange of their sums."""
    places, width, found = layout.cluster.places, 4, defaultdict[tuple[str, Any], float](float)
    links = layout.cluster.links
    own_bridge, own_host = (
        links.between_islands.gbps_per_node is not None,
        links.staging.per_host_gbytes_per_second is not None,
    )
    rack_of = {name: rack.name for rack in links.racks for name in rack.nodes}
    region_of = links.regions.of_node if links.regions else {}

    def send(source: int, target: int, num_bytes: float) -> None:
        a, b = places[source], places[target]
        if a.island != b.island:
            cross(a.rank, num_bytes)
        elif a.machine == b.machine:
            found["port", source] += num_bytes
        if a.machine != b.machine:
            if a.island == b.island or not own_bridge:
                found["cards", a.machine] += num_bytes
            racks = [rack_of.get(place.node.name) for place in (a, b)]
            if racks[0] is not None and racks[0] != racks[1]:
                found["rack", racks[0]] += num_bytes
            regions = tuple(region_of.get(place.node.name) for place in (a, b))
            if regions[0] != regions[1]:
                found["regions", regions] += num_bytes

    def cross(source: int, num_bytes: float) -> None:
        """From an island to another, the machines' cards left out."""
        found["staging", source] += num_bytes
        if own_host:
            found["host", places[source].machine] += num_bytes
        if own_bridge:
            found["bridge", places[source].machine] += num_bytes

    for boundary in layout.transfers:
        for transfer in boundary:
            one, other = layout.leader(transfer.source), layout.leader(transfer.target)
            num_bytes = transfer.samples.size * layout.plan.seq_len * layout.model.hidden * width
            send(one, other, num_bytes)
            send(other, one, num_bytes)
    for bucket in StateMap(layout).buckets:
        stage = layout.stages[bucket.stage]
        rounds = layout.loads[bucket.stage][0].num_microbatches if layout.plan.runs_in_rounds(bucket.stage) else 1
        for piece in bucket.pieces:
            ranks = piece.group.contributors
            # A tied head's ends, on two stages, sum by themselves.
            if len(stage.replicas) == 1 or not set(ranks) <= {*stage.ranks}:
                continue
            # Norms stay where they are. Not every pass gathers all of a stage's weights: those of one layer stay.
            reduces = rounds if stage.zero >= 2 and bucket.decays else 1
            # An embedding that both ends use stays unless a layer lies between them.
            stays = stage.num_layers <= (2 if bucket.unit == stage.num_layers else 1)
            gathers = rounds if stage.zero == 3 and bucket.decays and not stays else 1
            each, num_bytes = piece.numel * width, (reduces + gathers) * piece.numel * width
            machines, islands = {places[rank].machine for rank in ranks}, Counter(places[r].island for r in ranks)
            if len(islands) > 1:
                island_of = {rank: places[rank].island for rank in ranks}
                for rank, part in leaving(piece, island_of, reduces, gathers).items():
                    cross(rank, each * part)
                    if len(machines) > 1 and not own_bridge:
                        found["cards", places[rank].machine] += each * part
                for island, size in islands.items():
                    own = {places[rank].machine for rank in ranks if places[rank].island == island}
                    for machine in own if len(own) > 1 else ():
                        found["cards", machine] += num_bytes * (size - 1) / size
                continue
            ring = num_bytes * (len(ranks) - 1) / len(ranks)
            for link in [("cards", m) for m in machines] if len(machines) > 1 else [("port", r) for r in ranks]:
                found[link] += ring
    return found


def leaving(piece: Piece, island_of: dict[int, str], reduces: int, gathers: int) -> dict[int, float]:
    """What each rank sends to other islands, as fractions of a piece: partials of what these own, in equal parts of its
    island's ranks, and to each what it owns; unsharded, half of each sum."""
    ranks, islands = piece.group.contributors, Counter(island_of.values())
    others = len(islands) - 1
    if not piece.group.sharded:
        return {rank: 2 * others / (others + 1) / islands[island_of[rank]] for rank in ranks}
    owned = {rank: cut.size / piece.numel for rank, cut in zip(ranks, piece.cuts, strict=True)}
    at_home = Counter[str]()
    for rank in ranks:
        at_home[island_of[rank]] += owned[rank]  # type: ignore[assignment]
    return {
        rank: reduces * (1 - at_home[island]) / islands[island] + gathers * others * owned[rank]
        for rank, island in island_of.items()
    }
