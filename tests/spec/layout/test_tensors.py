"""How a replica's ranks share heads, columns and vocabulary."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hethub.spec.errors import BadInput
from hethub.spec.layout.tensors import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    layer_tensors,
    model_tensors,
    rank_shares,
    stage_tensors,
    tp_degrees,
)
from hethub.spec.model import ModelSpec
from hethub.spec.plan import ReplicaSpec
from hethub.spec.ranges import Range, covers_exactly
from tests.support.layouts import MODEL


def model(heads: int, kv_heads: int, **more: int) -> ModelSpec:
    shape = {"layers": 3, "hidden": 4 * heads, "ffn": 64, "vocab": 101, "max_seq_len": 8} | more
    return ModelSpec(name="m", heads=heads, kv_heads=kv_heads, **shape)


def shared(spec: ModelSpec, tp: int, shares: list[float] | None = None) -> list:
    return rank_shares(
        spec, ReplicaSpec(ranks=tuple(range(tp)), samples=1, micro_batch=1, tensor_shares=shares), "here"
    )


models = st.builds(
    lambda kv, group, ffn, vocab: model(kv * group, kv, ffn=ffn, vocab=vocab),
    st.integers(1, 8), st.integers(1, 4), st.integers(64, 300), st.integers(64, 300),
)  # fmt: skip


@given(models, st.data())
def test_equal_degrees_cover_everything_and_keep_query_groups_with_their_kv_head(
    spec: ModelSpec, data: st.DataObject
) -> None:
    tp = data.draw(st.sampled_from(tp_degrees(spec)))
    held = shared(spec, tp)
    assert covers_exactly([h.query for h in held], Range(0, spec.heads))
    assert covers_exactly([h.ffn for h in held], Range(0, spec.ffn))
    assert covers_exactly([h.vocab for h in held], Range(0, spec.vocab))
    assert len({h.query.size for h in held}) == 1
    per_group = spec.heads // spec.num_kv_heads
    for own in held:
        needed = {head // per_group for head in range(*own.query)}
        assert needed == set(range(*own.kv))  # just the KV heads its queries use
    if tp <= spec.num_kv_heads:
        assert covers_exactly([h.kv for h in held], Range(0, spec.num_kv_heads))


@given(models)
def test_degrees_are_those_that_are_accepted(spec: ModelSpec) -> None:
    for tp in range(1, spec.heads + 2):
        if tp in tp_degrees(spec):
            assert len(shared(spec, tp)) == tp
        else:
            with pytest.raises(BadInput, match=f"here: TP {tp} does not divide"):
                shared(spec, tp)


@given(models, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_uneven_shares_split_by_whole_kv_groups_or_are_refused(spec: ModelSpec, shares: list[int]) -> None:
    try:
        held = shared(spec, len(shares), [float(s) for s in shares])
    except BadInput as refusal:
        assert re.search("leave rank|uneven parts|does not divide", str(refusal))  # noqa: PT017
        return
    assert covers_exactly([h.query for h in held], Range(0, spec.heads))
    assert covers_exactly([h.ffn for h in held], Range(0, spec.ffn))
    assert covers_exactly([h.vocab for h in held], Range(0, spec.vocab))
    per_group = spec.heads // spec.num_kv_heads
    for own in held:
        assert {head // per_group for head in range(*own.query)} == set(range(*own.kv))
        assert all(own)


def test_uneven_shares_need_a_kv_head_for_every_rank() -> None:
    """Regression: such shares were taken for equal ones, and a rank then held queries of a KV head it lacked."""
    with pytest.raises(BadInput, match=r"uneven parts of 2 key-value heads.*use at most 2 ranks"):
        shared(model(8, 2), 4, [3, 1, 1, 1])
    with pytest.raises(BadInput, match="TP 3 does not divide the 2 key-value heads"):
        shared(model(4, 2), 3, [1, 1, 1])
    assert shared(model(8, 2), 4, [2, 2, 2, 2]) == shared(model(8, 2), 4)


def test_kv_heads_are_shared_by_neighbours() -> None:
    assert [tuple(h.kv) for h in shared(model(8, 2), 4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [tuple(h.query) for h in shared(model(8, 2), 4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_shares_three_to_one() -> None:
    first, second = shared(model(8, 4), 2, [3, 1])
    assert (tuple(first.query), tuple(second.query)) == ((0, 6), (6, 8))
    assert (tuple(first.kv), tuple(second.kv)) == ((0, 3), (3, 4))
    assert (tuple(first.ffn), tuple(second.ffn)) == ((0, 48), (48, 64))


def test_columns_are_dealt_in_eights_where_there_are_enough() -> None:
    assert {h.ffn.size % 8 for h in shared(model(8, 4, ffn=1000), 4)} == {0}
    assert [h.ffn.size for h in shared(model(8, 4, ffn=66), 4)] == [17, 17, 16, 16]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "degrees"),
    [
        (8, 4, 3, "1, 2, 4, 8; or give tensor_shares for uneven heads."),
        (12, 3, 2, "1, 3, 6, 12; or give tensor_shares"),
        (6, 6, 4, "1, 2, 3, 6; or give tensor_shares"),
        (8, 4, 6, "1, 2, 4, 8.$"),
        (8, 8, 16, "1, 2, 4, 8.$"),
    ],
)
def test_heads_that_do_not_divide_name_the_degrees_that_work(heads: int, kv_heads: int, tp: int, degrees: str) -> None:
    with pytest.raises(BadInput, match=f"here: TP {tp} .* Degrees that work: {degrees}"):
        shared(model(heads, kv_heads), tp)


@pytest.mark.parametrize("shares", [[100, 1], [1, 0]])
def test_a_share_too_small_for_a_head_names_the_rank(shares: list[float]) -> None:
    with pytest.raises(BadInput, match="leave rank 1 without a part of the 4 key-value heads"):
        shared(MODEL, 2, shares)


@pytest.mark.parametrize("tied", [False, True])
def test_the_tensors_of_the_stages_are_those_of_the_model(tied: bool) -> None:
    spec = MODEL.replace(tied_head=tied)
    stages = [
        stage_tensors(spec, (Range(0, 1),)),
        stage_tensors(spec, (Range(1, 3),)),
        stage_tensors(spec, (Range(3, 4),)),
    ]
    names = [tensor.name for stage in stages for tensor in stage]
    assert sorted(names) == sorted(tensor.name for tensor in model_tensors(spec))
    assert len(names) == len(set(names)) == 9 * 4 + 2 + (not tied)
    assert names[0] == EMBEDDING
    assert FINAL_NORM in [tensor.name for tensor in stages[2]]
    assert (HEAD in names) == (not tied)
    assert sum(tensor.numel for tensor in model_tensors(spec)) == spec.parameters
    assert sum(tensor.numel for tensor in layer_tensors(spec, 0)) == spec.layer_parameters


@given(models, st.data())
def test_shards_of_every_tensor_are_runs_that_cover_it(spec: ModelSpec, data: st.DataObject) -> None:
    held = shared(spec, data.draw(st.sampled_from(tp_degrees(spec))))
    for tensor in model_tensors(spec):
        runs = [tensor.held(own) for own in held]
        covered = set().union(*(range(*run) for run in runs)) if tensor.numel < 5000 else None
        if tensor.axis is None:
            assert set(runs) == {Range(0, tensor.numel)}
        elif tensor.axis == "kv":
            assert min(r.start for r in runs) == 0
            assert max(r.stop for r in runs) == tensor.numel
        else:
            assert covers_exactly(runs, Range(0, tensor.numel))
        assert covered is None or len(covered) == tensor.numel
