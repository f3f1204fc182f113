"""Who holds, contributes to and steps every parameter element, under random layouts."""

import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.shares import cut_buckets, owner_fractions
from hethub.spec.layout.state import Piece, StateMap, both_ends_step, slice_runs
from hethub.spec.layout.tensors import EMBEDDING
from hethub.spec.ranges import Range, covers_exactly, merge, nearly_equal, overlap, split_by_shares
from tests.spec.random_plans import TIED, any_cases, cases
from tests.support.layouts import MODEL, Case, replica, stage


def pieces(state: StateMap) -> list[Piece]:
    return [piece for bucket in state.buckets for piece in bucket.pieces]


def users(layout: Layout, stage: int) -> list[int]:
    """The stages whose replicas add to the gradient of a tensor of `stage`: the last one too for a tied embedding."""
    return [stage, layout.num_stages - 1] if layout.head_is_apart and stage == 0 else [stage]


@given(cases())
def test_buckets_cover_the_axis_and_pieces_cover_the_buckets(case: Case) -> None:
    state = StateMap(case.layout())
    axis = Range(0, case.model.parameters)
    assert covers_exactly([placed.span for placed in state.tensors], axis)
    assert covers_exactly([bucket.span for bucket in state.buckets], axis)
    for bucket in state.buckets:
        assert covers_exactly([run for piece in bucket.pieces for run in piece.runs], bucket.span)
        inside = [t for t in state.tensors if bucket.span.contains(t.span)]
        assert {t.info.decays for t in inside} == {bucket.decays}
        assert {t.stage for t in inside} == {bucket.stage}


@given(cases())
def test_every_element_is_summed_once_per_replica(case: Case) -> None:
    """Per piece and replica that uses it: its holders contribute partial sums, or one stands for equal copies."""
    layout = case.layout()
    state = StateMap(layout)
    for bucket in state.buckets:
        tied = layout.head_is_apart and bucket.span.start == 0
        for piece in bucket.pieces:
            contributors = set(piece.group.contributors)
            for s in [0, layout.num_stages - 1] if tied else [bucket.stage]:
                for one in layout.stages[s].replicas:
                    mine = contributors & set(one.ranks)
                    if not bucket.decays:
                        assert mine == {one.ranks[0]}  # complete on every rank of the replica: counted once
                    else:
                        assert mine == holders(state, layout, one.ranks, piece.runs)
                        assert mine
                    contributors -= mine
            assert not contributors  # and nobody else adds to it


def holders(state: StateMap, layout: Layout, ranks: tuple[int, ...], runs: tuple[Range, ...]) -> set[int]:
    """The ranks that hold all of the runs; fails where one holds only a part of them."""
    found = set()
    for rank in ranks:
        held = merge(run for _, run in state.held_by(layout.assignments[rank]))
        inside = [any(whole.contains(run) for whole in held) for run in runs]
        assert all(inside) or not any(overlap(whole, run) for whole in held for run in runs)
        found |= {rank} if all(inside) else set()
    return found


@given(cases())
def test_every_element_is_stepped_by_one_owner_or_by_all_its_holders(case: Case) -> None:
    layout = case.layout()
    state = StateMap(layout)
    for bucket in state.buckets:
        for piece in bucket.pieces:
            if piece.group.sharded:
                assert covers_exactly(piece.cuts, Range(0, piece.numel))
                stepping = {r for r in piece.group.contributors if piece.owned_runs(r)}
                assert stepping <= set(piece.group.owners)
                if bucket.span.start == 0 and both_ends_step(layout):  # a tied head: every end's rank its part
                    assert piece.group.owners == piece.group.contributors
                    assert list(piece.cuts) == nearly_equal(piece.numel, len(piece.cuts))
                else:
                    assert set(piece.group.owners) <= set(layout.stages[bucket.stage].ranks)
            else:
                assert layout.stages[bucket.stage].zero == 0
                assert set(piece.cuts) == {Range(0, piece.numel)}
                assert piece.group.owners == piece.group.contributors


@given(cases())
def test_without_shares_owners_of_a_uniform_group_differ_by_rounding_only(case: Case) -> None:
    layout = case.layout()
    state = StateMap(layout)
    for s, spec in enumerate(layout.stages):
        alike = (
            len({(one.tp, one.tensor_shares) for one in spec.replicas}) == 1 and spec.replicas[0].tensor_shares is None
        )
        if spec.zero and alike and not layout.head_is_apart and spec.replicas[0].tp == 1:
            owned = totals(state, s)
            assert max(owned.values()) - min(owned.values()) <= len(pieces(state))


def totals(state: StateMap, stage: int) -> Counter[int]:
    """Elements of a stage that each of its ranks steps."""
    owned = Counter(dict.fromkeys(state.layout.stages[stage].ranks, 0))
    for bucket in state.buckets:
        if bucket.stage == stage:
            for piece in bucket.pieces:
                for rank in piece.group.contributors:
                    owned[rank] += sum(run.size for run in piece.owned_runs(rank))
    return owned


UNLIKE = [
    ([replica([0], 4), replica([1], 4)], MODEL),
    ([replica([0, 1], 4), replica([2], 4)], MODEL),
    ([replica([0, 1], 4, tensor_shares=[3, 1]), replica([2, 3, 4, 5], 2), replica([6], 2)], TIED),
    ([replica([0, 1, 2, 3], 6), replica([4], 2)], MODEL.replace(kv_heads=2)),
]


def one_stage(replicas: list[dict[str, Any]], model: Any, shares: dict[int, float]) -> StateMap:
    stages = [stage((0, 4), *replicas, zero=1, state_shares=shares)]
    return StateMap(Case(name="shares", stages=stages, model=model).layout())


@settings(max_examples=30)  # each solves some linear programmes
@given(st.sampled_from(UNLIKE), st.data())
def test_named_shares_are_met_or_refused_with_a_limit_that_is_accepted(unlike: Any, data: st.DataObject) -> None:
    replicas, model = unlike
    ranks = [rank for one in replicas for rank in one["ranks"]]
    named = data.draw(st.lists(st.sampled_from(ranks), max_size=2, unique=True))
    shares = {rank: data.draw(st.integers(0, 100 // len(named))) / 100 for rank in named}
    for _ in range(len(named) + 1):
        try:
            state = one_stage(replicas, model, shares)
            owned = totals(state, 0)
        except BadInput as refusal:
            shares = corrected(shares, str(refusal))
            continue
        for rank, share in shares.items():
            assert abs(owned[rank] - Fraction(share) * model.parameters) <= len(pieces(state)) + 1e-5 * model.parameters
        assert sum(owned.values()) == model.parameters
        return
    raise AssertionError(f"the limits of the refusals are refused again: {shares}")


def corrected(shares: dict[int, float], refusal: str) -> dict[int, float]:
    """The shares with the value that the refusal offers."""
    found = re.search(r"rank (\d+) is given .*; give it at (?:most|least) ([0-9.e+-]+),", refusal)
    if found is None:
        assert "cannot be met together" in refusal
        return dict(list(shares.items())[:1])
    return {**shares, int(found[1]): float(found[2])}


def test_a_share_that_can_only_be_what_it_is_is_to_be_left_out() -> None:
    """Of one replica no rank steps for another: what was offered to six digits was refused, whichever way it was rounded."""
    alone = [replica([0, 1], 8)]
    with pytest.raises(BadInput, match=r"it owns \S+ whatever it is given; leave it out of state_shares") as refusal:
        _ = one_stage(alone, MODEL, {0: 0.3}).buckets
    said = re.search(r"owns (\S+) whatever", str(refusal.value))
    owned = totals(one_stage(alone, MODEL, {}), 0)
    assert said is not None
    assert float(said[1]) == pytest.approx(owned[0] / MODEL.parameters, abs=1e-6)


@pytest.mark.parametrize(("replicas", "model"), UNLIKE[1:])
def test_the_largest_share_is_named_and_then_accepted(replicas: list[dict[str, Any]], model: Any) -> None:
    with pytest.raises(
        BadInput, match=r"rank 0 is given 0.99 of the stage's state.*it can own at most 0\.\d+"
    ) as refusal:
        _ = one_stage(replicas, model, {0: 0.99}).buckets
    largest = corrected({0: 0.99}, str(refusal.value))[0]
    owned = totals(one_stage(replicas, model, {0: largest}), 0)
    held = sum(
        run.size for placed, run in one_stage(replicas, model, {}).held_by(assignment_of(replicas, model, 0)) if placed
    )
    assert owned[0] == pytest.approx(held, rel=1e-4)  # all it holds: nobody else must own any of it
    with pytest.raises(BadInput, match="at most"):
        _ = one_stage(replicas, model, {0: largest + 1e-4}).buckets


def assignment_of(replicas: list[dict[str, Any]], model: Any, rank: int) -> Any:
    return one_stage(replicas, model, {}).layout.assignments[rank]


def test_unnamed_ranks_share_the_rest_equally() -> None:
    owned = totals(one_stage([replica([r], 2) for r in range(4)], MODEL, {2: 0.1}), 0)
    assert owned[2] == pytest.approx(0.1 * MODEL.parameters, abs=4)
    assert [owned[r] for r in (0, 1, 3)] == pytest.approx([0.3 * MODEL.parameters] * 3, abs=4)


@pytest.mark.parametrize(
    ("shares", "expected"), [({}, [1 / 3] * 3), ({2: 0.1}, [0.45, 0.45, 0.1]), ({0: 0.5, 2: 0.2}, [0.5, 0.3, 0.2])]
)
def test_groups_of_the_same_ranks_are_cut_alike(shares: dict[int, float], expected: list[float]) -> None:
    """The totals alone would allow all of a rank's share to come from one of them."""
    ranks = (0, 1, 2)
    for own in owner_fractions(0, [(ranks, 600), (ranks, 300)], 900, shares):
        assert [own[rank] for rank in ranks] == pytest.approx(expected)


@pytest.mark.parametrize("named", [0, 1])
def test_where_an_end_names_shares_the_embeddings_stage_alone_steps_a_tied_head(named: int) -> None:
    stages = [stage((2 * s, 2 * s + 2), replica([2 * s], 4), replica([2 * s + 1], 4), zero=1) for s in range(2)]
    stages[named]["state_shares"] = {2 * named: 0.3}
    state = StateMap(Case(name="named", stages=stages, model=TIED).layout())
    counted = [sum(t.info.numel for t in state.tensors if t.stage == s) for s in range(2)]
    for s in range(2):
        owned = [state.owned_elements[rank] for rank in (2 * s, 2 * s + 1)]
        share = 0.3 if s == named else 0.5
        assert owned == pytest.approx([share * counted[s], (1 - share) * counted[s]], abs=len(pieces(state)))


def test_ranks_that_step_other_groups_step_less_of_a_common_one() -> None:
    """Totals are equal where groups allow it: 400 elements each, though half of the common ones were as even."""
    assert owner_fractions(0, [((0, 1), 600), ((0,), 200)], 800, {}) == [
        pytest.approx({0: 1 / 3, 1: 2 / 3}),
        pytest.approx({0: 1.0}),
    ]


def test_slices_of_runs_by_hand() -> None:
    runs = (Range(10, 14), Range(20, 23))
    assert slice_runs(runs, Range(2, 6)) == [Range(12, 14), Range(20, 22)]
    assert slice_runs(runs, Range(0, 7)) == list(runs)
    assert slice_runs(runs, Range(3, 3)) == []


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_buckets_are_cut_to_exact_totals(sizes: list[int], weights: list[int]) -> None:
    weights[0] += 1
    fractions = [weight / sum(weights) for weight in weights]
    cuts = cut_buckets(sizes, fractions)
    for size, parts in zip(sizes, cuts, strict=True):
        assert covers_exactly(parts, Range(0, size))
        assert len(parts) == len(weights)
    if len(set(fractions)) > 1:
        exact = [part.size for part in split_by_shares(sum(sizes), fractions)]
        assert [sum(parts[i].size for parts in cuts) for i in range(len(weights))] == exact


def test_most_buckets_stay_even_where_the_smallest_share_allows_it() -> None:
    """Cephalo's rule: 30 % against 70 % leaves 0.9 x 2 x 30 % of the buckets even, spread over all of them."""
    cuts = cut_buckets([1000] * 100, [0.7, 0.3])
    even = [index for index, parts in enumerate(cuts) if parts[0].size == parts[1].size]
    assert len(even) == 54
    assert max(b - a for a, b in pairwise(even)) <= 2
    assert all(all(parts) for parts in cuts)  # the vendors' collectives take no empty parts
    assert sum(parts[1].size for parts in cuts) == 30_000


def test_where_units_move_no_bucket_holds_two_of_them() -> None:
    case = Case(name="units", stages=[stage((0, 4), replica([0], 4), replica([1], 4), zero=3)], model=TIED)
    state = StateMap(case.layout())
    for bucket in state.buckets:
        inside = {t.unit for t in state.tensors if bucket.span.contains(t.span)}
        assert inside == {bucket.unit}
    assert {bucket.unit for bucket in state.buckets} == {
        None,
        0,
        1,
        2,
        3,
        4,
    }  # norms, layers, the embedding of both ends
    assert state.units_at(0, 0) == (0, 4)
    assert state.units_at(0, 1) == (1,)
    assert state.units_at(0, 3) == (3, 4)


@pytest.mark.parametrize("elements", [1, 1 << 12])
@given(case=any_cases())
def test_a_bucket_is_needed_from_the_first_layer_that_computes_with_it(elements: int, case: Case) -> None:
    """The embedding with the stage's first, the head with its last; norms are there before any."""
    state = StateMap(case.layout())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hethub.spec.layout.state.BUCKET_ELEMENTS", elements)
        buckets = state.buckets
    for bucket in buckets:
        layers = [layer for chunk in state.layout.stages[bucket.stage].chunks for layer in range(*chunk)]
        names = [t.info.name for t in state.tensors if bucket.span.contains(t.span)]
        inside = [re.match(r"model\.layers\.(\d+)\.", name) for name in names]
        needed = min(layers.index(int(own[1])) if own else len(layers) - 1 for own in inside)
        assert bucket.layer == (needed if bucket.decays and EMBEDDING not in names else 0)


def test_one_replica_shards_nothing_whatever_its_level() -> None:
    case = Case(name="alone", stages=[stage((0, 4), replica([0, 1], 8), zero=3)])
    assert (StateMap(case.layout()).level(0), StateMap(case.layout()).moves(0)) == (1, False)
