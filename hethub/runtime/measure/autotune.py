"""Ranks measure themselves before a plan is made (Poplar, arXiv 2408.12596): the largest batch, and the time of every
size.

Nothing is tried that an extrapolation of what was counted so far does not expect to fit, so the edge of memory is found
without falling over it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from hethub.communicator import Rendezvous
from hethub.kernels.bodies import uncompiled
from hethub.kernels.device import Device
from hethub.predictor.cost.profile import DeviceProfile
from hethub.predictor.cost.software import element_bytes, gradient_bytes
from hethub.predictor.memory.state import optimizer_bytes
from hethub.runtime.launch.consensus import all_gather, consensus
from hethub.runtime.measure.measurement_cache import MeasurementCache
from hethub.runtime.measure.profiler import build_bench_stage, measure_device
from hethub.runtime.measure.speed_classes import Measured, combine
from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.model.stage import MicrobatchInput
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.cluster import ClusterSpec, Place
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, TrainSpec
from hethub.spec.layout.tensors import tp_degrees
from hethub.spec.model import ModelSpec

SECONDS_PER_POINT = 0.1
MOST_SAMPLES = 256  # in a micro-batch: beyond, time per sample no longer falls
MEASURING_SECONDS = 1800.0  # how long ranks wait for each other's measurements


def measure_ranks(job: Job, device: Device, meeting: Rendezvous, cluster: ClusterSpec) -> Measured:
    """What every rank measured of itself, or remembers, unless the job always measures; the same on every rank. Raises
    BadInput."""
    reserve = job.spec.constraints.reserve
    cache = MeasurementCache(job.model, job.spec.train, device, meeting.local_rank, meeting.size, reserve)
    known = None if job.spec.measure == "always" else consensus(meeting, "measurements", cache.load)
    remembered = all_gather(meeting, "remembered measurements", known is not None)
    unsaved = None
    if not all(remembered):
        all_gather(meeting, "start of measuring", None)  # all at once, as they will compute
        place = cluster.places[meeting.rank]
        accelerator, limit = place.accelerator, limit_bytes_of(place, device, reserve)
        known = consensus(
            meeting,
            "own measurements",
            lambda: measure_rank(job.model, job.spec.train, accelerator, device, limit, meeting.size),
            patience_seconds=MEASURING_SECONDS,
        )
        device.release_memory()  # for libraries that allocate beside torch; and the peak is training's from here on
        unsaved = cache.save(known)
    assert known is not None
    rows = all_gather(meeting, "curves", {"curve": known.to_dict(), "unsaved": unsaved})
    curves = [DeviceProfile.model_validate(row["curve"]) for row in rows]
    found = combine(job.model, cluster, curves, fresh=not all(remembered))
    warnings = dict.fromkeys(f"warning: {row['unsaved']}" for row in rows if row["unsaved"])
    return replace(found, lines=[*found.lines, *warnings])


def limit_bytes_of(place: Place, device: Device, reserve: float) -> int:
    """Return how much of this rank's memory a micro-batch may take: what is free on a device now, else what the cluster file leaves."""
    free = device.free_memory_bytes()
    return int((place.node.usable_memory_bytes if free is None else free) * (1.0 - reserve))


def measure_rank(
    model: ModelSpec, train: TrainSpec, accelerator: AcceleratorSpec, device: Device, limit_bytes: int, num_ranks: int
) -> DeviceProfile:
    """This rank's largest micro-batch and its times for sizes up to it; without a largest one where not even one sample
    fits with the whole model, so that a plan which divides the model is not held to it. Raises BadInput."""
    most = min(train.global_batch, MOST_SAMPLES)
    state = resident_bytes(model, train, num_ranks)
    count = kept_bytes(model, train, accelerator, device)
    largest = largest_batch(lambda size: state + count(size), limit_bytes, most)
    size = max(1, largest)
    while True:
        sizes = sorted({*(1 << power for power in range(size.bit_length())), size})
        try:
            profile = measure_device(
                model, accelerator, train.precision, device, seq_lens=[train.seq_len], micro_batches=sizes,
                tps=measured_degrees(model, device, num_ranks), seconds_per_point=SECONDS_PER_POINT,
            )  # fmt: skip
        except torch.OutOfMemoryError:  # what surrounds a layer took more than was counted
            if size == 1:
                raise BadInput(
                    f"one layer of model '{model.name}' on one sequence of {train.seq_len} tokens does not fit the memory of "
                    f"{accelerator.name}; shorten train.seq_len, end what else uses the device, or set measure: never."
                ) from None
            size //= 2
        else:
            return profile.replace(largest_micro_batch=size if largest else None)


def measured_degrees(model: ModelSpec, device: Device, num_ranks: int) -> list[int]:
    """The tensor-parallel degrees whose shards are measured: on a device those that so many ranks can have, each of which
    costs a compilation at every size; a CPU's other degrees are reckoned."""
    return [degree for degree in tp_degrees(model) if degree <= (num_ranks if device.is_gpu else 1)]


def resident_bytes(model: ModelSpec, train: TrainSpec, num_ranks: int) -> int:
    """Weights, gradients and this rank's share of the optimizer state, were the whole model on every rank (ZeRO-1)."""
    width = element_bytes(train.precision)
    return model.parameters * (width + gradient_bytes(width)) + model.parameters * optimizer_bytes(width) // num_ranks


def kept_bytes(
    model: ModelSpec, train: TrainSpec, accelerator: AcceleratorSpec, device: Device
) -> Callable[[int], int]:
    """A function that runs one layer on so many samples, forward and backward, and says what all layers would keep for
    backward; it lets torch.OutOfMemoryError out."""
    stage = build_bench_stage(model, accelerator, train.precision, device, train.seq_len, 1)

    def count(samples: int) -> int:
        meter = MemoryMeter([stage.storage.weights, stage.storage.grads, stage.cos, stage.sin])
        tokens = stage.token_layout(MicrobatchInput(batch=samples))
        x = torch.zeros(
            samples * stage.seq_len, stage.hidden, dtype=stage.storage.weights.dtype, device=device.torch_device
        )
        with uncompiled():  # many sizes are tried, once each
            with meter.counting():
                result = stage.layers[0](x.requires_grad_(), tokens)
            kept = meter.peak_bytes * model.layers
            result.backward(torch.ones_like(result))
        return kept

    return count


def largest_batch(bytes_of: Callable[[int], int], limit_bytes: int, most: int) -> int:
    """The largest size up to `most` whose `bytes_of` stay within the limit; 0 where one sample is too many.

    Doubles, then halves the gap. A size is only tried where the line through the two last tries expects it to fit, so
    that memory which grows no faster than it did is never exceeded. A size that runs out of memory does not fit.
    """
    tried: list[tuple[int, int]] = []

    def fits(size: int) -> bool:
        if len(tried) > 1:
            (a, bytes_a), (b, bytes_b) = sorted(tried)[-2:]
            if bytes_b + (bytes_b - bytes_a) / (b - a) * (size - b) > limit_bytes:
                return False
        elif tried and tried[0][1] * size / tried[0][0] > limit_bytes and size > 2:
            return False
        try:
            found = bytes_of(size)
        except torch.OutOfMemoryError:
            return False
        if found <= limit_bytes:
            tried.append((size, found))
        return found <= limit_bytes

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
