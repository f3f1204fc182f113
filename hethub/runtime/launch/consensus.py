"""Consensus of the ranks before they have a world: every rank tells through the store, all conclude alike."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from hethub.communicator import Rendezvous
from hethub.communicator.joining.rendezvous import NEWS_SECONDS, unheard
from hethub.spec.errors import BadInput, RunFailed

T = TypeVar("T")
Answer = dict[str, Any]  # what a rank tells the others: a value, a fault of the input, or its own failure

_LEAVE_SECONDS = 10.0


def all_gather(meeting: Rendezvous, key: str, value: Any) -> list[Any]:
    """Every rank's JSON-able value, by rank; all ranks call it with the same key."""
    _tell(meeting, key, {"value": value})
    return [answer["value"] for answer in _hear(meeting, key, range(meeting.size))]


def consensus(meeting: Rendezvous, key: str, attempt: Callable[[], T], *, patience_seconds: float | None = None) -> T:
    """This rank's `attempt()`, once it has succeeded on every rank.

    Where it refuses bad input on any, BadInput on all, spoken by the lowest such rank. A rank on which it fails
    otherwise raises what failed; all others raise RunFailed naming it, as they do where a rank does not answer within
    `patience_seconds` (None: the store's own timeout).
    """
    result, answer = _attempt(meeting, key, attempt)
    _tell(meeting, key, answer)
    _conclude(meeting, _hear(meeting, key, range(meeting.size), patience_seconds))
    return result  # type: ignore[return-value]


def broadcast(meeting: Rendezvous, key: str, decide: Callable[[], T], *, patience_seconds: float) -> T:
    """What `decide()` gives on rank 0 (JSON-able), on every rank; what it raises there is told as in `consensus`."""
    if meeting.rank == 0:
        result, answer = _attempt(meeting, key, decide)
        _tell(meeting, key, {**answer, "value": result})
    [answer] = _hear(meeting, key, [0], patience_seconds)
    _conclude(meeting, [answer])
    value: T = answer["value"]
    return value


def _attempt(meeting: Rendezvous, key: str, attempt: Callable[[], T]) -> tuple[T | None, Answer]:
    """The result, and what to tell the others of it. A failure is told before it is raised."""
    try:
        return attempt(), {}
    except BadInput as error:
        return None, {"fault": str(error)}
    except Exception as error:
        _tell(meeting, key, {"failure": f"{type(error).__name__}: {error}"})
        leave(meeting)
        raise


def _tell(meeting: Rendezvous, key: str, answer: Answer) -> None:
    with _reaching(meeting, key, [0]):
        meeting.store.set(_place(key, meeting.rank), json.dumps(answer))


def _place(key: str, rank: int) -> str:
    return f"agree/{key}/{rank}"


def _hear(meeting: Rendezvous, key: str, ranks: Sequence[int], patience_seconds: float | None = None) -> list[Answer]:
    """What the ranks have told. Where one fails meanwhile, the watch ends this process, whatever it waits for."""
    places = [_place(key, rank) for rank in ranks]
    with _reaching(meeting, key, ranks):
        seconds = patience_seconds or meeting.store.timeout.total_seconds()  # type: ignore[attr-defined]
        meeting.store.wait(places, timedelta(seconds=seconds))
        return [json.loads(answer) for answer in meeting.store.multi_get(places)]


@contextmanager
def _reaching(meeting: Rendezvous, key: str, ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        if meeting.watch is not None:
            meeting.watch.liveness.require_whole(NEWS_SECONDS)
        silent, reason = unheard(meeting.store, [_place(key, rank) for rank in ranks], error)
        raise RunFailed(
            f"rank {meeting.rank} heard nothing from rank {ranks[silent]} when the ranks were to agree on the {key}: {reason}"
        ) from None


def _conclude(meeting: Rendezvous, answers: Sequence[Answer]) -> None:
    """Raises what the ranks have told: a failure of one, or bad input; `quiet` where another rank speaks for all."""
    for what in ("failure", "fault"):
        told = [answer.get(what) for answer in answers]
        first = next((rank for rank, text in enumerate(told) if text is not None), None)
        if first is None:
            continue
        leave(meeting)
        if what == "failure":
            raise RunFailed(f"rank {meeting.rank} ends because rank {first} failed: {told[first]}")
        everywhere = all(text == told[first] for text in told)
        error = BadInput(told[first] if everywhere else f"rank {first}: {told[first]}")
        error.agreed, error.quiet = True, meeting.rank != first
        raise error


def leave(meeting: Rendezvous) -> None:
    """Rank 0 may serve the store, so when all ranks are about to end it waits until the others have read it."""
    with suppress(dist.DistError):
        meeting.store.set(f"agree/left/{meeting.rank}", "")
        if meeting.rank == 0:
            places = [f"agree/left/{rank}" for rank in range(meeting.size)]
            meeting.store.wait(places, timedelta(seconds=_LEAVE_SECONDS))
