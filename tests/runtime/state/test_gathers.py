"""New weights under ZeRO 1 and 2 come while the next step's forward is under way, and before the layer that needs them."""

from typing import Any

import pytest

from hethub.runtime.state import reduction
from hethub.spec.layout.execution import Kind
from tests.support.layouts import Case, build_trainer, chunked, replica, stage
from tests.support.ranks import run_ranks

WAIT, ENTER = "wait", "enter"


class Logged:
    """A collective under way; the log says when somebody waits for it, and for which layer's bucket."""

    def __init__(self, work: Any, log: list[tuple[str, int]], layer: int) -> None:
        self._work, self._log, self._layer = work, log, layer

    def wait(self) -> None:
        self._log.append((WAIT, self._layer))
        self._work.wait()


def log_second_step(world: Any, case: Case) -> tuple[list[tuple[str, int]], list[int]]:
    """What the second step of this rank waits for and enters, in order, and the layers of all buckets of matrices."""
    trainer, log = build_trainer(world, case), list[tuple[str, int]]()
    begin, enter = reduction.LocalPiece.start_gather, trainer.pace.enter

    def start_gather(piece: reduction.LocalPiece, flat: Any) -> Any:
        work = begin(piece, flat)
        return Logged(work, log, piece.bucket.layer) if work is not None and piece.bucket.decays else work

    def enter_layer(kind: Kind, layer: int) -> None:
        if kind is Kind.FORWARD:
            log.append((ENTER, layer))
        enter(kind, layer)

    reduction.LocalPiece.start_gather = start_gather  # type: ignore[method-assign]
    trainer.pace.enter = enter_layer  # type: ignore[method-assign]
    trainer.run_step(1)
    log.clear()
    trainer.run_step(2)
    found = list(log)
    trainer.stepping.flush()
    layers = [piece.bucket.layer for piece in trainer.reducer.pieces if piece.bucket.decays]
    return found, layers


PAIR = (replica([0], 4, 1), replica([1], 4, 2))
ALIKE = (replica([0], 4, 1), replica([1], 4, 1))  # in rounds a rank without a microbatch waits, but enters no layer


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        ([stage((0, 4), *PAIR, zero=1)], "1f1b"),
        ([stage((0, 4), *ALIKE, zero=2)], "1f1b"),
        ([stage((0, 4), *PAIR, zero=1)], "layered"),
        ([chunked([(0, 2), (2, 4)], *PAIR, zero=1)], "ministages"),
        ([stage((0, 3), *PAIR, zero=1), stage((3, 4), replica([2], 8, 2))], "1f1b"),
    ],
    ids=["ZeRO 1", "ZeRO 2", "layered", "ministages", "two stages"],
)
def test_a_layer_waits_for_its_own_weights_alone(stages: list[dict[str, Any]], schedule: str) -> None:
    case = Case(name="gathers", stages=stages, schedule=schedule)
    for log, layers in run_ranks(case.size, log_second_step, case)[:2]:
        entered = [layer for what, layer in log if what == ENTER]
        waited = [layer for what, layer in log if what == WAIT]
        assert sorted(waited) == sorted(layers)
        for layer in set(layers):
            first = log.index((ENTER, layer))
            assert all(log.index((WAIT, own)) < first for own in layers if own <= layer)
            assert layer == 0 or log.index((WAIT, layer)) > log.index((ENTER, layer - 1))
        assert set(entered) == set(range(max(entered) + 1))


def started(world: Any, case: Case) -> list[tuple[bool, int]]:
    """The gathers that a step of this rank starts, in order: whether of matrices, and for which layer."""
    trainer, found, begin = build_trainer(world, case), list[tuple[bool, int]](), reduction.LocalPiece.start_gather

    def start_gather(piece: reduction.LocalPiece, flat: Any) -> Any:
        found.append((piece.bucket.decays, piece.bucket.layer))
        return begin(piece, flat)

    reduction.LocalPiece.start_gather = start_gather  # type: ignore[method-assign]
    trainer.run_step(1)
    return found


def test_weights_are_sent_in_the_order_in_which_the_next_forward_needs_them() -> None:
    """Norms, which are waited for at once, before all: one at a time a library carries what it is given first."""
    for found in run_ranks(2, started, Case(name="gathers", stages=[stage((0, 4), *PAIR, zero=1)])):
        assert found == sorted(found)
        assert {layer for decays, layer in found if decays} == set(range(4))
        assert not found[0][0]


def sent(world: Any, case: Case) -> tuple[int, int]:
    """How often two steps of this rank send new weights, and of how many pieces it has some to send."""
    trainer, found, begin = build_trainer(world, case), [], reduction.LocalPiece.start_gather

    def start_gather(piece: reduction.LocalPiece, flat: Any) -> Any:
        if piece.gathers:
            found.append(piece)
        return begin(piece, flat)

    reduction.LocalPiece.start_gather = start_gather  # type: ignore[method-assign]
    trainer.run_step(1)
    trainer.run_step(2)
    trainer.stepping.flush()
    return len(found), sum(piece.gathers for piece in trainer.reducer.pieces)


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_step_sends_new_weights_once_when_chunks_are_stepped_apart(clip: float | None) -> None:
    """Whether a chunk is stepped behind its backward, or when it is next at hand."""
    stages = [chunked([(0, 2), (2, 4)], *PAIR, zero=1)]
    case = Case(name="gathers", stages=stages, schedule="ministages", train={"grad_clip": clip})
    for gathers, pieces in run_ranks(2, sent, case):
        assert pieces >= 4
        assert gathers == 2 * pieces
