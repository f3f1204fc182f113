"""What we use of torch's unpublished interfaces still behaves as we rely on."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from tests.communicator.stores import Leaving
from tests.support.ranks import start_ranks, values


def wait_for_nothing(rank, store):
    """A receive nobody answers, broken from another thread after a moment."""
    gloo = torch_private.create_gloo_group(store, rank, 2, 60, "127.0.0.1")
    gloo.barrier().wait()
    if rank == 0:
        threading.Timer(0.3, torch_private.break_gloo_group, (gloo, 0, 2)).start()
    with pytest.raises(RuntimeError):
        torch_private.gloo_receive(gloo, torch.empty(4), 1 - rank, 5).wait()
    return True


def test_breaking_a_gloo_group_wakes_waiters_on_both_sides():
    assert all(values(start_ranks(2, wait_for_nothing, timeout_seconds=30)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_breaking_a_store_wakes_who_waits_for_it(host):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore(host, server.port, is_master=False, timeout=timedelta(seconds=30))
    threading.Timer(0.3, torch_private.break_store, (dist.PrefixStore("a", store),)).start()
    begun = time.monotonic()
    with pytest.raises(dist.DistError):
        store.get("what nobody says")
    assert time.monotonic() - begun < 10


def test_a_store_tells_whether_it_is_served_here():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    assert torch_private.serves_store(dist.PrefixStore("a", server))
    assert not torch_private.serves_store(dist.PrefixStore("a", client))


def keys_of_a_group(rank, store):
    """What the store keeps of a group in use."""
    gloo = torch_private.create_gloo_group(dist.PrefixStore("group", store), rank, 2, 60, "127.0.0.1")
    gloo.barrier().wait()
    keys = [key for key in store.list_keys() if "group" in key]
    return keys


def test_a_gloo_group_leaves_nothing_in_the_store():
    assert values(start_ranks(2, keys_of_a_group, timeout_seconds=30)) == [[], []]


def test_a_gloo_group_that_cannot_connect_says_so_by_its_errors_type():
    """Gloo's own, RuntimeError, may be anything's."""

    def leave():
        raise RuntimeError("gone")

    store = dist.HashStore()
    for each, said in (Leaving(store, leave), "gone"), (store, "connectFullMesh failed"):
        with pytest.raises(dist.DistNetworkError, match=said):
            torch_private.create_gloo_group(each, int(each is not store), 2, 0.1, "127.0.0.1")


def test_a_futures_error_is_one_for_torch():
    future, end = torch_private.future_of([torch.ones(1)])
    end(ValueError("the reason"))
    with pytest.raises(RuntimeError, match="ValueError: the reason"):
        future.wait()
    with pytest.raises(RuntimeError, match="the reason"):
        future.then(lambda done: done.value()).wait()


def test_a_future_gives_its_result():
    future, end = torch_private.future_of([torch.ones(1)])
    assert not future.done()
    end(None)
    assert future.wait()[0].item() == 1.0


def test_a_group_gathers_operations_between_two_calls():
    assert all(callable(getattr(dist.ProcessGroup, name)) for name in torch_private.COALESCING.values())


def test_reduce_operations_are_told_apart():
    premul = dist._make_nccl_premul_sum(0.25)
    assert torch_private.reduce_op_kind(premul) == torch_private.ReduceKind.PREMUL_SUM
    assert torch_private.premul_factor(premul) == 0.25
    assert torch_private.reduce_op_kind(dist.ReduceOp.AVG) == torch_private.ReduceKind.AVG
    assert torch_private.reduce_op_kind(dist.AllreduceOptions().reduceOp) == torch_private.ReduceKind.SUM


def test_no_profiler_no_range():
    assert torch_private.profiled_range("nothing") is None


ENDS_AT_ONCE = """
import time
import torch
import torch.distributed as dist
from hethub import communicator

dist.init_process_group("hethub")
group, tensor = dist.group.WORLD, torch.ones(200_000)  # both live as long as the process
dist.barrier()
time.sleep(0.05 * dist.get_rank())
dist.all_reduce(tensor)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_that_ends_right_behind_a_collective_ends_well(tmp_path):
    """Every second one ended by SIGABRT: Gloo's thread let go of the tensor in an interpreter that was torn down already."""
    (tmp_path / "train.py").write_text(ENDS_AT_ONCE, encoding="utf-8")
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    for _ in range(6):
        done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
