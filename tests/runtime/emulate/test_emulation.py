"""An emulation takes the planned time by its own books, and trains exactly what a run on real devices would."""

import json
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import Rendezvous
from hethub.kernels.device import choose_device
from hethub.predictor import predict
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.memory.ranks import RankMemory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.runtime.emulate import pace as pace_module
from hethub.runtime.emulate.cluster_network import ClusterNetwork
from hethub.runtime.emulate.network import EmulatedClock, Way
from hethub.runtime.emulate.pace import EmulatedPace, round_up
from hethub.runtime.emulate.world import connect_emulated
from hethub.runtime.measure.rank_times import RankTimes
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import RunFailed
from hethub.spec.layout.bind import bind
from hethub.spec.layout.execution import Kind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.command import ranks
from tests.support.job_files import MODEL, STAGES, plan, write_job
from tests.support.ranks import start_ranks, values

NODES = [
    {"name": "nv", "accelerator": "A100-SXM4-80GB", "accelerators": 2, "nics": 2, "gbps_per_nic": 200},
    {"name": "amd", "accelerator": "MI250X-GCD", "accelerators": 2, "nics": 2, "gbps_per_nic": 200},
]
EMULATED = {"name": "two-makers", "emulated": True, "nodes": NODES}


class SlowLine:
    """A network of one line between any two ranks: a second a kilobyte, and two seconds on the way."""

    num_interfaces = 1

    def message(self, source, target, num_bytes):
        return Way(num_bytes / 1000, 2.0, ((0,),))

    def collective(self, name, ranks, num_bytes):
        return Way(num_bytes / 1000, 2.0, ((0,),))


def on_slow_line(rank, store, scale, function):
    meeting = Rendezvous(
        store=store, rank=rank, size=2, local_rank=rank, local_size=2, address="127.0.0.1", interface=None,
        token="token", launcher="test",
    )  # fmt: skip
    device = choose_device(rank, 2, kind="cpu")
    world = connect_emulated(meeting, SlowLine(), device=device, islands=[[0, 1]], timeout_seconds=60)
    world.clock.scale = scale
    world.barrier()
    origin = world.all_gather_objects(monotonic())[0]
    world.clock.at = max(monotonic(), origin)
    answer = {"messages": messages, "collectives": collectives}[function](world)
    world.close()
    return [(at - origin) / scale for at in answer]


def messages(world):
    """Two messages of a kilobyte, one after the other on the line; when the receiver is through with each."""
    if world.rank == 0:
        works = [world.send(torch.zeros(250), 1, tag) for tag in (0, 1)]
        for work in works:
            work.wait()
        return [world.clock.at]
    works = [world.receive(torch.empty(250), 0, tag) for tag in (0, 1)]
    ends = []
    for work in works:
        work.wait()
        assert monotonic() >= world.clock.at
        ends.append(world.clock.at)
    return ends


def collectives(world):
    """Rank 1 computes for ten seconds before it joins; when each is through, and what they summed."""
    world.clock.begin(10.0 * world.rank)
    world.clock.end()
    summed = torch.full((250,), float(world.rank + 1))
    dist.all_reduce(summed, group=world.group([0, 1]))
    assert summed.tolist() == [3.0] * 250
    return [world.clock.at]


def through(function, scale=0.005):
    return values(start_ranks(2, on_slow_line, scale, function, timeout_seconds=60))


def test_messages_take_the_line_in_turn_and_are_there_a_latency_later():
    (sent,), (first, second) = through("messages")
    slack = 40  # emulated seconds that the start of this test may take, 0.2 real ones
    assert 3.0 <= first <= 3.0 + slack
    assert second - first == pytest.approx(1.0, abs=1e-3)
    assert sent == pytest.approx(second - 2.0, abs=1e-3)  # what is on its way may be overwritten


def test_a_collective_starts_with_its_last_member_and_ends_for_all_at_once():
    (one,), (other,) = through("collectives")
    assert one == other >= 13.0


def test_a_clock_adds_up_what_it_computes_and_never_runs_behind():
    clock = EmulatedClock(scale=1e-4)
    start = clock.at
    for _ in range(3):
        clock.begin(10.0)
        clock.end()
    clock.advance(start)  # something that came long ago
    assert clock.at == pytest.approx(start + 3e-3)
    assert monotonic() >= clock.at


def layout(stages=STAGES, cluster=EMULATED, **changes):
    model = ModelSpec.model_validate(MODEL)
    return bind(PlanSpec.model_validate(plan(stages, **changes)), model, ClusterSpec.model_validate(cluster))


def test_layers_and_ends_add_up_to_the_predicted_microbatch():
    bound = layout()
    costs = PlanCosts(bound, HETHUB, packaged())
    for assignment in bound.assignments:
        times, samples = RankTimes(costs, assignment), bound.replica(assignment.stage, assignment.replica).micro_batch
        microbatch = costs.microbatch(assignment.stage, assignment.replica, samples)
        for kind, parts in ((Kind.FORWARD, microbatch.forward), (Kind.BACKWARD, microbatch.backward)):
            own = sum(times.layer(kind, layer, samples) for layer in range(bound.stages[assignment.stage].num_layers))
            assert own == pytest.approx(parts.compute)


def test_a_slowdown_slows_all_that_a_rank_computes():
    bound = layout()
    costs = PlanCosts(bound, HETHUB, packaged())
    plain, slow = RankTimes(costs, bound.assignments[0]), RankTimes(costs, bound.assignments[0], 1.5)
    assert slow.layer(Kind.FORWARD, 1, 2) == pytest.approx(1.5 * plain.layer(Kind.FORWARD, 1, 2))
    assert slow.optimizer(1000) == pytest.approx(1.5 * plain.optimizer(1000))
    assert plain.optimizer(0) == 0.0


def test_messages_take_interfaces_of_their_own_kind():
    network = ClusterNetwork(ClusterSpec.model_validate(EMULATED))
    inside, across = network.message(0, 1, 10**6), network.message(1, 2, 10**6)
    assert not {slot for slots in inside.interfaces for slot in slots} & {
        s for slots in across.interfaces for s in slots
    }
    assert across.hold_seconds > inside.hold_seconds
    one_maker = ClusterSpec.model_validate({**EMULATED, "nodes": [{**NODES[0], "count": 2}]})
    between_nodes = ClusterNetwork(one_maker).message(1, 2, 10**6)
    assert [len(choices) for choices in between_nodes.interfaces] == [2, 2]  # either of the node's two


def test_an_all_reduce_costs_what_the_predictor_says():
    cluster = ClusterSpec.model_validate(EMULATED)
    network = ClusterNetwork(cluster)
    way = network.collective("all_reduce", [0, 1, 2, 3], 10**7)
    expected = network._network.all_reduce(network._network.group([0, 1, 2, 3]), 10**7)
    assert way.hold_seconds + way.latency_seconds == pytest.approx(expected)


def test_scales_are_rounded_up_to_two_digits():
    assert [round_up(value) for value in (0.0123, 123.4, 7.0)] == pytest.approx([0.013, 130.0, 7.0])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    job = write_job(folder / "job", cluster=EMULATED, train={"steps": 4})
    ended = ranks(4, "train", job, "--run-dir", folder / "run", cwd=folder)
    assert [end.exit_code for end in ended] == [0] * 4, ended[0].stderr
    return ended[0], folder / "run"


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_an_emulated_run_says_that_it_is_one(emulated):
    ended, run = emulated
    assert "emulated (median)" in ended.stdout
    assert "measured" not in ended.stdout
    assert "measured" not in (run / "report.html").read_text()
    report = json.loads((run / "rehearsal.json").read_text())
    assert len(report["overrun_percent_by_rank"]) == 4
    assert report["overrun_percent"] == max(report["overrun_percent_by_rank"])
    assert all(row["time_scale"] == report["time_scale"] > 0 for row in metrics(run))


def test_no_emulated_step_is_shorter_than_its_busiest_rank(emulated):
    _, run = emulated
    bound = layout()
    prediction = predict(bound)
    assert prediction.step_seconds == pytest.approx(metrics(run)[0]["predicted_step_seconds"])
    for row in metrics(run):
        assert row["step_seconds"] >= prediction.breakdown["compute"]


def test_memory_is_that_of_the_emulated_accelerator(emulated):
    _, run = emulated
    predicted = max(entry.bytes for entry in predict(layout()).memory)
    assert metrics(run)[-1]["memory_bytes"] == pytest.approx(predicted, rel=0.05)


def test_the_loss_is_that_of_a_run_on_cpus(emulated, tmp_path):
    job = write_job(tmp_path / "job", train={"steps": 4})
    ended = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert ended[0].exit_code == 0, ended[0].stderr
    real, emulated = ([row["loss"] for row in metrics(run)] for run in (tmp_path / "run", emulated[1]))
    assert emulated == pytest.approx(real, rel=1e-6)


def test_a_scale_that_is_too_small_is_refused_with_the_one_it_needs(tmp_path):
    job = write_job(tmp_path / "job", cluster=EMULATED, rehearsal={"time_scale": 1e-3})
    ended = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert [end.exit_code for end in ended] == [2] * 4
    assert "rehearsal.time_scale" in ended[0].stderr
    assert "at least" in ended[0].stderr
    assert not (tmp_path / "run").exists()


def test_a_device_that_has_less_memory_than_the_run_counts_fails_by_name():
    pace = EmulatedPace.__new__(EmulatedPace)
    pace.rank = 3
    pace._memory = RankMemory(3, "T4", 900, 1000, {"framework": 500, "weights": 400})
    assert pace.memory_bytes(500) == 1000
    with pytest.raises(RunFailed, match=r"rank 3 \(T4, emulated\) is out of memory: it needs 1,001 bytes"):
        pace.memory_bytes(501)


def give_less_memory(rank):
    """Rank 2's emulated accelerator turns out to have half a GiB, which no plan knew."""
    planned = pace_module.memory

    def found(layout):
        return [entry._replace(limit=2**29) if entry.rank == 2 else entry for entry in planned(layout)]

    if rank == 2:
        pace_module.memory = found


def test_a_run_ends_where_an_emulated_accelerator_is_out_of_memory(tmp_path):
    job = write_job(tmp_path / "job", cluster=EMULATED)
    ended = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=give_less_memory)
    assert [end.exit_code for end in ended] == [1] * 4
    (told,) = ended[2].paragraphs
    assert "rank 2 (MI250X-GCD, emulated) is out of memory: it needs" in told
    assert "Lower micro_batch or in_flight" in told


def test_an_emulated_cluster_is_not_measured(tmp_path):
    job = write_job(tmp_path / "job", cluster=EMULATED)
    ended = ranks(4, "profile", job, "--out", tmp_path / "profile.json", cwd=tmp_path)
    assert [end.exit_code for end in ended] == [2] * 4
    assert "nothing of it to measure" in ended[0].stderr
