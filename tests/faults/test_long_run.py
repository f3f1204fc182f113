"""5,000 steps leave nothing: as many descriptors and threads as after the first thousand, and hardly more memory."""

import functools
import json
import sys
from pathlib import Path

import pytest

from tests.faults.test_groups import held
from tests.support.command import ranks
from tests.support.job_files import write_pair_job

STEPS, EVERY = 5000, 1000
BYTES_PER_STEP = 500  # the times and losses that the summary and the trace of the run are made of


def look(folder, every, rank):
    """Writes what this rank holds before every so-many-th update, but for what it has said, which the test keeps."""
    from hethub.runtime.loop.trainer import Trainer

    original, calls, found = Trainer._update, 0, []

    def update(self, *arguments, **named):
        nonlocal calls
        calls += 1
        if calls % every == 0:
            sys.stdout.seek(0)
            sys.stdout.truncate()
            found.append(held())
            Path(folder, f"held-{rank}").write_text(json.dumps(found))
        return original(self, *arguments, **named)

    Trainer._update = update


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_thousand_steps_are_flat(tmp_path):
    model = {"layers": 4, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 16}
    job = write_pair_job(
        tmp_path / "job", model=model, train={"steps": STEPS}, checkpoint={"every_steps": EVERY // 5, "keep": 2}
    )
    hook = functools.partial(look, tmp_path, EVERY)
    results = ranks(2, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=hook, timeout_seconds=3500)
    assert [ended.exit_code for ended in results] == [0, 0], results[0].stderr
    for rank in range(2):
        counts = json.loads((tmp_path / f"held-{rank}").read_text())
        assert len(counts) == STEPS // EVERY
        first, last = counts[0], counts[-1]
        assert all(now <= before + 1 for now, before in zip(last[:3], first[:3], strict=True)), counts
        assert last[3] - first[3] < BYTES_PER_STEP * (STEPS - EVERY), counts
