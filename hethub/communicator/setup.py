"""Makes a world's context: agree on who is who, find the islands, connect relays and the liveness watch."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.bridge.wire import check_wire
from hethub.communicator.context import Context
from hethub.communicator.joining.connection import Failure
from hethub.communicator.joining.islands import Islands, check_islands, islands_by_label
from hethub.communicator.joining.rendezvous import NEWS_SECONDS, Rendezvous, exchange_last_words, exchanged
from hethub.communicator.joining.settings import as_told, first_difference
from hethub.communicator.joining.versions import Software, check_same
from hethub.communicator.joining.watch import watch_over
from hethub.communicator.relays.choice import RelayChoice
from hethub.communicator.relays.connection import Connector
from hethub.communicator.relays.gloo import connect_gloo
from hethub.communicator.relays.shm_connection import host_identity
from hethub.kernels.compiled import kernels_for
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput, RunFailed


@dataclass(frozen=True, kw_only=True)
class RankFacts(Software):
    """What a rank tells the others before anything else is built."""

    host: str
    host_identity: str
    process: int
    vendor: str
    device: str | None
    """What tells the rank's device from every other; None on a CPU, which ranks share."""
    settings: dict[str, str]
    serves_store: bool
    """Whether the store in which the ranks meet ends with this rank."""

    @classmethod
    def here(cls, device: Device, settings: dict[str, str], store: dist.Store) -> "RankFacts":
        return cls(
            host=socket.gethostname(),
            host_identity=host_identity(),
            process=os.getpid(),
            vendor=device.vendor,
            device=device.identity,
            settings=settings,
            serves_store=torch_private.serves_store(store),
            library=device.native_library,
            **cls.versions(),
        )


def make_context(
    rendezvous: Rendezvous,
    *,
    device: Device,
    islands: Sequence[Sequence[int]] | None,
    relay: str,
    wire: str,
    timeout_seconds: float,
    debug: bool = False,
    num_lanes: int = 1,
    staged_ranks: Sequence[int] = (),
    stored_relays: RelayChoice | None = None,
) -> Context:
    """The context of this rank, whose device is the calling thread's current one from here on; all ranks call it with the
    same arguments. Raises BadInput where they do not fit."""
    settings = as_told(
        islands=islands, relay=relay, wire=wire, timeout_seconds=timeout_seconds, debug=debug, num_lanes=num_lanes,
        staged_ranks=staged_ranks,
    )  # fmt: skip
    with faults_told(rendezvous.store, rendezvous.rank, rendezvous.size):
        device.activate()  # torch's meshes, and FSDP2, take the current one where devices have been used already
        own = RankFacts.here(device, settings, rendezvous.store)
    facts = exchange_facts(rendezvous, own)
    check_facts(facts)
    check_wire(wire)
    given = check_islands(islands, rendezvous.size) if islands is not None else None
    known = given or islands_by_label([fact.vendor for fact in facts])
    check_staged(known, staged_ranks)
    _use_interface(rendezvous)
    watch = rendezvous.watch or watch_over(
        rendezvous.store,
        rank=rendezvous.rank,
        size=rendezvous.size,
        address=rendezvous.address,
        token=rendezvous.token,
        timeout_seconds=timeout_seconds,
    )
    rendezvous, hosts = replace(rendezvous, watch=watch), [fact.host_identity for fact in facts]
    with connecting(rendezvous):
        gloo = connect_gloo(rendezvous, "gloo/world", range(rendezvous.size), timeout_seconds)
        connector = Connector(rendezvous, hosts, device, timeout_seconds, num_lanes)
        choice = connector.choose(relay, stored_relays)
        relays = connector.carriers(choice)
    context = Context(
        rendezvous=rendezvous,
        device=device,
        kernels=kernels_for(device),
        stages_host_tensors=rendezvous.rank in staged_ranks,
        device_ranks=frozenset(rank for rank, fact in enumerate(facts) if fact.vendor != "cpu").union(staged_ranks),
        islands=known,
        gloo=gloo,
        relays=relays,
        relay_choice=choice,
        hosts=hosts,
        store_server=next((rank for rank, fact in enumerate(facts) if fact.serves_store), None),
        watch=watch,
        timeout_seconds=timeout_seconds,
        debug=debug,
        wire=wire,
    )
    watch.liveness.when_failed(context.abort)
    return context


@contextlib.contextmanager
def connecting(rendezvous: Rendezvous) -> Iterator[None]:
    """What goes wrong while ranks connect becomes RunFailed on all of them; they wait for no rank that has failed."""
    watch, is_over = rendezvous.watch, threading.Event()

    def end_waits(_: Failure) -> None:
        if not is_over.is_set():
            torch_private.break_store(rendezvous.store)

    if watch is not None:
        watch.liveness.when_failed(end_waits)
    try:
        yield
    except RunFailed:
        raise
    except (RuntimeError, OSError) as error:  # of the store, of Gloo, of the system
        # A lost connection is often felt before its cause is told.
        failure = watch.liveness.wait_for_failure(NEWS_SECONDS) if watch is not None else None
        if watch is not None and failure is None:
            watch.tell(f"{type(error).__name__}: {error}")
        raise RunFailed(
            f"rank {rendezvous.rank} could not connect to the other {rendezvous.size - 1} ranks: {failure or error}"
        ) from error
    finally:
        is_over.set()


def check_staged(islands: Islands, staged_ranks: Sequence[int]) -> None:
    """Raises BadInput unless the ranks that stage host tensors are whole islands: those share a native library."""
    for island in islands:
        if 0 < len(set(island) & set(staged_ranks)) < len(island):
            raise BadInput(
                f"ranks {sorted(staged_ranks)} stage their host tensors, but island {list(island)} only in part; name"
                " all ranks of an island or none."
            )


def exchange_facts(rendezvous: Rendezvous, own: RankFacts) -> list[RankFacts]:
    """What every rank says of itself, in rank order."""
    store = dist.PrefixStore("facts", rendezvous.store)
    said = [json.loads(each) for each in exchanged(store, rendezvous.rank, rendezvous.size, json.dumps(asdict(own)))]
    for rank, each in enumerate(said):
        if "fault" in each:
            raise (BadInput if each["is_input"] else RunFailed)(f"rank {rank} ({each['host']}): {each['fault']}")
    return [RankFacts(**each) for each in said]


@contextlib.contextmanager
def faults_told(store: dist.Store, rank: int, size: int) -> Iterator[None]:
    """What goes wrong on this rank in the block is told to the others, who would wait for it in `exchange_facts`."""
    try:
        yield
    except Exception as error:
        is_input = isinstance(error, BadInput)
        fault = str(error) if is_input else f"{type(error).__name__}: {error}"
        own = {"fault": fault, "is_input": is_input, "host": socket.gethostname()}
        exchange_last_words(dist.PrefixStore("facts", store), rank, size, json.dumps(own))
        raise


def check_facts(facts: Sequence[RankFacts]) -> None:
    """Raises BadInput naming two ranks whose software or settings do not fit, or that drive one device."""
    places = [f"rank {rank} ({fact.host})" for rank, fact in enumerate(facts)]
    check_same(list(zip(places, facts, strict=True)))
    difference = first_difference([(place, fact.settings) for place, fact in zip(places, facts, strict=True)])
    if difference is not None:
        raise BadInput(difference)
    driven: dict[str, str] = {}
    for place, fact in zip(places, facts, strict=True):
        if fact.device is not None and driven.setdefault(fact.device, place) != place:
            raise BadInput(
                f"{driven[fact.device]} and {place} drive the same device ({fact.device}): no two ranks can. Start one"
                " rank per device and let every rank of a node see all its devices, or another one each"
                " (HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)."
            )


def _use_interface(rendezvous: Rendezvous) -> None:
    """Points the native libraries' own sockets at the interface of the job; what the user has set stays."""
    if rendezvous.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", rendezvous.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={rendezvous.interface}")  # a bare name is a prefix to NCCL
