"""Dealing against a naive statement of rule 1 of exactness; rounds and transfers."""

from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings

from hethub.spec.plan import ReplicaSpec
from hethub.spec.schedule.microbatches import as_one_replica, deal, rounds
from tests.spec.random_plans import cases, replica_specs
from tests.support.layouts import Case


def naive_deal(replicas: tuple[ReplicaSpec, ...]) -> list[tuple[int, int, int]]:
    """(replica, start, stop) of every microbatch, by fractions."""
    dealt, position, microbatches = [0] * len(replicas), 0, []
    while any(done < r.samples for done, r in zip(dealt, replicas, strict=True)):
        waiting = [i for i, r in enumerate(replicas) if dealt[i] < r.samples]
        chosen = min(waiting, key=lambda i: (Fraction(dealt[i] + replicas[i].micro_batch, replicas[i].samples), i))
        size = min(replicas[chosen].micro_batch, replicas[chosen].samples - dealt[chosen])
        microbatches.append((chosen, position, position + size))
        dealt[chosen] += size
        position += size
    return microbatches


@given(replica_specs())
def test_dealing_is_rule_1(replicas: tuple[ReplicaSpec, ...]) -> None:
    dealt = deal(replicas).microbatches(0)
    assert [(microbatch.replica, *microbatch.samples) for microbatch in dealt] == naive_deal(replicas)
    for position, spec in enumerate(replicas):
        own = [microbatch for microbatch in dealt if microbatch.replica == position]
        assert sum(microbatch.samples.size for microbatch in own) == spec.samples
        assert [microbatch.index for microbatch in own] == list(range(len(own)))
        assert all(microbatch.samples.size == spec.micro_batch for microbatch in own[:-1])  # only the last may be short
        assert 1 <= own[-1].samples.size <= spec.micro_batch


@settings(max_examples=500)
@given(replica_specs())
def test_there_are_as_many_rounds_as_the_busiest_replica_has_microbatches(replicas: tuple[ReplicaSpec, ...]) -> None:
    dealt = deal(replicas)
    found = rounds(dealt.replicas)
    assert [position for together in found for position in range(*together)] == list(range(len(dealt.replicas)))
    for together in found:
        own = dealt.replicas[together.start : together.stop]
        assert len(set(own)) == len(own)
    counts = [dealt.replicas.count(replica) for replica in range(len(replicas))]
    assert len(found) == max(counts)
    whole = as_one_replica(dealt).microbatches(0)
    assert [microbatch.index for microbatch in whole] == list(range(max(counts)))
    assert all(a.samples.stop == b.samples.start for a, b in pairwise(whole))


def test_dealing_by_hand() -> None:
    two = (
        ReplicaSpec(ranks=(0,), micro_batch=2, samples=6),
        ReplicaSpec(ranks=(1,), micro_batch=1, samples=3),
    )
    # (0+2)/6 ties with (0+1)/3: the one listed first goes first, every time.
    assert [microbatch.replica for microbatch in deal(two).microbatches(0)] == [0, 1, 0, 1, 0, 1]
    short = (ReplicaSpec(ranks=(0,), micro_batch=3, samples=8),)
    assert [tuple(microbatch.samples) for microbatch in deal(short).microbatches(0)] == [(0, 3), (3, 6), (6, 8)]


def test_fractions_that_are_one_float_are_dealt_apart() -> None:
    """(2^27 - 1) / (2^28 - 1) is the smaller one, by less than a float tells; a tie would deal what is listed first. More
    samples than a file may say."""
    sizes = ((2**27, 2**28 + 1), (2**27 - 1, 2**28 - 1))
    wide = [
        ReplicaSpec(ranks=(rank,), micro_batch=1, samples=1).unchecked(micro_batch=micro_batch, samples=samples)
        for rank, (micro_batch, samples) in enumerate(sizes)
    ]
    assert len({spec.micro_batch / spec.samples for spec in wide}) == 1
    dealt = [(microbatch.replica, *microbatch.samples) for microbatch in deal(wide).microbatches(0)]
    assert dealt == naive_deal(wide)
    assert dealt[0][0] == 1


@given(cases())
def test_every_sample_crosses_every_boundary_once_under_its_own_tag(case: Case) -> None:
    layout = case.layout()
    tags = [transfer.tag for handed in layout.transfers for transfer in handed]
    assert tags == list(range(len(tags)))
    for handed in layout.transfers:
        samples = [sample for transfer in handed for sample in range(*transfer.samples)]
        assert samples == list(range(case.global_batch))
        for transfer in handed:
            assert transfer.source.samples.contains(transfer.samples)
            assert transfer.target.samples.contains(transfer.samples)
