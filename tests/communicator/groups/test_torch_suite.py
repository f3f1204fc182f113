"""torch's own DistributedTest over emulated islands: whatever native Gloo passes here, the backend hethub passes."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("torch_suite_driver.py")

# They compare the name that the group says of itself with the name asked for: run under our own name.
BY_OWN_NAME = ["test_ddp_logging_data_cpu"]


def outcomes(layout, *tests, backend="gloo"):
    """{test: "passed" | "failed" | "skipped"} and the reasons of failures."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(
        [sys.executable, "-P", str(DRIVER), layout, backend, *tests],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    why = {test: row["why"] for test, row in found.items() if row["outcome"] == "failed"}
    return {test: row["outcome"] for test, row in found.items()}, why


@pytest.fixture(scope="module")
def native(testrun_uid, tmp_path_factory):
    """What native Gloo passes, run once: pytest's workers, which may get a layout each, share the answer."""
    kept = tmp_path_factory.getbasetemp().parent / f"native-{testrun_uid}.json"
    with kept.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (text := file.read()):
            text = json.dumps(outcomes("native")[0])
            file.write(text)
    return {test for test, outcome in json.loads(text).items() if outcome == "passed"}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("layout", ["0,1|2,3", "0,2|1,3", "0|1,2,3"])
def test_all_that_native_gloo_passes(layout, native):
    ours, why = outcomes(layout)
    own_name, why_not = outcomes(layout, *BY_OWN_NAME, backend="hethub")
    ours, why = ours | own_name, why | why_not
    passed = {test for test, outcome in ours.items() if outcome == "passed"}
    print(f"{layout}: {len(passed)} of the {len(native)} tests that native Gloo passes: {', '.join(sorted(passed))}")
    missing = native - passed
    assert missing == set(), "\n".join(why.get(test, "skipped") for test in sorted(missing))
    assert len(native) > 80
