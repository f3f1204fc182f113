"""Plans over a real wire: ranks in two network namespaces train them, and the kernel counts what their cards send."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hethub.communicator import Rendezvous, World, connect
from hethub.communicator.joining.rendezvous import agree_on_token
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.runtime.data import Dataset
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.measure.profiler import profile_world
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.hosts.namespaces import ADDRESSES, Namespaces
from tests.support.ranks import start_ranks, values

MODEL = ModelSpec(name="wire", layers=4, hidden=256, heads=4, kv_heads=4, ffn=704, vocab=512, max_seq_len=128)
SEQ_LEN = 128
TRAIN = TrainSpec(steps=10_000, warmup_steps=1, lr=1e-4, min_lr=1e-5)
HEADERS = 66  # bytes of a packet: Ethernet 14, IP 20, TCP 32 with its timestamps


class Wired(NamedTuple):
    """A plan whose ranks lie half on one machine, half on the other."""

    gbps: float
    stages: list[dict[str, Any]]
    schedule: str = "1f1b"
    islands: int = 1

    @property
    def size(self) -> int:
        return sum(len(replica["ranks"]) for stage in self.stages for replica in stage["replicas"])

    @property
    def samples(self) -> int:
        return sum(int(replica["samples"]) for replica in self.stages[0]["replicas"])


def stage(
    chunks: list[list[int]], *ranks: int, samples: int = 32, micro_batch: int = 2, zero: int = 0
) -> dict[str, Any]:
    """A stage of one-rank replicas that share the samples."""
    part = samples // len(ranks)
    replicas = [{"ranks": [rank], "samples": part, "micro_batch": micro_batch} for rank in ranks]
    return {"layers": chunks, "replicas": replicas, "zero": zero}


FIRST, SECOND, ALL = [[0, 2]], [[2, 4]], [[0, 4]]
PLANS = {
    "pp": Wired(0.1, [stage(FIRST, 0), stage(SECOND, 1)]),
    "pp, gpipe": Wired(0.2, [stage(FIRST, 0), stage(SECOND, 1)], "gpipe"),
    "pp, interleaved": Wired(
        0.3, [stage([[0, 1], [2, 3]], 0), stage([[1, 2], [3, 4]], 1)], "interleaved"
    ),
    "dp": Wired(0.1, [stage(ALL, 0, 1, samples=8)]),
    "dp, zero 1": Wired(0.3, [stage(ALL, 0, 1, samples=8, zero=1)]),
    "dp, zero 3": Wired(1.0, [stage(ALL, 0, 1, samples=8, micro_batch=2, zero=3)]),
    "dp, zero 3, layered": Wired(1.0, [stage(ALL, 0, 1, samples=8, micro_batch=2, zero=3)], "layered"),
    "dp, zero 2": Wired(0.5, [stage(ALL, 0, 1, samples=8, micro_batch=2, zero=2)]),
    "dp, zero 1, two islands": Wired(0.2, [stage(ALL, 0, 1, samples=8, zero=1)], islands=2),
    "pp, two islands": Wired(0.2, [stage(FIRST, 0), stage(SECOND, 1)], islands=2),
    "dp over the link, pp inside": Wired(0.2, [stage(FIRST, 0, 2, samples=16), stage(SECOND, 1, 3, samples=16)]),
}  # fmt: skip


def layout_of(plan: Wired) -> Layout:
    """Of the plan, on two machines of CPU cores behind one card each."""
    nodes = [
        {
            "name": name, "accelerator": "CPU-core", "accelerators": plan.size // 2, "gbps_per_nic": plan.gbps,
            **({"vendor": f"vendor-{name}"} if plan.islands == 2 else {}),
        }
        for name in "ab"
    ]  # fmt: skip
    cluster = ClusterSpec.model_validate({"name": "wire", "nodes": nodes})
    spec = PlanSpec.model_validate(
        {
            "model": MODEL.name, "cluster": "wire", "global_batch": plan.samples, "seq_len": SEQ_LEN,
            "precision": "fp32", "schedule": plan.schedule, "stages": plan.stages,
        }
    )  # fmt: skip
    return bind(spec, MODEL, cluster)


def planned_bytes(layout: Layout) -> dict[int, float]:
    """By machine, what a step's messages and collectives send over its card: the figures that predictions price."""
    costs, found = PlanCosts(layout, HETHUB, packaged()), defaultdict[int, float](float)
    carried = [(res, seconds * costs.network.rate(res)) for (_, res), seconds in costs.loads.messages.items()]
    for (kind, machine, way), num_bytes in [*carried, *costs.loads.traffic.by_resource().items()]:
        if kind == "cards" and way == "out":
            assert isinstance(machine, int)
            found[machine] += num_bytes
    return found


def meet(store: dist.Store, rank: int, plan: Wired) -> World:
    """The world of ranks in two namespaces."""
    half = plan.size // 2
    meeting = Rendezvous(
        store=store, rank=rank, size=plan.size, local_rank=rank % half, local_size=half,
        address=ADDRESSES[rank // half], interface=None, token=agree_on_token(store, rank, None),
    )  # fmt: skip
    islands = [[*range(half)], [*range(half, plan.size)]] if plan.islands == 2 else None
    return connect(meeting, islands=islands)


def sent(device: str) -> tuple[int, int]:
    """Bytes and packets that an interface of this thread's namespace has sent."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counted = line.partition(":")
        if name.strip() == device:
            return int(counted.split()[8]), int(counted.split()[9])
    raise KeyError(device)


def run(
    rank: int, store: dist.Store, found: Namespaces, name: str, steps: int, rounds: int, profiles: bool
) -> dict[str, Any]:
    """What this rank measured: profiles around every round, seconds of a step, and the bytes that its machine's card
    sent in one."""
    torch.set_num_threads(1)
    plan = PLANS[name]
    side = rank // (plan.size // 2)
    found.enter(side)
    world, layout = meet(store, rank, plan), layout_of(plan)
    sizes = sorted({replica["micro_batch"] for own in plan.stages for replica in own["replicas"]})

    def profile() -> dict[str, Any]:
        machines = [place.machine for place in layout.cluster.places]
        return profile_world(
            world, MODEL, find_accelerator("CPU-core"), "fp32", machines, seq_lens=[SEQ_LEN], micro_batches=sizes,
            seconds_per_point=0.1,
        ).to_dict()  # fmt: skip

    tokens = np.random.default_rng(0).integers(0, MODEL.vocab, 100_000)
    dataset = Dataset.one(
        name="random", tokens=tokens, seq_len=SEQ_LEN, seed=1, vocab=MODEL.vocab, max_token=MODEL.vocab - 1,
        end_of_document=None, tokenizer="none",
    )  # fmt: skip
    trainer = Trainer(layout, world, dataset, TRAIN)
    trainer.initialise()
    trainer.run_step(1)
    trainer.stepping.flush()  # its weights have come, as those of every round's last step: what is sent is counted with it
    taken, seconds, payload = [profile()] if profiles else [], [], 0
    for own in range(rounds):
        world.barrier()
        before, start = sent(found.devices[side]), time.perf_counter()
        for step in range(steps):
            trainer.run_step(2 + own * steps + step)
        trainer.stepping.flush()
        seconds.append((time.perf_counter() - start) / steps)
        world.barrier()
        num_bytes, packets = (after - first for after, first in zip(sent(found.devices[side]), before, strict=True))
        payload += num_bytes - HEADERS * packets
        if profiles:
            taken.append(profile())
    world.close()
    return {"profiles": taken, "seconds": seconds, "bytes": payload / rounds / steps}


def measured(found: Namespaces, name: str, steps: int, rounds: int, *, profiles: bool = True) -> list[dict[str, Any]]:
    """What every rank measured of a plan, the link shaped to its rate."""
    plan = PLANS[name]
    found.set_gbps(plan.gbps)
    return values(start_ranks(plan.size, run, found, name, steps, rounds, profiles, timeout_seconds=600))


def carried(name: str, ranks: list[dict[str, Any]]) -> list[float]:
    """By machine, bytes that its card sent over bytes that the plan sends, of those that send some."""
    plan, planned = PLANS[name], planned_bytes(layout_of(PLANS[name]))
    return [ranks[machine * plan.size // 2]["bytes"] / num_bytes for machine, num_bytes in sorted(planned.items())]
