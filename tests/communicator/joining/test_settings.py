"""What ranks are told of how to communicate is compared before anything is built on it."""

import os
import re

import pytest
import torch.distributed as dist

from hethub.communicator import Rendezvous, connect
from tests.support.ranks import start_ranks


def told_otherwise(rank, store, variable, value):
    if rank == 1:
        os.environ[variable] = value
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HETHUB_WIRE", "bf16", r"wire differs: rank 0 .* has exact, rank 1 .* has bf16.*HETHUB_WIRE"),
        ("HETHUB_RELAY", "gloo", r"relay differs: rank 0 .* has auto, rank 1 .* has gloo"),
        ("HETHUB_ISLANDS", "0,1", r"islands differs: rank 0 .* has 0\|1, rank 1 .* has 0,1\."),
        ("HETHUB_DEBUG", "1", r"debug differs: rank 0 .* has 0, rank 1 .* has 1"),
        ("HETHUB_STAGED_RANKS", "1", r"staged_ranks differs: rank 0 .* has none, rank 1 .* has 1"),
    ],
)
def test_ranks_told_otherwise_are_refused_by_name(variable, value, said):
    outcomes = start_ranks(
        2, told_otherwise, variable, value, timeout_seconds=30, environment={"HETHUB_ISLANDS": "0|1"}
    )
    for outcome in outcomes:
        assert outcome.error[0] == "BadInput", outcome
        assert re.search(said, outcome.error[1]), outcome.error


def meet(rank, store):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HETHUB_DEBUG", "yes", "HETHUB_DEBUG is 'yes'; set it to 1 (on) or 0 (off)"),
        ("HETHUB_WIRE", "int4", "communicator.wire (in a program HETHUB_WIRE) is 'int4'"),
        ("HETHUB_RELAY", "mpi", "Set HETHUB_RELAY to auto, gloo or shm, or leave it out."),
    ],
)
def test_what_a_program_cannot_be_told_is_refused(variable, value, said):
    """HETHUB_DEBUG=yes compared nothing, without a word; to HETHUB_RELAY=mpi under mpirun, "start it with mpirun" was said."""
    for outcome in start_ranks(2, meet, timeout_seconds=30, environment={"HETHUB_ISLANDS": "0|1", variable: value}):
        assert outcome.error[0] == "BadInput", outcome
        assert said in outcome.error[1]


def with_other_arguments(rank, store, argument, values):
    connect(Rendezvous.on_one_host(store, rank, 2), islands=[[0], [1]], **{argument: values[rank]})


@pytest.mark.parametrize(
    ("argument", "values", "said"),
    [("timeout_seconds", [10, 20], "timeout differs: rank 0"), ("num_lanes", [1, 2], "lanes differs: rank 0")],
)
def test_so_are_other_arguments_of_connect(argument, values, said):
    for outcome in start_ranks(2, with_other_arguments, argument, values, timeout_seconds=30):
        assert outcome.error[0] == "BadInput", outcome
        assert said in outcome.error[1]
