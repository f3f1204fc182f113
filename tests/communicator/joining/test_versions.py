"""Ranks whose software does not fit are refused by name before anything is built."""

import dataclasses
import re

import pytest
import torch.distributed as dist

from hethub.communicator.joining.versions import Software, check_same, comparable
from hethub.communicator.setup import RankFacts, check_facts
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput

HERE = RankFacts.here(Device(vendor="cpu"), {}, dist.HashStore())


def with_torch(version):
    return dataclasses.replace(HERE, torch=version, host="amd1")


def test_vendor_builds_and_patches_of_one_version_fit():
    cuda, rocm = with_torch("2.13.0+cu130"), with_torch("2.13.1a0+rocm7.0.gitabc")
    check_facts([cuda, rocm])


@pytest.mark.parametrize(
    ("what", "value"),
    [("torch", "2.12.0"), ("python", "3.9.1"), ("byte_order", "big"), ("hethub", "9.9"), ("mpi", "Open MPI v4.1.6")],
)
def test_another_version_is_refused_with_both_places(what, value):
    here = dataclasses.replace(HERE, mpi="Open MPI v5.0.11")
    with pytest.raises(BadInput, match=rf"{what} differs: rank 0 .*, rank 1 .* has {value}"):
        check_facts([here, dataclasses.replace(here, **{what: value})])


def test_one_makers_ranks_have_one_version_of_its_library():
    ranks = [
        dataclasses.replace(HERE, host=host, library=library)
        for host, library in [("amd0", "RCCL 2.26.6"), ("cpu0", ""), ("nv0", "NCCL 2.27.5"), ("nv1", "NCCL 2.28.9")]
    ]
    check_facts(ranks[:3])
    with pytest.raises(BadInput, match=r"rank 2 \(nv0\) has NCCL 2.27.5, rank 3 \(nv1\) has NCCL 2.28.9: .*\+cu130"):
        check_facts(ranks)


@pytest.mark.parametrize(
    ("version", "means"),
    [
        ("Open MPI v5.0.11", "Open MPI 5.0"),
        ("Open MPI v5.0.3, package: Open MPI", "Open MPI 5.0"),
        ("MPICH Version:      4.2.0", "MPICH 4.2"),
        ("Intel(R) MPI Library 2021.12 for Linux* OS", "Intel(R) MPI 2021.12"),
        ("", ""),
    ],
)
def test_mpi_versions_agree_in_maker_and_major_minor(version, means):
    assert comparable("mpi", version) == means


def test_two_ranks_on_one_device_are_refused_by_name():
    """As when a launcher shows every rank the same single device."""
    ranks = [dataclasses.replace(HERE, host="nv1", device=device) for device in ("GPU-a", "GPU-b", "GPU-a")]
    with pytest.raises(BadInput, match=r"rank 0 \(nv1\) and rank 2 \(nv1\) drive the same device \(GPU-a\)"):
        check_facts(ranks)
    check_facts(ranks[:2])


@pytest.mark.parametrize(
    ("what", "mine", "theirs", "may_differ"),
    [
        ("hethub", "0.1.0", "0.1.1", False),
        ("python", "3.11.2", "3.11.9", True),
        ("python", "3.11.2", "3.12.2", False),
        ("torch", "2.11.0+cu130", "2.11.0+rocm7.0", True),
        ("torch", "2.11.0", "2.12.0", False),
    ],
)
def test_hethub_must_agree_in_full_and_python_and_torch_in_their_minor_version(what, mine, theirs, may_differ):
    usual = {"hethub": "0.1.0", "python": "3.11.2", "torch": "2.11.0", "byte_order": "little"}
    ranks = [(f"rank {rank}", Software(**{**usual, what: own})) for rank, own in enumerate((mine, theirs))]
    if may_differ:
        assert check_same(ranks) == []
    else:
        with pytest.raises(
            BadInput, match=f"{what} differs: rank 0 has {re.escape(mine)}, rank 1 has {re.escape(theirs)}"
        ):
            check_same(ranks)
