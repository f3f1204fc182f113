"""Before training, where makers meet: a device of each is checked once, and one that computes wrongly stops the run."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

from tests.support.command import ranks
from tests.support.job_files import write_pair_job


def two_makers(cache: str, wrong_on: int | None, rank: int) -> None:
    """What a rank does first: its facts are of a maker of its own, and on one rank the mask of attention is dropped."""
    import hethub.runtime.loop.train as training
    from hethub.runtime.model import layers
    from hethub.runtime.parity import makers

    os.environ["HETHUB_CACHE"] = cache
    own_facts, check, attend = training.own_facts, makers.check_device, layers.F.scaled_dot_product_attention
    device, vendor = (("Instinct MI250X", "amd"), ("A100-SXM4-80GB", "nvidia"))[rank]
    training.own_facts = lambda *known, **more: replace(own_facts(*known, **more), device=device, vendor=vendor)
    makers.device_name = lambda own: device

    def counted(*given: Any, **options: Any) -> Any:
        with open(f"{cache}/checked-{rank}", "a") as file:
            file.write("x")
        if rank == wrong_on:
            layers.F.scaled_dot_product_attention = lambda *t, **o: attend(*t, **{**o, "is_causal": False})
        try:
            return check(*given, **options)
        finally:
            layers.F.scaled_dot_product_attention = attend

    makers.check_device = counted


def times_checked(cache: Path) -> list[int]:
    return [len((cache / f"checked-{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_makers_that_meet_are_checked_once(tmp_path: Path) -> None:
    job, cache = write_pair_job(tmp_path / "job"), tmp_path / "cache"
    cache.mkdir()
    for name in ("first", "second"):
        ended = ranks(
            2, "train", job, "--run-dir", tmp_path / name, cwd=tmp_path, hook=partial(two_makers, str(cache), None)
        )
        assert [each.exit_code for each in ended] == [0, 0], ended[0].stderr
        assert ended[0].stdout.count("computes what the formulas say, within 0.") == 2
    assert times_checked(cache) == [1, 1]
    for kept in (cache / "parity").iterdir():
        kept.write_text("{")  # damaged: computed anew
    ended = ranks(
        2, "train", job, "--run-dir", tmp_path / "third", cwd=tmp_path, hook=partial(two_makers, str(cache), None)
    )
    assert [each.exit_code for each in ended] == [0, 0], ended[0].stderr
    assert times_checked(cache) == [2, 2]


@pytest.mark.parametrize("parity", ["stop", *(pytest.param(p, marks=pytest.mark.slow) for p in ("report", "never"))])
def test_a_maker_that_computes_wrongly_stops_the_run(tmp_path: Path, parity: str) -> None:
    job, cache, run = write_pair_job(tmp_path / "job", parity=parity), tmp_path / "cache", tmp_path / "run"
    cache.mkdir()
    ended = ranks(2, "train", job, "--run-dir", run, cwd=tmp_path, hook=partial(two_makers, str(cache), 1))
    if parity == "stop":
        assert [each.exit_code for each in ended] == [1, 1]
        assert all("attention's mask is dropped" in each.stderr for each in ended)
        assert not run.exists()
        return
    assert [each.exit_code for each in ended] == [0, 0], ended[0].stderr
    assert ("attention's mask is dropped" in ended[0].stdout) == (parity == "report")
    assert (cache / "checked-1").exists() == (parity == "report")
