"""Signals that come upon a rank at its end: what it has to say, it says."""

import os
import signal
import time
from types import SimpleNamespace

from hethub.runtime.launch.end_signal import EndSignal
from hethub.runtime.loop.stop_signal import StopSignal
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
