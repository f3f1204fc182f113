"""The activations that microbatches keep between forward and backward, when a replica holds the most."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hethub.predictor.cost.constants import NARROW
from hethub.predictor.cost.software import Software
from hethub.predictor.memory.parameters import RankWidths
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.execution import Kind, actor_order
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Recompute
from hethub.spec.schedule.orders import NO_MICROBATCH

KEPT_UNDER_SELECTIVE = 0.45  # of a layer's activations, where every second product is run again


class KeptPerSample(NamedTuple):
    """The bytes that one sample keeps on a rank: of a layer in full or in part, of its input, and of the model's ends."""

    layer: float
    input: float
    products: float  # of a layer where some products alone are kept
    first: float
    last: float
    deferred_wgrad: float  # of a layer between backward and weight gradients, where these are put off


class HeldActivations(NamedTuple):
    """The activations when a rank is fullest: those of all microbatches, what a microbatch frees with each layer of its
    backward (or a chunk with all its microbatches), and what is added when the head has ended."""

    activations: float
    freed_by_layer: float
    freed_by_chunk: tuple[float, ...]
    again: float  # of the layer that runs again when the head is through


def held_microbatches(
    layout: Layout, assignment: Assignment, kept: KeptPerSample, sizes: list[int], software: Software
) -> tuple[HeldActivations, float]:
    """Return the activations on the accelerator when the rank is fullest, and the bytes in host memory. `sizes` are the
    numbers of layers of the stage's model chunks."""
    stage = layout.stages[assignment.stage]
    layer = kept_of_layer(kept, stage.recompute, software)
    again = stage.recompute == "full" or software.kept_products != "all"
    held, deferred_wgrad = _held(layout, assignment, sizes)
    microbatch = layout.largest_microbatch(assignment.stage, assignment.replica)
    last = kept.last * (assignment.stage == layout.num_stages - 1)
    head = held[-1] * last  # gone with the topmost chunk
    ends = held[0] * kept.first * (assignment.stage == 0) + head
    # Two layers share one of the gradients put off, unless each has it copied to the host.
    deferred_wgrad_bytes = kept.deferred_wgrad + kept.input * ("activations" in stage.offload)
    by_chunk = [
        size * (samples * layer + later * deferred_wgrad_bytes)
        for samples, later, size in zip(held, deferred_wgrad, sizes, strict=True)
    ]
    running = microbatch * max(0.0, kept.layer - layer - last) if again else 0.0  # its head is through
    lower = microbatch * (kept.layer - layer) - running if again else 0.0  # more, of a layer that no head stands above
    away = 1.0 if "activations" in stage.offload else software.layers_in_host
    if not away:
        freed = (*by_chunk[:-1], by_chunk[-1] + head - lower)
        return HeldActivations(ends + sum(by_chunk) + running, microbatch * layer, freed, running), 0.0
    host = away * sum(by_chunk)
    near = sum(by_chunk) - host + min(host, 2 * microbatch * layer)  # the layer at work, the one copied beside it
    return HeldActivations(ends + near + running, 0.0, (*[0.0] * (len(sizes) - 1), head - lower), running), host


def _held(layout: Layout, assignment: Assignment, sizes: list[int]) -> tuple[list[float], list[float]]:
    """Return the samples that each chunk of the stage holds, and those between their backward and their weights' gradients, when
    the most layers are held."""
    spec = layout.replica(assignment.stage, assignment.replica)
    if layout.plan.goes_chunk_by_chunk:
        return [float(spec.samples)] * len(sizes), [0.0] * len(sizes)
    unlike_rounds = layout.plan.runs_in_rounds(assignment.stage) and not layout.joins_every_round(
        assignment.stage, assignment.replica
    )
    if layout.plan.schedule == "interleaved" or (layout.plan.defers_wgrad and unlike_rounds):
        return _walked(layout, assignment, sizes)
    if unlike_rounds:
        return [float(_most_in_rounds(layout, assignment))], [0.0]
    in_flight = layout.in_flight[assignment.stage][assignment.replica]
    actor = layout.actor_of(assignment.stage, assignment.replica)
    later = 0
    if layout.plan.defers_wgrad:  # forwards go on while weight gradients are put off
        num_microbatches = layout.loads[assignment.stage][actor].num_microbatches
        later = min(layout.deferred_wgrad[assignment.stage][actor], num_microbatches - in_flight) * spec.micro_batch
    return [float(min(in_flight * spec.micro_batch + later, spec.samples) - later)], [float(later)]


def _most_in_rounds(layout: Layout, assignment: Assignment) -> int:
    """Return the samples of the rounds under way when they hold the most of a replica that has no microbatch in some of
    them."""
    limit, sizes = layout.actor_limits[assignment.stage][0], _samples_by_turn(layout, assignment)
    held = sum(sizes[:limit])
    return max(accumulate((new - old for new, old in zip(sizes[limit:], sizes, strict=False)), initial=held))


def _samples_by_turn(layout: Layout, assignment: Assignment) -> list[int]:
    """Return the samples of the replica's own microbatch for each microbatch of its actor; 0 where it has none."""
    spec, load = layout.replica(assignment.stage, assignment.replica), layout.loads[assignment.stage]
    found = [0] * load[layout.actor_of(assignment.stage, assignment.replica)].num_microbatches
    numbers: Sequence[int] = range(len(found))
    if layout.plan.runs_in_rounds(assignment.stage):
        numbers = layout.round_numbers(assignment.stage, assignment.replica)
    for number in numbers:
        found[number] = spec.micro_batch
    found[numbers[-1]] = spec.samples - spec.micro_batch * (len(numbers) - 1)
    return found


def _walked(layout: Layout, assignment: Assignment, sizes: list[int]) -> tuple[list[float], list[float]]:
    """Return what `_held` returns, by going through the passes one by one."""
    held, later = [0.0] * len(sizes), [0.0] * len(sizes)
    now, most, found = 0, -1, (held, later)
    weighs, samples = layout.plan.defers_wgrad, _samples_by_turn(layout, assignment)
    actor = layout.actor_of(assignment.stage, assignment.replica)
    order, limit = actor_order(layout, assignment.stage, actor), layout.actor_limits[assignment.stage][actor]
    utmost = (limit + weighs * len(samples)) * max(samples) * max(sizes)
    for operation, index in zip(order.operation_of, order.index_of, strict=True):
        if index == NO_MICROBATCH:
            continue
        (kind, chunk), own = order.computing[operation], samples[index]
        if kind is Kind.FORWARD:
            held[chunk] += own
            now += own * sizes[chunk]
            if now > most:
                most, found = now, (list(held), list(later))
            if now == utmost:
                break
        elif kind is Kind.BACKWARD:
            held[chunk] -= own
            later[chunk] += own * weighs
            now -= own * sizes[chunk] * (not weighs)
        else:
            later[chunk] -= own
            now -= own * sizes[chunk]
    return found


def kept_of_layer(kept: KeptPerSample, recompute: Recompute, software: Software) -> float:
    """Return the bytes that one sample keeps of a layer until its backward."""
    if recompute == "full":
        return kept.input
    if software.kept_products != "all":
        return kept.products
    fraction = KEPT_UNDER_SELECTIVE if recompute == "selective" and software.selective_fraction is not None else 1.0
    return fraction * kept.layer


def kept_per_sample(
    layout: Layout, widths: RankWidths, software: Software, width: int, recompute: Recompute
) -> KeptPerSample:
    """Return what a sample keeps on a rank if an activation takes `width` bytes. The scores of unfused attention are included,
    unless attention is recomputed."""
    model = layout.model
    tokens = layout.plan.seq_len / software.context_parallel
    hidden = model.hidden * (widths.query / model.heads if software.sequence_parallel else 1.0)
    layer = tokens * _layer_bytes_per_token(model, widths, hidden, software, width)
    if not software.fused_attention and recompute != "selective":
        layer += _score_bytes(layout, widths, software, width)
    query, kv = widths.query * model.head_size, widths.kv * model.head_size
    deferred_wgrad = tokens * width * (3 * hidden + 2 * query + 2 * kv + 3 * widths.ffn)
    return KeptPerSample(
        layer=layer,
        input=tokens * hidden * width,
        products=tokens * width * (hidden + query + 2 * kv + hidden * (software.kept_products == "qkv and output")),
        first=tokens * 9.0,  # token ids and which of them are held
        last=tokens * 2 * hidden * width,  # the final norm's input, the loss's gradient
        deferred_wgrad=deferred_wgrad,
    )


def _score_bytes(layout: Layout, widths: RankWidths, software: Software, width: int) -> float:
    """Return the bytes that unfused attention keeps of a sample's scores in a layer: the result of softmax, and the mask and the
    result of dropout."""
    kept = 2 * width + 1 if software.attention_dropout else width
    return kept * widths.query * layout.plan.seq_len**2 / software.context_parallel


def _layer_bytes_per_token(
    model: ModelSpec, widths: RankWidths, hidden: float, software: Software, width: int
) -> float:
    """Return what one layer keeps for each token, in hethub or in an eager framework (method of arXiv 2205.05198, §4).

    hethub keeps the inputs and results of both norms, the rotated queries and keys, the values, the result of attention, and
    for SwiGLU gate, up and their product. The scales of norms and the log-sums of attention are in fp32. If products are
    narrower than activations, their inputs (the results of both norms, of attention and of the activation) are kept in
    8 bits, and the result of attention also in full, for its own backward.
    """
    query, kv = widths.query * model.head_size, widths.kv * model.head_size
    narrow = software.narrow_inputs and software.math in NARROW
    saved = narrow * ((width - 1) * (2 * hidden + widths.ffn) - query)
    columns = widths.ffn * ((4 if software.keeps_gate_activation else 3) if model.is_gated else 2)
    return width * (4 * hidden + 2 * query + 2 * kv + columns) - saved + max(4, width) * (2 + widths.query)
