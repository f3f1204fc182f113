"""Which relay carries what: by pair and size, stored and taken up again; and MPI that takes device memory."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hethub.communicator.bridge.links import Links, message_stage
from hethub.communicator.counters import Counters
from hethub.communicator.relays import choice
from hethub.communicator.relays.choice import Carriers, RelayChoice, faster_by_size
from hethub.communicator.relays.connection import Connector
from hethub.communicator.relays.gloo import Striped, gloo_reason
from hethub.communicator.relays.mpi import MpiRelay, ask_open_mpi, calls_and_tags, is_gpu_aware
from hethub.communicator.relays.relay import CLOSED, PeerError
from hethub.communicator.setup import connecting
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput, RunFailed
from tests.support.ranks import run_ranks, start_ranks

BY_SIZE = {"near": [[0, "shm"], [100_000, "gloo"]], "far": [[0, "gloo"]]}


@pytest.mark.parametrize(
    ("gloo", "mpi", "chosen"),
    [
        ([1.0, 10.0], [0.5, 2.0], ((0, "mpi"),)),
        ([1.0, 10.0], [1.0, 2.0], ((0, "gloo"), (choice.PROBED_BYTES[1], "mpi"))),
        ([1.0, 10.0], [0.1, 9.5], ((0, "gloo"),)),
        ([1.0, 1.0], [1.0, 1.0], ((0, "gloo"),)),
    ],
)
def test_mpi_gets_the_sizes_at_which_it_is_clearly_faster(gloo, mpi, chosen):
    assert faster_by_size({"gloo": gloo, "mpi": mpi}) == chosen


def test_a_choice_survives_its_file():
    stored = RelayChoice.from_dict(BY_SIZE)
    assert RelayChoice.from_dict(stored.to_dict()) == stored


@pytest.mark.parametrize("near", [[], [[5, "shm"]], [[0, "carrier pigeon"]], [[0, "shm"], [8, "gloo"], [4, "mpi"]]])
def test_what_is_no_choice_is_refused(near):
    with pytest.raises(BadInput, match="ascending order"):
        RelayChoice.from_dict({"near": near, "far": [[0, "gloo"]]})


def test_a_relay_carries_from_its_size_on():
    carriers = Carriers(((0, "shm"), (8, "gloo")), {name: SimpleNamespace(name=name) for name in ("shm", "gloo")})
    assert [carriers.carrier(size).name for size in (0, 7, 8, 9)] == ["shm", "shm", "gloo", "gloo"]


def reduce_small_and_large(world):
    for size in (100, 20_000, 300_000):
        tensor = torch.full((size,), float(world.rank))
        dist.all_reduce(tensor)
        assert (tensor == sum(range(world.size))).all()
    sent = {link["relay"]: link["bytes"] for link in world.counters()["links"] if link["level"] == "bridge"}
    return sent, world.relays


def test_stored_relays_carry_by_size():
    for sent, relays in run_ranks(2, reduce_small_and_large, islands=[[0], [1]], stored_relays=BY_SIZE):
        assert sent == {"shm": 80_400, "gloo": 1_200_000}
        assert relays == {**BY_SIZE, "hosts": [[0, 1]]}


def test_a_named_relay_overrules_what_was_stored():
    for sent, _ in run_ranks(2, reduce_small_and_large, islands=[[0], [1]], relay="gloo", stored_relays=BY_SIZE):
        assert set(sent) == {"gloo"}


def test_stored_relays_that_cannot_be_connected_are_chosen_anew():
    stored = {"near": [[0, "mpi"]], "far": [[0, "gloo"]]}  # the first run was started by mpirun, this one is not
    for sent, relays in run_ranks(2, reduce_small_and_large, islands=[[0], [1]], stored_relays=stored):
        assert set(sent) == {"shm"}
        assert relays["near"] == [[0, "shm"]]


def connector(hosts):
    rendezvous = SimpleNamespace(rank=0, size=2, launcher="torchrun")
    return Connector(rendezvous, hosts, Device(vendor="cpu"), timeout_seconds=1.0, num_lanes=1)


def test_a_name_that_no_relay_has_connects_none():
    """Any but Gloo and shared memory was taken for MPI."""
    with pytest.raises(KeyError, match="carrier pigeon"):
        connector(["a", "b"]).connected("carrier pigeon")


def test_shared_memory_is_refused_between_hosts():
    with pytest.raises(BadInput, match="relay is shm, but the ranks are on several hosts"):
        connector(["a", "b"]).choose("shm", None)


@pytest.mark.parametrize(("hosts", "far"), [(["a", "a"], "shm"), (["a", "b"], "gloo")])
def test_shared_memory_stored_on_one_host_is_not_taken_between_hosts(hosts, far):
    """The first run had one host and `relay: shm`."""
    assert connector(hosts).choose("auto", RelayChoice.always("shm", "shm")) == RelayChoice.always("shm", far)


def test_an_unknown_relay_is_refused():
    outcomes = start_ranks(2, reduce_small_and_large, connect={"islands": [[0], [1]], "relay": "smoke"})
    assert all("communicator.relay (in a program HETHUB_RELAY) is 'smoke'" in outcome.error[1] for outcome in outcomes)


@pytest.mark.parametrize(
    ("vendor", "environment", "said", "aware"),
    [
        ("nvidia", {}, True, True),
        ("nvidia", {}, False, False),
        ("amd", {}, None, False),
        ("amd", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, None, True),
        ("nvidia", {"MV2_USE_CUDA": "1"}, None, True),
        ("nvidia", {"MV2_USE_ROCM": "1"}, None, False),
        ("nvidia", {"HETHUB_MPI_GPU_AWARE": "0"}, True, False),
        ("amd", {"HETHUB_MPI_GPU_AWARE": "1"}, False, True),
        ("cpu", {"HETHUB_MPI_GPU_AWARE": "1"}, True, False),
    ],
)
def test_whether_mpi_takes_device_memory(vendor, environment, said, aware):
    assert is_gpu_aware(vendor, environment, lambda asked: said if asked == vendor else None) is aware


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    """`yes` was taken for off."""
    with pytest.raises(BadInput, match=r"HETHUB_MPI_GPU_AWARE is 'yes'; set it to 1 \(on\) or 0 \(off\)"):
        is_gpu_aware("amd", {"HETHUB_MPI_GPU_AWARE": "yes"}, lambda asked: True)


def test_open_mpi_is_asked_through_the_library_itself():
    assert ask_open_mpi(torch._C.__file__)("nvidia") is None  # linked to no MPI


@dataclass(frozen=True, kw_only=True)
class NoHostBuffers(Device):
    """A device whose tensors must not be staged in host memory."""

    def host_buffer(self, num_bytes):
        raise AssertionError("staged in host memory")


def reduce_from_device_memory(world):
    for carriers in world._context.relays.values():
        for relay in carriers:
            relay.takes_device_memory = True
    found = []
    for size in (100_003, 1_500_001):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(world.rank))
        exact = sum(torch.randn(size, generator=torch.Generator().manual_seed(r)).double() for r in range(world.size))
        dist.all_reduce(tensor)
        found.append(((tensor - exact).norm() / exact.norm()).item())
    return max(found)


@pytest.mark.parametrize("islands", [[[0, 1], [2]], [[0], [1], [2]]], ids=["2+1", "1+1+1"])
def test_a_relay_that_takes_device_memory_gets_it(islands):
    options = {"islands": islands, "staged_ranks": [0, 1, 2], "device": NoHostBuffers(vendor="cpu")}
    assert max(run_ranks(3, reduce_from_device_memory, relay="gloo", **options)) < 1e-6


@pytest.mark.parametrize("arrives", [False, True])
def test_memory_that_mpi_may_still_write_to_is_held(arrives):
    request, status = SimpleNamespace(Test=lambda status: arrives), SimpleNamespace(count=16)
    comm = SimpleNamespace(Get_attr=lambda _: 1 << 20, Irecv=lambda *_: request)
    relay = MpiRelay(SimpleNamespace(TAG_UB=0, BYTE=0, Status=lambda: status), comm, timeout_seconds=0.01)
    tensor = torch.empty(4)
    held, transfer = weakref.ref(tensor), relay.receive(tensor, 1, 5)
    if arrives:
        transfer.wait()
    else:
        with pytest.raises(PeerError, match="no answer"):
            transfer.wait()
    del tensor, transfer
    gc.collect()
    assert (held() is None) == arrives


LEFT = "connection closed: that rank destroyed its process group, or its process ended"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("[/a/unbound_buffer.cc:81] Timed out waiting 1000ms for recv to complete", "no answer within the timeout"),
        ("[/a/pair.cc:553] Connection closed by peer [127.0.0.1]:4321", LEFT),
        ("[/a/pair.cc:553] Read error [127.0.0.1]:4321: Connection reset by peer", LEFT),
        ("[/a/pair.cc:553] Write error [127.0.0.1]:4321: Broken pipe", LEFT),
        ("[/a/pair.cc:41] Application timeout caused pair closure", "communication was given up on this rank"),
        ("[/a/pair.cc:9] no room. This is most likely a bug", "no room"),
    ],
)
def test_what_gloo_says_in_a_clause(said, reason):
    assert gloo_reason(RuntimeError(said)) == reason


def test_a_message_in_stripes_is_waited_for_whole():
    waited = []
    Striped([SimpleNamespace(wait=lambda lane=lane: waited.append(lane)) for lane in range(3)]).wait()
    assert waited == [0, 1, 2]


def links(number):
    relays = {0: Carriers(((0, "mpi"),), {"mpi": SimpleNamespace(name="mpi", num_tags=calls_and_tags(32_767)[1])})}
    return Links(relays=relays, members=[0], number=number, label="the group", near=frozenset([0]), counters=Counters())


def test_groups_that_a_relay_does_not_know_apart_are_refused():
    links(4_095)
    with pytest.raises(
        BadInput, match=r"relay mpi tells at most 4,095 groups .* has 32,768 tags, but .* choose another"
    ):
        links(4_096)
    assert max(map(message_stage, range(10_000))) == 32_767


def test_a_rank_that_goes_while_relays_are_timed_is_no_internal_error():
    rendezvous = SimpleNamespace(watch=None, rank=0, size=2)
    with (
        pytest.raises(RunFailed, match="rank 0 could not connect to the other 1 ranks: rank 1: connection closed"),
        connecting(rendezvous),
    ):
        raise PeerError(1, CLOSED)
