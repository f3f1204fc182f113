"""Ranks whose software does not fit are refused by name before anything is built."""

import dataclasses

import pytest

from hethub.communicator.setup import RankFacts, check_versions
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput

HERE = RankFacts.here(Device(vendor="cpu"))


def with_torch(version):
    return dataclasses.replace(HERE, torch=version, host="amd1")


def test_vendor_builds_and_patches_of_one_version_fit():
    cuda, rocm = with_torch("2.13.0+cu130"), with_torch("2.13.1a0+rocm7.0.gitabc")
    check_versions([cuda, rocm])


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"torch": "2.12.0"}, "torch"), ({"python": "3.9.1"}, "python"), ({"byte_order": "big"}, "byte order")],
)
def test_another_version_is_refused_with_both_places(changes, what):
    with pytest.raises(BadInput, match=f"rank 1 .*same {what}"):
        check_versions([HERE, dataclasses.replace(HERE, **changes)])
