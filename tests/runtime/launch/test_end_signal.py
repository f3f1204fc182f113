"""Signals that come upon a rank at its end, or before its beginning: what it has to say, it says."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

from hethub.runtime.launch.end_signal import EndSignal
from hethub.runtime.loop.stop_signal import StopSignal
from tests.support.command import AS_ROOT, HETHUB, MPIRUN, Running, needs_mpirun
from tests.support.ranks import start_ranks, values


class EndingWatch:
    """A watch that ends the process without a word, where it is asked to."""

    liveness = SimpleNamespace(report_end=lambda: None, wait_for_failure=lambda seconds: None)

    def end_process(self, reason):
        os._exit(1)

    def end_with_one_voice(self, reason, seconds):
        os._exit(1)


def test_a_launcher_that_ends_a_rank_which_has_failed_leaves_it_its_words():
    assert values(start_ranks(1, told_to_end_behind_a_failure)) == ["said"]


def told_to_end_behind_a_failure(rank, store):
    try:
        with EndSignal(EndingWatch()):
            raise ValueError("what failed")
    except ValueError:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return "said"


def test_a_wish_to_save_behind_the_last_step_ends_nobody():
    assert values(start_ranks(1, asked_behind_the_last_step)) == ["went on"]


def asked_behind_the_last_step(rank, store):
    with EndSignal(EndingWatch()):
        with StopSignal():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGUSR1)
    return "went on"


def test_a_store_whose_rank_has_ended_says_nothing_in_frames():
    """Of a Ctrl-C in its first seconds a job told in pages of torch's C++ frames, now and then."""
    told = subprocess.run([sys.executable, "-c", STORE_THAT_ENDS], capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr) == ("broken\n", "")


STORE_THAT_ENDS = """
from datetime import timedelta
from hethub.commands.common import need_torch
need_torch("train")
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
client = dist.TCPStore("127.0.0.1", store.port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False)
del store
try:
    for _ in range(1000):
        client.set("key", "value")
except dist.DistNetworkError:
    print("broken")
"""


def test_a_signal_while_torch_is_imported_is_heard(tmp_path):
    """It killed the rank without a word: for seconds, and minutes where many ranks read torch from one file system."""
    (tmp_path / "first" / "torch").mkdir(parents=True)
    asks = "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nraise AssertionError('the signal was not heard')\n"
    (tmp_path / "first" / "torch" / "__init__.py").write_text(asks)
    paths = os.pathsep.join([str(tmp_path / "first"), os.environ.get("PYTHONPATH", "")])
    ended = Running([HETHUB, "train", "job.yaml"], tmp_path, {"PYTHONPATH": paths}).end()
    assert ended.exit_code == 1
    said = "hethub: rank 0 ends because it was asked to (SIGUSR1) before its first step: there is nothing to save, start it again."
    assert ended.stderr.splitlines() == [said]


@needs_mpirun
def test_the_first_rank_says_its_word_though_others_hear_the_signal_first(tmp_path):
    """Whose handler waits for C code, as of an import: mpirun ended it because another rank had gone, and nobody said a word."""
    slow = [MPIRUN, "-n", "2", sys.executable, "-c", SIGNALLED]
    ended = Running(slow, tmp_path, AS_ROOT).end()
    assert ended.stderr.count("hethub: rank 0 ends because it was asked to (SIGUSR1) before its first step") == 1, (
        ended.stderr
    )


SIGNALLED = """
import hashlib, os, signal, time
from hethub.runtime.launch.launcher_environment import end_unmet, launch_info
rank, begun = launch_info().rank, time.perf_counter()
hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
often = int(5 / (time.perf_counter() - begun))
signal.signal(signal.SIGUSR1, end_unmet)
if os.fork() == 0:  # asks in the middle of what the rank does
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGUSR1)
    os._exit(0)
if rank == 0:
    hashlib.pbkdf2_hmac("sha256", b"", b"", often * 100_000)  # one call of five seconds
time.sleep(60)
"""
