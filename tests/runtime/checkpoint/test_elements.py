"""A checkpoint restores the same bits under every plan, rank count and precision; the same plan trains on bit by
bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hethub.predictor.memory.ranks import rank_memory
from hethub.runtime.checkpoint import CheckpointManager, iterate_weights, read_record
from hethub.runtime.checkpoint.elements import CHUNK_ELEMENTS, Chunk, cut, most_elements, snapshot
from hethub.runtime.checkpoint.index import IndexEntry
from hethub.runtime.checkpoint.reader import Reader
from hethub.spec.errors import BadInput
from tests.support.checkpoints import assembled, load_and_save, newest_intact, start, state_parts, train_and_save
from tests.support.layouts import MODEL, Case, build_trainer, chunked, replica, stage
from tests.support.ranks import run_ranks

TIED = MODEL.replace(tied_head=True)
MILLION = 10**6
ALL = ["parameters", "optimizer", "activations"]


def plans(precision: str, model: Any) -> list[Case]:
    """A chain of unlike plans, the first with everything sharded, offloaded and stepped chunk by chunk."""
    everything = [
        chunked([(0, 1), (2, 3)], replica([0], 5, 2), replica([1], 3), zero=3, state_shares={1: 0.1}, offload=ALL),
        chunked([(1, 2), (3, 4)], replica([2], 4, 2), replica([3], 4), zero=2, offload=["optimizer"]),
    ]
    first = Case(name="all", stages=everything, schedule="ministages", vendors="anan", precision=precision, model=model)
    stages: dict[str, tuple[list[dict[str, Any]], str]] = {
        "zero1 with state shares, a rank without state": (
            [stage((0, 4), replica([0], 4), replica([1], 2), replica([2], 2), zero=1, state_shares={0: 0.7, 2: 0.0})],
            "ana",
        ),
        "tp2, then tp1 twice": (
            [stage((0, 1), replica([0, 1], 8, 2)), stage((1, 4), replica([2], 5), replica([3], 3))],
            "",
        ),
        "unlike replicas in both stages": (
            [
                stage((0, 2), replica([0], 5, 2), replica([1], 3), zero=1),
                stage((2, 4), replica([2, 3], 6, 2, tensor_shares=[3, 1]), replica([4], 2), zero=1),
            ],
            "anaan",
        ),
        "alone": ([stage((0, 4), replica([0], 8))], ""),
        "pp3": (
            [stage((0, 2), replica([0], 8)), stage((2, 3), replica([1], 8)), stage((3, 4), replica([2], 8))],
            "ana",
        ),
        "rank 0 unused": ([stage((0, 2), replica([1], 8)), stage((2, 4), replica([2], 8))], "nan"),
    }
    return [
        first,
        *(
            Case(
                name=name,
                stages=value,
                vendors=vendors,
                precision=precision,
                model=model,
                unused=(0,) if name == "rank 0 unused" else (),
            )
            for name, (value, vendors) in stages.items()
        ),
    ]


# fp32 keeps its state as fp64 does; bf16 and fp16 have masters.
@pytest.mark.parametrize(
    ("precision", "model"),
    [
        pytest.param("fp64", TIED, marks=pytest.mark.slow),
        pytest.param("fp32", MODEL, marks=pytest.mark.slow),
        ("bf16", TIED),
        pytest.param("fp16", MODEL, marks=pytest.mark.slow),
    ],
)
def test_state_goes_through_every_plan_unchanged(precision: str, model: Any, tmp_path: Path) -> None:
    first, *others = plans(precision, model)
    results = run_ranks(first.size, train_and_save, first, tmp_path / "0", [3], 1, islands=first.islands)
    state = assembled([owned for owned, _, _ in results])
    weights = assembled([held for _, held, _ in results])
    assert all(np.any(values) for values in state.values())
    for number, (case, chunk_elements) in enumerate(
        zip(others, [500, MILLION, 1000, MILLION, 333, 700], strict=True), 1
    ):
        source, target = tmp_path / str(number - 1), tmp_path / str(number)
        restored = run_ranks(case.size, load_and_save, case, source, target, chunk_elements, islands=case.islands)
        assert_equal(assembled([owned for owned, _, _ in restored]), state)
        assert_equal(assembled([held for _, held, _ in restored]), weights)
        assert {counters for _, _, counters in restored} == {results[0][2]}
    assert (results[0][2][0] < 3) == (precision == "fp16")  # the loss scale overflowed and an update was left out
    check_export(tmp_path / str(number), state, model)


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert np.array_equal(found[key], values), key


def check_export(folder: Path, state: dict[str, np.ndarray], model: Any) -> None:
    """One process without groups reads every weight once, and the model they belong to."""
    path = newest_intact(folder)
    assert path is not None
    assert read_record(path).model == model
    weights = {info.name: values.numpy() for info, values in iterate_weights(path, model)}
    assert_equal(
        weights, {key.partition("/")[2]: values for key, values in state.items() if key.startswith("weights/")}
    )


def train_on(world: Any, case: Case, folder: Path | None, first: int, last: int) -> Any:
    """Losses of steps `first` to `last` and the state after them; starts from the checkpoint in `folder`, if given."""
    trainer = start(world, case)
    if folder is not None:
        store = CheckpointManager(folder, 1, world)
        path = store.latest()
        assert trainer.restore(store, path) == first - 1
    losses = [trainer.run_step(step).loss for step in range(first, last + 1)]
    return losses, *state_parts(trainer)


@pytest.mark.parametrize(
    ("precision", "plan"),
    [("fp32", 3), pytest.param("fp16", 3, marks=pytest.mark.slow), pytest.param("fp16", 0, marks=pytest.mark.slow)],
)
def test_resumed_training_equals_uninterrupted_training(precision: str, plan: int, tmp_path: Path) -> None:
    case = plans(precision, TIED)[plan]
    options = {"islands": case.islands}
    run_ranks(case.size, train_and_save, case, tmp_path, [3], 1, **options)
    straight = run_ranks(case.size, train_on, case, None, 1, 6, **options)
    resumed = run_ranks(case.size, train_on, case, tmp_path, 4, 6, **options)
    assert [losses[3:] for losses, _, _ in straight] == [losses for losses, _, _ in resumed]
    for index in (1, 2):
        assert_equal(assembled([r[index] for r in resumed]), assembled([s[index] for s in straight]))


def test_resumed_under_another_plan_trains_the_same_model(tmp_path: Path) -> None:
    before, after = plans("fp64", TIED)[:2]
    run_ranks(before.size, train_and_save, before, tmp_path, [2], 1, islands=before.islands)
    straight = run_ranks(before.size, train_on, before, None, 1, 5, islands=before.islands)
    resumed = run_ranks(after.size, train_on, after, tmp_path, 3, 5, islands=after.islands)
    assert resumed[0][0] == pytest.approx(straight[0][0][2:], rel=1e-10)


def bytes_saved(world: Any, case: Case) -> int:
    trainer = build_trainer(world, case)
    chunks = [] if trainer.optimizer is None else snapshot(trainer.optimizer, world.device)
    return sum(chunk.values.nbytes for chunk in chunks)


def test_replicas_that_hold_the_same_save_equal_parts_of_it() -> None:
    """Tensor-parallel degrees are unlike, so what is alike are other pieces for every pair of ranks."""
    stages = [stage((0, 4), replica([0], 3, 1), replica([1], 3, 1), replica([2, 3], 2, 1))]
    case = Case(name="zero0", stages=stages, precision="fp32")
    saved = run_ranks(4, bytes_saved, case)
    assert sum(saved) == 3 * 4 * MODEL.parameters
    assert max(saved[:2]) - min(saved[:2]) < 100  # one element of each kind and group
    assert max(saved) < 0.4 * sum(saved)
    foreseen = rank_memory(case.layout())
    assert sum(entry.host_parts["checkpoint"] for entry in foreseen) == pytest.approx(sum(saved), rel=0.02)


def test_large_models_have_larger_chunks_in_powers_of_two() -> None:
    unit = CHUNK_ELEMENTS
    assert [most_elements(int(size)) // unit for size in (1e9, 3e10, 7e10, 4.05e11)] == [1, 1, 4, 16]
    whole = Chunk("weights/a", 100 * unit, 7, torch.empty(27 * unit + 5, device="meta"))
    pieces = [(piece.offset, piece.values.numel()) for piece in cut(whole, 16 * unit)]
    assert [size for _, size in pieces] == [16 * unit, 8 * unit, 2 * unit, unit, 5]
    assert [offset - 7 for offset, _ in pieces] == [0, 16 * unit, 24 * unit, 26 * unit, 27 * unit]
    even = Chunk("weights/a", 24 * unit, 0, torch.empty(24 * unit, device="meta"))
    assert [piece.values.numel() for piece in cut(even, 16 * unit)] == [16 * unit, 8 * unit]  # in no more than it needs


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [(0, 1, [0]), (3, 10, [0]), (9, 10, [0]), (10, 15, [10]), (9, 11, [0, 10]), (14, 20, [10, 15])],
)
def test_no_chunk_is_read_but_what_holds_what_is_wanted(start: int, stop: int, wanted: list[int]) -> None:
    chunks = [(first, end - first, "__0_0.distcp", 100 * first, 100) for first, end in ((0, 10), (10, 15), (15, 20))]
    found = IndexEntry.model_validate({"dtype": "float32", "numel": 20, "chunks": chunks}).touching(start, stop)
    assert [chunk.offset for chunk in found] == wanted


@pytest.mark.parametrize("spans", [((1, 10), (10, 20)), ((0, 10), (11, 20)), ((0, 11), (10, 20)), ((0, 10), (10, 19))])
def test_chunks_that_lack_an_element_or_have_one_twice_are_refused(spans: Any) -> None:
    """What no chunk holds would be read as whatever lay in memory."""
    chunks = [(first, end - first, "__0_0.distcp", 0, 100) for first, end in spans]
    with pytest.raises(ValueError, match="do not hold every element once"):
        IndexEntry.model_validate({"dtype": "float32", "numel": 20, "chunks": chunks})


@pytest.mark.parametrize("numel", [19, 21])
def test_a_tensor_of_another_size_is_refused(numel: int, tmp_path: Path) -> None:
    entry = {"dtype": "float32", "numel": 20, "chunks": [[0, 20, "__0_0.distcp", 0, 100]]}
    (tmp_path / "index.json").write_text(json.dumps({"version": 1, "entries": {"weights/a": entry}}))
    with pytest.raises(BadInput, match=f"weights/a has 20 elements, but the model here has {numel}"):
        Reader(tmp_path).whole("weights/a", numel)


def save_while_training(world: Any, case: Case, folder: Path) -> Any:
    """Rank 1 begins to save only after rank 0 has trained on (alone), so rank 0's data are written after that."""
    trainer = build_trainer(world, case)
    store = CheckpointManager(folder, 1, world)
    trainer.run_step(1)
    before = state_parts(trainer)
    if world.rank == 0:
        trainer.save(store, 1, blocking=False)
        trainer.storage.grads.fill_(1.0)
        trainer.optimizer.step_runs(trainer.optimizer.runs, 2, 1.0)
        assert not np.array_equal(state_parts(trainer)[0][0][2], before[0][0][2])
    world.barrier()
    if world.rank == 1:
        trainer.save(store, 1, blocking=False)
    store.wait()
    path = store.latest()
    trainer.restore(store, path)
    return before[0], state_parts(trainer)[0]


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    case = Case(name="pp2", stages=[stage((0, 2), replica([0], 8)), stage((2, 4), replica([1], 8))], precision="fp32")
    results = run_ranks(2, save_while_training, case, tmp_path)
    assert_equal(assembled([restored for _, restored in results]), assembled([before for before, _ in results]))
