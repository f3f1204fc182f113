"""What ranks must agree on, concluded from what they say; and how they come to it."""

import os
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from hethub.communicator import Rendezvous
from hethub.communicator.joining.rendezvous import exchanged
from hethub.runtime.launch.consensus import all_gather, broadcast, consensus
from hethub.runtime.launch.preflight import Facts, check_cluster, check_versions, detect_cluster, exchange_facts
from hethub.runtime.memory.host_limit import host_memory_bytes
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, RunFailed
from tests.support.ranks import start_ranks, values

FIRST = Facts(
    rank=0, host="nv0", local_rank=0, vendor="nvidia", device="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30,
    hethub="0.1.0", python="3.11.4", torch="2.13.0+cu130", byte_order="little", job="a1", tokens="b1",
)  # fmt: skip
SECOND = replace(FIRST, rank=1, host="amd0", vendor="amd", device="AMD Instinct MI250X", torch="2.13.0+rocm7.0")


def test_builds_for_other_vendors_are_the_same_version():
    assert check_versions([FIRST, SECOND]) == []
    assert check_versions([FIRST, replace(SECOND, torch="2.13.0a0+gitf1e2d3c.container")]) != []


def test_patch_versions_only_warn():
    (warning,) = check_versions(
        [FIRST, replace(SECOND, torch="2.13.1+rocm7.0"), replace(SECOND, torch="2.13.1+rocm7.0")]
    )
    assert "2.13.0+cu130" in warning
    assert "rank 1 (amd0)" in warning
    assert check_versions([FIRST, replace(SECOND, python="3.11.9")]) == []


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("torch", "2.12.1+rocm7.0"), ("python", "3.12.4"), ("hethub", "0.2.0"), ("byte_order", "big"), ("job", "a2"), ("tokens", "b2"),
    ],
)  # fmt: skip
def test_what_must_be_equal_names_both_ranks(what, value):
    with pytest.raises(BadInput) as refusal:
        check_versions([FIRST, replace(FIRST, rank=1), replace(SECOND, rank=2, **{what: value})])
    assert str(refusal.value).startswith(f"{what} differs: rank 0 (nv0) has ")
    assert "rank 2 (amd0) has " in str(refusal.value)


def test_facts_survive_the_store():
    alone = Rendezvous.on_one_host(HashStore(), 0, 1)
    assert exchange_facts(alone, "versions", FIRST) == [FIRST]


def cluster(*nodes):
    return ClusterSpec.model_validate({"name": "lab", "nodes": list(nodes)})


NVIDIA = {"name": "nv", "accelerator": "A100-SXM4-80GB", "accelerators": 1}
AMD = {"name": "amd", "accelerator": "MI250X-GCD", "accelerators": 1}
CPUS = {"name": "cpus", "accelerator": "CPU-core", "accelerators": 2}


def test_ranks_in_another_order_than_the_nodes_are_refused():
    check_cluster(cluster(NVIDIA, AMD), [FIRST, SECOND])
    with pytest.raises(
        BadInput, match=r"rank 0 \(nv0\) runs on NVIDIA A100-SXM4-80GB .* places MI250X-GCD \(amd\) there"
    ):
        check_cluster(cluster(AMD, NVIDIA), [FIRST, SECOND])


def test_a_cpu_stands_in_only_for_a_vendor_that_the_file_names():
    on_cpu = [replace(FIRST, vendor="cpu", device="CPU", rank=rank) for rank in range(2)]
    check_cluster(cluster({**CPUS, "vendor": "amd"}), on_cpu)
    with pytest.raises(BadInput, match=r"rank 0.*`emulated: true`"):
        check_cluster(cluster(NVIDIA, AMD), on_cpu)


def test_what_the_ranks_find_becomes_a_cluster():
    same_host = replace(FIRST, rank=1, local_rank=1)
    mi300x = replace(SECOND, rank=2, device="AMD Instinct MI300X", memory_bytes=192 * 2**30)
    found = detect_cluster([FIRST, same_host, mi300x])
    assert [(place.accelerator.name, place.machine, place.local) for place in found.places] == [
        ("A100-SXM4-80GB", 0, 0), ("A100-SXM4-80GB", 0, 1), ("MI300X", 1, 0),
    ]  # fmt: skip
    assert found.islands == {"nvidia": (0, 1), "amd": (2,)}


def test_a_device_whose_driver_names_two_models_is_known():
    """ROCm says "AMD Instinct MI250X/MI250" of either."""
    [node] = detect_cluster([replace(SECOND, rank=0, device="AMD Instinct MI250X/MI250")]).nodes
    assert node.device.name.startswith("MI250")


def test_a_part_of_a_card_is_not_taken_for_all_of_it():
    part = replace(FIRST, device="NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory_bytes=int(9.6 * 2**30))
    with pytest.raises(BadInput, match=r"has 10 GiB of memory, the catalogue's H100-SXM5-80GB 80: it is a part"):
        detect_cluster([part])


def test_a_partition_that_sees_the_cards_memory_is_known_by_its_compute_units():
    card = replace(FIRST, vendor="amd", device="AMD Instinct MI300X", memory_bytes=192 * 2**30, compute_units=304)
    assert detect_cluster([card]).nodes[0].device.name == "MI300X"
    with pytest.raises(BadInput, match=r"has 38 compute units, MI300X 304: it is a part"):
        detect_cluster([replace(card, compute_units=38)])


@pytest.mark.parametrize(
    ("device", "memory_gb", "found"),
    [
        ("NVIDIA RTX 6000 Ada Generation", 48, "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, None),
        ("Quadro RTX 6000", 24, None),
        ("NVIDIA GeForce RTX 2080 Ti", 11, "RTX-2080-Ti"),
        ("NVIDIA GeForce RTX 2080 SUPER", 8, None),
        ("NVIDIA GeForce RTX 3090 Ti", 24, None),
        ("NVIDIA GeForce RTX 4090 D", 24, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("AMD Radeon RX 7900 XTX", 24, "RX-7900-XTX"),
        ("AMD Radeon RX 7900 XT", 20, None),
        ("AMD Radeon PRO W6800", 32, "Radeon-Pro-W6800"),
        ("AMD Instinct MI300A", 128, None),
        ("NVIDIA L40", 45, "L40"),
        ("NVIDIA L40S", 45, "L40S"),
    ],
)
def test_a_name_that_means_another_model_is_not_taken_for_one_of_the_catalogue(device, memory_gb, found):
    facts = [replace(FIRST, device=device, memory_bytes=memory_gb * 2**30)]
    if found is not None:
        assert detect_cluster(facts).nodes[0].device.name == found
    else:
        with pytest.raises(BadInput, match="is not in the accelerator catalogue"):
            detect_cluster(facts)


def test_the_hosts_memory_is_found_and_shared_by_the_nodes_on_it():
    on_cpu = [
        replace(FIRST, vendor="cpu", device="CPU", rank=rank, host_memory_bytes=(12 if rank < 3 else 5) * 2**30,
                host="b" if rank == 3 else "a")
        for rank in range(4)
    ]  # fmt: skip
    assert [node.host_memory_gb for node in detect_cluster(on_cpu).nodes] == [12.0, 5.0]
    assert [node.host_memory_gb for node in detect_cluster(on_cpu, [[0, 1], [2, 3]]).nodes] == [8.0, 4.0, 5.0]
    assert detect_cluster([FIRST]).nodes[0].host_memory_gb is None


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "max\n"}, 4096),
        ("0::/job\n", {"job/memory.max": "max\n"}, None),
        ("3:cpu,memory:/job\n2:pids:/\n0::/\n", {"memory/job/memory.limit_in_bytes": "8192\n"}, 8192),
        ("3:memory:/outside\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("3:memory:/outside\n", {"memory/memory.limit_in_bytes": "4096\n"}, 4096),  # inside a container
        ("0::/job\n", {"job/memory.max": "max\n", "../memory.max": "4096\n"}, None),  # above where groups are mounted
        (None, {}, None),
    ],
)
def test_control_groups_limit_a_hosts_memory(tmp_path, groups, limits, expected):
    for path, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory_bytes(tmp_path) == (expected or installed)


def test_islands_can_be_named_over_cpus():
    on_cpu = [replace(FIRST, vendor="cpu", device="CPU", rank=rank) for rank in range(4)]
    assert list(detect_cluster(on_cpu).islands.values()) == [(0, 1, 2, 3)]
    assert list(detect_cluster(on_cpu, [[0, 3], [1, 2]]).islands.values()) == [(0, 3), (1, 2)]


def test_a_device_without_a_description_is_refused():
    with pytest.raises(BadInput, match=r"device 'Abacus 3' .*is not in the accelerator catalogue"):
        detect_cluster([replace(FIRST, device="Abacus 3")])


# -- consensus --------------------------------------------------------------------------------------------------------


def gather_ranks(rank, store):
    here = Rendezvous.on_one_host(store, rank, 3)
    return all_gather(here, "rank", {"rank": rank})


def test_every_rank_hears_all():
    assert values(start_ranks(3, gather_ranks)) == [[{"rank": rank} for rank in range(3)]] * 3


def refuse_on_some(rank, store, faults):
    def prepare():
        if faults[rank] is not None:
            raise BadInput(faults[rank])
        return rank

    try:
        here = Rendezvous.on_one_host(store, rank, 3)
        return consensus(here, "files", prepare)
    except BadInput as error:
        return str(error), error.quiet, error.agreed


def test_a_consensus_gives_every_rank_its_own_result():
    assert values(start_ranks(3, refuse_on_some, [None, None, None])) == [0, 1, 2]


def test_what_some_find_all_refuse_and_the_first_of_them_says():
    found = values(start_ranks(3, refuse_on_some, [None, "b is bad.", "c is bad."]))
    assert found == [("rank 1: b is bad.", rank != 1, True) for rank in range(3)]


def test_what_all_find_is_said_without_a_rank():
    found = values(start_ranks(3, refuse_on_some, ["a is bad."] * 3))
    assert found == [("a is bad.", rank != 0, True) for rank in range(3)]


def read_late(rank, store):
    """Rank 0, which serves the store, could be gone before the others have read what it found."""

    def decide():
        raise BadInput("no plan.")

    here = Rendezvous.on_one_host(store, rank, 3)
    if rank == 2:
        time.sleep(1.0)
    try:
        broadcast(here, "plan", decide, patience_seconds=30)
    except BadInput as error:
        os.write(2, f"{error} {error.quiet}".encode())
        os._exit(2)


def test_rank_0_decides_and_waits_until_all_have_heard():
    outcomes = start_ranks(3, read_late)
    assert [outcome.exit_code for outcome in outcomes] == [2, 2, 2]
    assert [outcome.stderr for outcome in outcomes] == [f"no plan. {rank != 0}" for rank in range(3)]


def decide_for_all(rank, store):
    here = Rendezvous.on_one_host(store, rank, 3)
    return broadcast(here, "plan", lambda: {"by": rank}, patience_seconds=30)


def test_what_rank_0_decides_holds_on_all():
    assert values(start_ranks(3, decide_for_all)) == [{"by": 0}] * 3


def fail_on_one(rank, store, failing):
    def prepare():
        if rank == failing:
            raise KeyError("a bug")

    here = Rendezvous.on_one_host(store, rank, 3)
    consensus(here, "files", prepare)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_where_it_is_and_told_to_the_others(failing):
    outcomes = start_ranks(3, fail_on_one, failing)
    for rank, outcome in enumerate(outcomes):
        kind, message = outcome.error
        if rank == failing:
            assert kind == "KeyError"
        else:
            assert kind == "RunFailed"
            assert f"rank {failing} failed: KeyError: 'a bug'" in message


def one_stays_silent(rank, store):
    here = Rendezvous.on_one_host(store, rank, 3)
    if rank == 1:
        return None
    other = 2 - rank
    store.set(f"agree/files/{other}", "{}")  # as if it had answered, however late it comes
    with pytest.raises(RunFailed) as refused:
        consensus(here, "files", lambda: None, patience_seconds=1.0)
    return str(refused.value)


def test_a_rank_that_does_not_answer_is_named():
    first, _, last = values(start_ranks(3, one_stays_silent))
    for rank, message in ((0, first), (2, last)):
        assert f"rank {rank} heard nothing from rank 1" in message
        assert "files" in message
        assert "files/" not in message  # no list of what all ranks were asked for


def test_a_rank_that_says_nothing_of_itself_is_named():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=0.3))
    server.set("0", "there")
    with pytest.raises(RunFailed, match=r"^rank 1 heard nothing from rank 2 when the ranks met: [^,/]*$"):
        exchanged(server, 1, 4, "there too")


class CountingStore:
    """A store in which all ranks but this one have spoken, and how often it was asked."""

    def __init__(self, size, said):
        self.inner, self.requests = HashStore(), 0
        for rank in range(1, size):
            self.inner.set(said(rank), "{}")

    @property
    def timeout(self):
        return self.inner.timeout

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.inner, name)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_what_all_have_said_in_as_many_requests_whatever_their_number(rank):
    """Rank 0 alone serves the store: a request for each pair of ranks takes it minutes with a thousand of them. It clears
    what each has said, in as many requests as ranks and no more."""
    counts = {size: [CountingStore(size, str), CountingStore(size, "agree/files/{}".format)] for size in (2, 200)}
    for size, (facts, answers) in counts.items():
        facts.inner.set("0", "{}")
        facts.inner.add("read", size - 1)
        assert len(exchanged(facts, rank, size, "{}")) == size
        facts.requests -= size * (rank == 0)
        consensus(replace(Rendezvous.on_one_host(HashStore(), 0, size), store=answers), "files", lambda: None)
    assert [store.requests for store in counts[2]] == [store.requests for store in counts[200]]
