"""What tiles keep between forward and backward, at the peak of a replica's schedule."""

from typing import NamedTuple

from hethub.predictor.peak import Tiles
from hethub.predictor.software import Software
from hethub.spec.layout import Layout, Seat
from hethub.spec.schedule import Kind, actions

KEPT_UNDER_SELECTIVE = 0.45  # of a layer's activations, where every second product is run again


class KeptPerSample(NamedTuple):
    """Bytes that one sample keeps on a rank: of a layer in full, of its input, and at the model's ends."""

    layer: float
    input: float
    first: float
    last: float
    put_off: float  # of a layer between backward and weight gradients, where these are put off


def held_tiles(layout: Layout, seat: Seat, kept: KeptPerSample, fraction: float = 1.0) -> tuple[Tiles, float]:
    """Activations on the accelerator when the rank is fullest, and in host memory; `fraction` of a layer is kept
    (selective recompute)."""
    stage, spec = layout.stages[seat.stage], layout.replica(seat.stage, seat.replica)
    again = stage.recompute == "full"
    layer = kept.input if again else fraction * kept.layer
    held, put_off = _held(layout, seat)
    head = held[-1] * kept.last * (seat.stage == layout.num_stages - 1)  # gone with the topmost part
    ends = held[0] * kept.first * (seat.stage == 0) + head
    sizes = [part.size for part in layout.parts(seat.stage)]
    by_part = [
        size * (samples * layer + later * kept.put_off)
        for samples, later, size in zip(held, put_off, sizes, strict=True)
    ]
    running = spec.micro_batch * (kept.layer - kept.input) if again else 0.0
    if "activations" not in stage.offload:
        freed = (*by_part[:-1], by_part[-1] + head)
        return Tiles(ends + sum(by_part) + running, spec.micro_batch * layer, freed), 0.0
    near = min(sum(by_part), 2 * spec.micro_batch * layer)  # of the layer at work and the one copied beside it
    return Tiles(ends + near + running, 0.0, (*[0.0] * (len(sizes) - 1), head)), sum(by_part)


def _held(layout: Layout, seat: Seat) -> tuple[list[float], list[float]]:
    """Samples held by each part of the stage, and between backward and weight gradients, when most layers are held."""
    spec, parts = layout.replica(seat.stage, seat.replica), layout.parts(seat.stage)
    if layout.plan.schedule in ("layered", "ministages"):
        return [float(spec.samples)] * len(parts), [0.0] * len(parts)
    if layout.plan.schedule not in ("interleaved", "zero_bubble") and not _unlike_rounds(layout, seat.stage):
        held = min(layout.in_flight[seat.stage][seat.replica] * spec.micro_batch, spec.samples)
        return [float(held)], [0.0]
    return _walked(layout, seat)


def _unlike_rounds(layout: Layout, stage: int) -> bool:
    """Whether some replicas of a stage in rounds have fewer tiles than others, and so rounds without one."""
    counts = {-(-spec.samples // spec.micro_batch) for spec in layout.stages[stage].replicas}
    return len(counts) > 1 and layout.plan.runs_in_rounds(stage)


def _walked(layout: Layout, seat: Seat) -> tuple[list[float], list[float]]:
    """As `_held`, action by action."""
    sizes = [part.size for part in layout.parts(seat.stage)]
    held, put_off = [0.0] * len(sizes), [0.0] * len(sizes)
    most, found = -1.0, (held, put_off)
    weighs = layout.plan.schedule == "zero_bubble"
    for act in actions(layout, seat.stage, seat.replica):
        if act.tile is None:
            continue
        samples = act.tile.samples.size
        if act.kind is Kind.FORWARD:
            held[act.part] += samples
        elif act.kind is Kind.BACKWARD:
            held[act.part] -= samples
            put_off[act.part] += samples * weighs
        else:
            put_off[act.part] -= samples
        now = sum((a + b) * size for a, b, size in zip(held, put_off, sizes, strict=True))
        if now > most:
            most, found = now, (list(held), list(put_off))
    return found


def kept_per_sample(layout: Layout, share: float, software: Software, width: int) -> KeptPerSample:
    """What a sample keeps on a rank with `share` of the heads and columns."""
    model = layout.model
    tokens = layout.plan.seq_len / software.context_parallel
    hidden = model.hidden * (share if software.sequence_parallel else 1.0)
    layer = tokens * _layer_bytes_per_token(layout, share, hidden, software, width)
    query, kv, columns = _widths(layout, share)
    put_off = tokens * width * (3 * hidden + 2 * query + 2 * kv + 3 * columns)
    return KeptPerSample(
        layer=layer,
        input=tokens * hidden * width,
        first=tokens * 9.0,  # token ids and which of them are held
        last=tokens * 2 * hidden * width,  # the final norm's input, the loss's gradient
        put_off=put_off,
    )


def score_bytes(layout: Layout, share: float, software: Software, width: int) -> float:
    """What unfused attention keeps of a sample's scores in a layer."""
    heads, seq = layout.model.heads * share, layout.plan.seq_len
    return 2.5 * width * heads * seq**2 / software.context_parallel


def _widths(layout: Layout, share: float) -> tuple[float, float, float]:
    """Elements per token of queries, of keys (as many as values), and of the MLP, on a rank."""
    model = layout.model
    kv = max(model.num_kv_heads * share, 1.0) * model.head_size
    return model.heads * model.head_size * share, kv, model.ffn * share


def _layer_bytes_per_token(layout: Layout, share: float, hidden: float, software: Software, width: int) -> float:
    """What one layer keeps per token (method of arXiv 2205.05198, §4), for hethub's layers or an eager framework's.

    Ours: both norms' inputs and results, rotated queries and keys, values, attention's result, and for SwiGLU gate, up
    and their product; norms' scales and attention's log-sums in fp32.
    """
    model, (query, kv, columns) = layout.model, _widths(layout, share)
    columns *= (3 if software.stack == "hethub" else 4) if model.is_gated else 2
    return width * (4 * hidden + 2 * query + 2 * kv + columns) + max(4, width) * (2 + model.heads * share)
