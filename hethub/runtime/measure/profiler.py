"""Measures accelerators: the figures of a profile, by all ranks at once, as they share a machine in training."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import accumulate, product
from statistics import mean, median
from time import perf_counter, process_time

import torch
from torch import Tensor

import hethub
from hethub.communicator import World
from hethub.kernels.bodies import compiles_on
from hethub.kernels.device import Clock, Device, Stamp
from hethub.kernels.squares import sum_of_squares
from hethub.predictor.cost.profile import DeviceProfile, LayerTiming, PartTiming, ProfileSpec, merge
from hethub.runtime.measure.link_profiler import measure_links
from hethub.runtime.model.initial import initialise
from hethub.runtime.model.layers import Documents, rms_norm
from hethub.runtime.model.loss import head_loss
from hethub.runtime.model.stage import MicrobatchInput, Stage
from hethub.runtime.model.tensor_parallel import TensorGroup, embed
from hethub.runtime.state.optimizer import fused_adamw
from hethub.runtime.state.storage import DTYPES, FlatStorage
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.layout.state import StateMap
from hethub.spec.layout.tensors import tp_degrees
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec

# Passes that a device is given behind each other, as the layers of a step are: the host is ahead by the last of them, if it
# ever will be, and what that one takes is the device's time or, where launching takes longer, the host's.
IN_A_ROW = 8
LEAST_RUNNING = 0.75  # of the time, for a process that has its core to itself
Progress = Callable[[str], None]


def measure_device(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    precision: Precision,
    device: Device,
    *,
    seq_lens: Sequence[int],
    micro_batches: Sequence[int],
    tps: Sequence[int],
    seconds_per_point: float,
    ready: Callable[[], None] = lambda: None,
    progress: Progress = lambda text: None,
) -> DeviceProfile:
    """One layer, the embedding and the head over micro-batch, sequence length and TP, on this rank's device.

    Shards are measured without their group, so the figures are compute only. `ready` is called before each point: a
    barrier there makes all ranks of a machine measure at the same time, as they will compute.
    """
    layers: list[LayerTiming] = []
    parts: list[PartTiming] = []
    for seq_len, tp in _shards(model, seq_lens, tps):
        stage = build_bench_stage(model, accelerator, precision, device, seq_len, tp)
        for micro_batch in micro_batches:
            progress(f"layer, {micro_batch} x {seq_len} tokens, TP {tp}")
            place = {"micro_batch": micro_batch, "seq_len": seq_len, "tp": tp}
            bench = _Bench(stage, device, seconds_per_point)
            ready()
            forward, backward = bench.layer(micro_batch)
            layers.append(LayerTiming(**place, forward_seconds=forward, backward_seconds=backward))
            forward, backward = bench.embedding(micro_batch)
            parts.append(PartTiming(part="embedding", **place, forward_seconds=forward, backward_seconds=backward))
            forward, backward = bench.head(micro_batch)
            parts.append(PartTiming(part="head", **place, forward_seconds=forward, backward_seconds=backward))
    return DeviceProfile(
        accelerator=accelerator.name,
        precision=precision,
        layers=tuple(layers),
        parts=tuple(parts),
        optimizer_seconds_per_parameter=_optimizer(device, precision, seconds_per_point),
        compiled=compiles_on(device.torch_device),
    )


def _shards(model: ModelSpec, seq_lens: Sequence[int], tps: Sequence[int]) -> list[tuple[int, int]]:
    """The sequence lengths with the degrees that the model can be cut in."""
    return list(product(seq_lens, sorted(set(tps) & set(tp_degrees(model)))))


def warm_up(layout: Layout, rank: int, device: Device, *, document_mask: bool = False) -> None:
    """Runs a layer, and the ends of the model that the rank has, on microbatches of each of its sizes: bodies are compiled
    then, and a device's kernels are loaded, those of documents too where they are masked and those of updates, which a
    stage of many chunks does between its messages. Else the first microbatch of a deep pipeline would wait for one stage's
    compiler after the other."""
    own, plan = layout.assignment_of[rank], layout.plan
    accelerator, replica = layout.cluster.places[rank].accelerator, layout.replica(own.stage, own.replica)
    stage = build_bench_stage(
        layout.model, accelerator, plan.precision, device, plan.seq_len, replica.tp, replica.tensor_shares, own.position
    )
    bench = _Bench(stage, device, 0.0)
    for size in {microbatch.samples.size for microbatch in layout.microbatches_of(own.stage, own.replica)}:
        bench.layer(size)
        if document_mask:
            bench.layer(size, _halves(size, plan.seq_len, device))
        if own.stage == 0:
            bench.embedding(size)
        if own.stage == layout.num_stages - 1:
            bench.head(size)
    if device.is_gpu:
        _load_update(device, plan.precision)


def _load_update(device: Device, precision: Precision) -> None:
    """Loads the kernels of a norm and of an update."""
    update = _Update(device, precision, numel=2**12)
    torch.stack([sum_of_squares([update.grad, update.grad])] * 2).sum()
    update.grad.mul_(0.5)  # clipped
    update()


def _halves(batch: int, seq_len: int, device: Device) -> Documents:
    """Samples of two documents each."""
    sizes = (seq_len // 2, seq_len - seq_len // 2) * batch
    starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(device.torch_device)
    return Documents(sizes=sizes, starts=starts)


def build_bench_stage(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    precision: Precision,
    device: Device,
    seq_len: int,
    tp: int,
    tensor_shares: Sequence[float] | None = None,
    position: int = 0,
) -> Stage:
    """A one-layer model's shard at `position` of `tp`, equal or as `tensor_shares` cut it, with embedding and head."""
    one = model.replace(layers=1)
    cluster = ClusterSpec.model_validate(
        {"name": "bench", "nodes": [{"name": "n", "accelerator": accelerator, "accelerators": tp}]}
    )
    replica = {"ranks": list(range(tp)), "micro_batch": 1, "samples": 1, "tensor_shares": tensor_shares}
    plan = PlanSpec.model_validate(
        {"model": one.name, "cluster": "bench", "global_batch": 1, "seq_len": seq_len, "precision": precision,
         "stages": [{"layers": [[0, 1]], "replicas": [replica]}]}
    )  # fmt: skip
    layout = bind(plan, one, cluster)
    own = layout.assignment_of[position]
    storage = FlatStorage(StateMap(layout), own, precision, device.torch_device)
    initialise(storage, one, seed=0)
    for parameter in storage.parameters.values():
        parameter.start_step(2**40, lambda done: None)
    return Stage(layout, own, storage, TensorGroup(None, is_cut=tp > 1))


class _Bench:
    """Repeats one operation forward and backward until the time is up."""

    def __init__(self, stage: Stage, device: Device, seconds: float) -> None:
        self.stage, self.device, self.seconds = stage, device, seconds

    def layer(self, batch: int, documents: Documents | None = None) -> tuple[float, float]:
        stage = self.stage
        tokens = stage.token_layout(MicrobatchInput(batch=batch, documents=documents))
        x = self._hidden(batch)
        return self._repeated(lambda: stage.layers[0](x, tokens), torch.ones_like(x))

    def embedding(self, batch: int) -> tuple[float, float]:
        stage, tokens = self.stage, self._tokens(batch).reshape(-1)
        assert stage.embedding is not None
        weight, first = stage.embedding, stage.shares.vocab.start
        return self._repeated(lambda: embed(tokens, first, stage.group, weight), torch.ones_like(self._hidden(batch)))

    def head(self, batch: int) -> tuple[float, float]:
        stage, x, targets = self.stage, self._hidden(batch), self._tokens(batch).reshape(-1)
        assert stage.norm is not None
        assert stage.head is not None
        norm, head, first = stage.norm, stage.head, stage.shares.vocab.start
        return self._repeated(
            lambda: head_loss(rms_norm(x, norm, stage.eps), targets, first, 1.0, stage.group, head), None
        )

    def _hidden(self, batch: int) -> Tensor:
        weights = self.stage.storage.weights
        return torch.randn(
            batch * self.stage.seq_len, self.stage.hidden, dtype=weights.dtype, device=weights.device
        ).requires_grad_()

    def _tokens(self, batch: int) -> Tensor:
        held = self.stage.shares.vocab
        return torch.randint(
            held.start, held.stop, (batch, self.stage.seq_len), device=self.stage.storage.weights.device
        )

    def _repeated(self, run: Callable[[], Tensor], grad: Tensor | None) -> tuple[float, float]:
        clock = Clock(self.device)

        def stamps() -> tuple[Stamp, Stamp, Stamp]:
            start = clock.stamp()
            result = run()
            middle = clock.stamp()
            result.backward(grad)
            return start, middle, clock.stamp()

        in_a_row = IN_A_ROW if self.device.is_gpu and self.seconds else 1  # what only warms up needs no figure

        def once() -> tuple[float, float]:
            self.device.synchronize()
            start, middle, end = [stamps() for _ in range(in_a_row)][-1]
            return clock.between(start, middle), clock.between(middle, end)

        run().backward(grad)  # the first pass allocates
        forward, backward = repeated(once, self.seconds, on_device=self.device.is_gpu)
        return forward, backward


LEAST_STATE, MOST_STATE = 2**22, 2**27  # elements that an optimizer's step is timed on: far more than caches hold
STATE_BYTES = 40  # of an element, at most (fp64): weight, master, gradient, two moments
STATE_SHARE = 0.25  # of the device's free memory


def _optimizer(device: Device, precision: Precision, seconds: float) -> float:
    """Seconds per parameter of what a step does to a rank's own state."""
    free = device.free_memory_bytes()
    numel = LEAST_STATE if free is None else max(LEAST_STATE, min(MOST_STATE, int(STATE_SHARE * free) // STATE_BYTES))
    update, clock = _Update(device, precision, numel), Clock(device)

    def once() -> tuple[float, ...]:
        device.synchronize()
        start = clock.stamp()
        update()
        return (clock.between(start, clock.stamp()),)

    once()
    (found,) = repeated(once, seconds, on_device=device.is_gpu)
    return found / numel


class _Update:
    """What a step does to so many elements of a rank's own state: norm, the fused AdamW that training calls, the weight
    written back."""

    def __init__(self, device: Device, precision: Precision, numel: int) -> None:
        self.weights = torch.zeros(numel, dtype=DTYPES[precision], device=device.torch_device)
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        self.state = [torch.zeros(numel, dtype=wide, device=device.torch_device) for _ in range(3)]
        self.grad = torch.ones(numel, dtype=wide, device=device.torch_device)
        self.updates, self.train = torch.zeros((), device=device.torch_device), TrainSpec()

    def __call__(self) -> None:
        sum_of_squares([self.grad])
        fused_adamw([self.state], [self.grad], [self.updates], self.train, lr=self.train.lr, decays=True)
        self.weights.copy_(self.state[0])


def repeated(once: Callable[[], tuple[float, ...]], seconds: float, *, on_device: bool) -> tuple[float, ...]:
    """What `once` returns, repeated for so many seconds: medians, or means where the process stood still for long.

    A process held to a part of a core runs at full speed for that part of every period and then stands still, which the
    median of short passes would not see; elsewhere means would count every other process's passing work. A process whose
    device computes only waits for it.
    """
    used, start, found = process_time(), perf_counter(), list[tuple[float, ...]]()
    while len(found) < 3 or perf_counter() < start + seconds:
        found.append(once())
    stood_still = not on_device and process_time() - used < LEAST_RUNNING * (perf_counter() - start)
    middle = mean if stood_still else median
    return tuple(middle(figure) for figure in zip(*found, strict=True))


def profile_world(
    world: World,
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    precision: Precision,
    machines: Sequence[int],
    *,
    seq_lens: Sequence[int],
    micro_batches: Sequence[int],
    tps: Sequence[int] = (1,),
    seconds_per_point: float = 0.3,
    progress: Progress = lambda text: None,
) -> ProfileSpec:
    """The merged profile of all ranks' accelerators and the links between them; the same on every rank."""
    points = len(_shards(model, seq_lens, tps)) * len(micro_batches)
    most = max(world.all_gather_objects(points))  # ranks of small machines have fewer, and wait with the others
    device = measure_device(
        model, accelerator, precision, world.device, seq_lens=seq_lens, micro_batches=micro_batches, tps=tps,
        seconds_per_point=seconds_per_point, ready=world.barrier, progress=progress,
    )  # fmt: skip
    for _ in range(most - points):
        world.barrier()
    progress("links")
    links = measure_links(world, machines) if world.size > 1 else []
    own = ProfileSpec(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), hethub=hethub.__version__, software=f"torch {torch.__version__}",
        model=model, devices=(device,),
    )  # fmt: skip
    merged = merge(ProfileSpec.model_validate(row) for row in world.all_gather_objects(own.to_dict()))
    return merged.replace(links=tuple(links))
