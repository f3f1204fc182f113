"""The profiler on real ranks: every level of link, every point asked for, one profile on all ranks, and it predicts."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hethub.predictor import predict
from hethub.predictor.cost.profile import ProfileSpec
from tests.predictor.plans import TINY, cluster, uniform

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

from tests.support.job_files import write_job
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks


def profile_on_rank(world: Any, sizes: tuple[int, ...] = (4,)) -> dict[str, Any]:
    from hethub.runtime.measure.profiler import profile_world
    from hethub.spec.accelerator import find_accelerator

    machines = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    tps = [tp for tp in (1, 2) if tp <= sizes[machines[world.rank]]]
    return profile_world(
        world, TINY, find_accelerator("CPU-core"), "fp32", machines,
        seq_lens=[64], micro_batches=[1, 2], tps=tps, seconds_per_point=0.01,
    ).to_dict()  # fmt: skip


def test_all_ranks_of_two_islands_measure_one_profile() -> None:
    profiles = run_ranks(4, profile_on_rank, islands=[[0, 1], [2, 3]])
    assert all(profile == profiles[0] for profile in profiles)
    profile = ProfileSpec.model_validate(profiles[0])
    points = {(t.micro_batch, t.seq_len, t.tp) for t in profile.devices[0].layers}
    assert points == {(b, 64, tp) for b in (1, 2) for tp in (1, 2)}
    assert {(link.level, link.operation) for link in profile.links} == {
        (level, operation) for level in ("in_node", "between_islands") for operation in ("send", "all_reduce")
    }
    layout = uniform(TINY, cluster(("CPU-core", 1, 4)), tp=1, pp=2, micro_batch=2, batch=16, seq=64, precision="fp32")
    prediction = predict(layout, profile=profile)
    assert not prediction.extrapolated
    assert 0 < prediction.step_seconds < math.inf


def test_a_smaller_machine_measures_fewer_degrees() -> None:
    """Its rank made fewer barriers than the others, which waited until the timeout."""
    profiles = run_ranks(3, profile_on_rank, (2, 1), islands=[[0, 1], [2]])
    assert all(profile == profiles[0] for profile in profiles)
    points = {(t.micro_batch, t.tp) for t in ProfileSpec.model_validate(profiles[0]).devices[0].layers}
    assert points == {(b, tp) for b in (1, 2) for tp in (1, 2)}


@pytest.mark.parametrize("compiles", [None, True, False])
def test_a_job_is_profiled_with_bodies_as_it_runs_them(
    compiles: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a job that compiles nothing were measured compiled, and priced so; its links over any relay."""
    import torch

    from hethub.kernels import bodies
    from hethub.kernels.device import Device
    from hethub.runtime.measure import profile_run
    from hethub.spec.job import load_job

    world = SimpleNamespace(rank=0, device=Device(vendor="cpu"))
    measured, carried = [], []
    monkeypatch.setattr(bodies._Choice, "compiles", None)
    monkeypatch.setattr(
        profile_run, "session", lambda job, spec: carried.append(spec) or nullcontext((world, job.cluster))
    )
    monkeypatch.setattr(
        profile_run, "profile_world", lambda *args, **more: measured.append(bodies.compiles_on(torch.device("cpu")))
    )
    communicator = {"relay": "gloo", "lanes": 4, "wire": "bf16", "timeout_seconds": 600}
    job = load_job(write_job(tmp_path, train={"compile": compiles}, communicator=communicator))
    profile_run.profile_ranks(job, lambda *told: None)
    assert measured == [bool(compiles)]
    assert [spec.to_dict() for spec in carried] == [{**communicator, "wire": "exact"}]


@pytest.mark.parametrize(("stands_still", "on_device"), [(False, False), (True, False), (True, True)])
def test_passes_of_a_process_held_to_a_part_of_a_core_count_with_the_time_it_stands_still(
    stands_still: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three passes fit into what a period grants, the third waits for the next: a clock of its own tells how
    long. A process that waits for its device stands still, too."""
    from hethub.runtime.measure import profiler

    wall, cpu, passes = [0.0], [0.0], [1.0, 1.0, 4.0] * 10
    monkeypatch.setattr(profiler, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(profiler, "process_time", lambda: cpu[0])

    def once() -> tuple[float, float]:
        seconds = passes.pop(0)
        wall[0] += seconds
        cpu[0] += 1.0 if stands_still else seconds
        return seconds, 7.0

    expected = 2.0 if stands_still and not on_device else 1.0
    assert profiler.repeated(once, 30.0, on_device=on_device) == (expected, 7.0)
    assert len(passes) == 15


def test_the_optimizer_that_is_timed_is_the_one_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, on as many elements as no cache holds."""
    from hethub.kernels.device import Device
    from hethub.runtime.measure import profiler

    sizes: list[int] = []
    step = profiler.fused_adamw

    def counted(state: Any, *rest: Any, **options: Any) -> None:
        sizes.append(state[0][0].numel())
        step(state, *rest, **options)

    monkeypatch.setattr(profiler, "fused_adamw", counted)
    assert profiler._optimizer(Device(vendor="cpu"), "bf16", 0.0) > 0
    assert len(sizes) == 4
    assert set(sizes) == {2**22}


WARMED = Case(
    name="TP 2 beside TP 1, two stages",
    stages=[stage((0, 2), replica([0, 1], 6, 2), replica([2], 2)), stage((2, 4), replica([3], 8, 3))],
    train={"compile": True},
    document_mask=True,
)
UNEVEN = replace(
    WARMED,
    name="unlike tensor_shares",
    stages=[stage((0, 4), replica([0, 1], 6, 2, tensor_shares=[3, 1]), replica([2, 3], 2, tensor_shares=[1, 3]))],
)


def compile_once(world: Any, case: Case) -> tuple[int, int]:
    """Programs made by warming up, and by two steps after it."""
    import torch

    from hethub.kernels.bodies import choose
    from hethub.runtime.measure.profiler import warm_up
    from hethub.runtime.model import layers

    made: list[Any] = []
    torch._inductor.compile = lambda graph, tensors: made.append(graph) or graph  # seconds each, and not looked at here
    choose(True)
    attended, mix = [], layers._mix
    layers._mix = lambda q, k, v, own, window=None: attended.append(own and own.sizes) or mix(q, k, v, own, window)
    warm_up(case.layout(), world.rank, world.device, document_mask=True)
    assert {None if sizes is None else set(sizes) == {8} for sizes in attended} == {None, True}  # halves of a sample
    warmed, trainer = len(made), build_trainer(world, case)
    for step in (1, 2):
        trainer.run_step(step)
    return warmed, len(made) - warmed


@pytest.mark.parametrize("case", [WARMED, UNEVEN], ids=lambda case: case.name)
def test_what_a_first_step_would_compile_is_compiled_before(case: Case) -> None:
    for warmed, later in run_ranks(4, compile_once, case, islands=[[0, 1, 2, 3]]):
        assert warmed > 0
        assert later == 0


def test_a_device_is_given_passes_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of them is what counts: by then the host is ahead, as it is in a step of many layers."""
    import torch

    from hethub.kernels.device import Device
    from hethub.runtime.measure import profiler

    class Gpu(Device):
        is_gpu = True  # type: ignore[assignment]
        torch_device = torch.device("cpu")  # type: ignore[assignment]

        def synchronize(self) -> None:
            waited.append(len(passes))

    waited, passes = list[int](), list[float]()
    seconds = iter([9.0, *[5.0, 4.0, 3.0, 3.0, 2.0, 2.0, 2.0, 1.0] * 3])
    now = [0.0]
    monkeypatch.setattr("hethub.kernels.device.monotonic", lambda: now[0])

    def run() -> torch.Tensor:
        passes.append(next(seconds))
        now[0] += passes[-1]
        return torch.ones(1, requires_grad=True)

    bench = profiler._Bench(None, Gpu(vendor="nvidia"), 1e-9)  # type: ignore[arg-type]
    assert bench._repeated(run, torch.ones(1))[0] == 1.0
    assert waited == [1, 9, 17]
    assert len(passes) == 1 + 3 * profiler.IN_A_ROW
    passes.clear()
    seconds = iter([1.0] * 100)
    profiler._Bench(None, Gpu(vendor="nvidia"), 0.0)._repeated(run, torch.ones(1))  # type: ignore[arg-type]
    assert len(passes) == 4  # a start that only warms up waits for no more
