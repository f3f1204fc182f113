"""The c10d backend "hethub": what `init_process_group("hethub")` and `new_group` create."""

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.context import Context
from hethub.communicator.groups.native import watch_group
from hethub.communicator.groups.process_group import HethubGroup
from hethub.communicator.joining.islands import parse_islands, restrict
from hethub.communicator.joining.rendezvous import Rendezvous, agree_on_token, exchanged, reaching
from hethub.communicator.joining.settings import is_on
from hethub.communicator.relays.shm_connection import host_identity
from hethub.communicator.setup import connecting, faults_told, make_context
from hethub.kernels.device import choose_device
from hethub.spec.errors import BadInput
from hethub.spec.network import TOKEN_VARIABLE, choose_interface

BACKEND = "hethub"


def register() -> None:
    """Makes torch know the backend; importing `hethub.communicator` does it."""
    torch_private.register_backend(BACKEND, create_group)


_WORLDS: "weakref.WeakKeyDictionary[dist.ProcessGroup, Context]" = weakref.WeakKeyDictionary()
"""The world behind each default group, as long as the group lives.

torch keeps the default group in its own registry and gives a creator nothing else to find it by. A native default
group cannot carry its world itself: a Python subclass of ProcessGroup, even without a method of its own, makes native
operations take the interpreter lock in Gloo's threads, where DDP deadlocks now and then (seen in torch 2.13).
"""


def create_group(options: Any, given: Any) -> dist.ProcessGroup:
    """The group torch asks for: the native library's own inside one island, a bridged one otherwise."""
    default = torch_private.default_group()
    if default is not None:
        context = context_of(default)
        with reaching(context.rank, context.watch.liveness, dist.DistError):
            return _make_group(context, options, is_default=False)
    context = given if isinstance(given, Context) else context_from_environment(options)
    with connecting(context.rendezvous):
        group = _make_group(context, options, is_default=True)
        context.gloo.barrier().wait()  # all have read what they need of the store: rank 0, which may serve it, may leave
    _WORLDS[group] = context
    # A native group has no shutdown of ours. Not at exit: a program that crashes must not pass for one that leaves.
    weakref.finalize(group, context.close).atexit = False
    return group


def _make_group(context: Context, options: Any, *, is_default: bool) -> dist.ProcessGroup:
    members = torch_private.global_ranks(options)
    if context.emulation is None and len(restrict(context.islands, members)) == 1:
        group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        return with_native_backends(group, context, options)
    timeout_seconds = options.timeout.total_seconds()
    gloo = context.gloo if is_default else context.gloo_group(options.group_id, members, timeout_seconds)
    make = HethubGroup if context.emulation is None else context.emulation.group
    return make(context, members, options.group_id, gloo, timeout_seconds)


def with_native_backends(group: dist.ProcessGroup, context: Context, options: Any) -> dist.ProcessGroup:
    """The group, run by the island's native library with nothing of ours in between."""
    name, members = options.group_id, torch_private.global_ranks(options)
    context.release_with(group, name)
    gloo = context.gloo_group(name, members, options.timeout.total_seconds())
    store = dist.PrefixStore(context.meeting_place("native", name, members), context.rendezvous.store)
    nccl = torch_private.attach_native(group, gloo, context.device, options, store)
    if nccl is not None:
        context.watch_nccl(nccl, name)
    watch_group(group, partial(context.turn_of, on_host=torch_private.CountedByGloo(gloo)))
    return group


def context_of(default: dist.ProcessGroup) -> Context:
    """The world behind torch's default group. Raises BadInput where that is not hethub's."""
    if default not in _WORLDS:
        raise BadInput(
            "a group of the backend 'hethub' needs a default group of that backend: call init_process_group('hethub')"
            " or hethub.communicator.connect() first."
        )
    return _WORLDS[default]


def context_from_environment(options: Any) -> Context:
    """A world for a program that only calls `init_process_group("hethub")`.

    HETHUB_ISLANDS emulates islands, HETHUB_NETWORK names the network as a CIDR, HETHUB_RELAY, HETHUB_WIRE,
    HETHUB_DEBUG and HETHUB_STAGED_RANKS are what `connect` takes as arguments. Raises BadInput, and RunFailed where a rank
    does not come, or has gone.
    """
    rank, size = options.group_rank, options.group_size
    # A launcher's store outlives a world, and would tell the next one where the ranks of the last one are.
    with reaching(rank):
        store = dist.PrefixStore(f"world/{options.store.add(f'worlds/{rank}', 1)}", options.store)
    with faults_told(store, rank, size):
        rendezvous = _meeting(store, rank, size)
        device = choose_device(rendezvous.local_rank, rendezvous.local_size)
        emulated = os.environ.get("HETHUB_ISLANDS")
        islands = parse_islands(emulated, size) if emulated else None
        staged = [int(word) for word in os.environ.get("HETHUB_STAGED_RANKS", "").split(",") if word]
        debug = is_on("HETHUB_DEBUG", os.environ)
    with connecting(rendezvous):
        context = make_context(
            rendezvous,
            device=device,
            islands=islands,
            relay=os.environ.get("HETHUB_RELAY", "auto"),
            wire=os.environ.get("HETHUB_WIRE", "exact"),
            timeout_seconds=options.timeout.total_seconds(),
            debug=debug,
            staged_ranks=staged,
        )
        if rank == 0:
            store.delete_key("token")  # which all ranks knew before they told their facts
    return context


def _meeting(store: dist.Store, rank: int, size: int) -> Rendezvous:
    """Where this rank is. Raises BadInput."""
    with reaching(rank):
        hosts = exchanged(dist.PrefixStore("hosts", store), rank, size, host_identity())
        token = agree_on_token(store, rank, os.environ.get(TOKEN_VARIABLE))  # first: for rank 0's the others wait
    local_rank, local_size = place_on_host(rank, hosts)
    interface = choose_interface(os.environ.get("HETHUB_NETWORK"), is_multi_node=len(set(hosts)) > 1)
    return Rendezvous(
        store=store,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=interface.address,
        interface=interface.name,
        token=token,
        launcher="init_process_group",
    )


def place_on_host(rank: int, hosts: Sequence[str]) -> tuple[int, int]:
    """The rank's place among the ranks of its host, and how many those are: as the launcher says it in LOCAL_RANK and
    LOCAL_WORLD_SIZE, else in rank order. `hosts` tell each rank's host from the others."""
    beside = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = int(os.environ.get("LOCAL_RANK", beside.index(rank)))
    return local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", len(beside)))


def init_default_group(context: Context) -> dist.ProcessGroup:
    """Makes `context`'s world torch's default process group."""
    dist.init_process_group(
        BACKEND,
        store=dist.PrefixStore("c10d", context.rendezvous.store),
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=context.timeout_seconds),
        pg_options=context,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def new_group(context: Context, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of `ranks` (None on others): every rank of the world calls it, in the same order."""
    group = dist.new_group(list(ranks), backend=BACKEND, timeout=timedelta(seconds=context.timeout_seconds))
    return group if context.rank in ranks else None
