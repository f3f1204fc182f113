"""A profiling on all ranks the launcher started: meet, connect, measure; one profile for all of them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hethub.kernels.bodies import choose
from hethub.kernels.device import Device
from hethub.predictor.cost.profile import ProfileSpec
from hethub.runtime.launch.session import session
from hethub.runtime.measure.profiler import profile_world
from hethub.spec.accelerator import Precision
from hethub.spec.job import CommunicatorSpec, Job, TrainSpec
from hethub.spec.layout.tensors import tp_degrees
from hethub.spec.model import ModelSpec

# Without a job: the layer of an 8 B Llama on devices, a small one on CPUs.
DEVICE_MODEL = ModelSpec(
    name="llama-8b-layer", layers=1, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, max_seq_len=8192
)
CPU_MODEL = ModelSpec(
    name="small-layer", layers=1, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=4096, max_seq_len=1024
)
MICRO_BATCHES = (1, 2, 4, 8)
TP_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: the layers of a model, in a precision, at a sequence length."""

    model: ModelSpec
    train: TrainSpec

    @property
    def micro_batches(self) -> list[int]:
        return [size for size in MICRO_BATCHES if size <= self.train.global_batch]

    def tps(self, ranks_of_a_node: int) -> list[int]:
        return [tp for tp in TP_DEGREES if tp <= ranks_of_a_node and tp in tp_degrees(self.model)]

    def num_points(self, ranks_of_a_node: int) -> int:
        return len(self.micro_batches) * len(self.tps(ranks_of_a_node))


def subject_of(job: Job | None, device: Device) -> Subject:
    """The job's model and batch, or what is sensible for the device."""
    if job is not None:
        return Subject(model=job.model, train=job.spec.train)
    if device.is_gpu:
        half: Precision = "bf16" if device.supports(torch.bfloat16) else "fp16"
        return Subject(model=DEVICE_MODEL, train=TrainSpec(seq_len=4096, precision=half))
    return Subject(model=CPU_MODEL, train=TrainSpec(seq_len=256))


def _communicator(job: Job | None) -> CommunicatorSpec | None:
    """The job's relay and lanes, which carry what links are measured by; the wire that predictions count; patience for
    ranks that measure longer than others."""
    if job is None:
        return None
    given, usual = job.spec.communicator, CommunicatorSpec()
    return given.replace(wire="exact", timeout_seconds=max(given.timeout_seconds, usual.timeout_seconds))


def profile_ranks(job: Job | None, progress: Callable[[int, int, str], None]) -> tuple[ProfileSpec, bool]:
    """The profile of every accelerator and link of the started ranks, and whether this rank is the one to speak.

    `progress(done, total, what)` is told of every point. Raises BadInput as `hethub train` does, RunFailed afterwards.
    """
    with session(job, _communicator(job)) as (world, cluster):
        subject, place = subject_of(job, world.device), cluster.places[world.rank]
        choose(subject.train.compile)  # layers as the job runs them
        ranks_of_a_node = sum(other.machine == place.machine for other in cluster.places)
        total, done = subject.num_points(ranks_of_a_node) + 1, itertools.count()
        profile = profile_world(
            world, subject.model, place.accelerator, subject.train.precision, [p.machine for p in cluster.places],
            seq_lens=[subject.train.seq_len], micro_batches=subject.micro_batches, tps=subject.tps(ranks_of_a_node),
            progress=lambda what: progress(next(done), total, what),
        )  # fmt: skip
        return profile, world.rank == 0
