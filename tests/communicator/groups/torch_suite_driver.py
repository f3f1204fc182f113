"""Runs torch's own DistributedTest, with "gloo" meaning the backend hethub, and prints one JSON object of outcomes.

    python torch_suite_driver.py LAYOUT BACKEND [TEST …]        LAYOUT: native, or HETHUB_ISLANDS such as '0,1|2,3'

BACKEND is what torch's own suite calls its parameter, `gloo` or `hethub`. Many of torch's tests ask for the backend by
its name "gloo"; a backend under another name would skip them. So under `gloo` this driver, and nothing else, makes
torch create ours where "gloo" is asked for; under `hethub` nothing is renamed. Ranks are forked: spawning them
imports torch anew for each of 4 x 285 processes.
"""

import functools
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

WORLD_SIZE = 4


def prepare_environment(layout: str, backend: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="torch-suite-"))
    (folder / "barrier").touch()
    (folder / "test_dir").mkdir()
    os.environ.update(
        BACKEND=backend, WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=str(folder), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )
    # Else test_new_subgroups_with_group_param, whose first rank may destroy a group that its peer is still connecting to,
    # fails now and then (of 100 runs with native Gloo 2, of 72 with ours 1).
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    if layout != "native":
        os.environ["HETHUB_ISLANDS"] = layout


def make_gloo_mean_hethub() -> None:
    from torch.distributed import distributed_c10d as c10d

    import hethub.communicator  # noqa: F401  registers the backend

    create, name_of = c10d._new_process_group_helper, c10d.get_backend

    @functools.wraps(create)
    def create_ours(size, rank, ranks, backend, *rest, **named):
        return create(size, rank, ranks, "hethub" if backend == "gloo" else backend, *rest, **named)

    @functools.wraps(name_of)
    def name_as_asked(*args, **named):
        name = name_of(*args, **named)
        return "gloo" if name == "hethub" else name

    c10d._new_process_group_helper = create_ours
    c10d.get_backend = name_as_asked
    c10d.dist_backend = name_as_asked
    import torch.distributed as dist

    dist.get_backend = name_as_asked


def name_hethub_a_backend() -> None:
    """Adds our name to the sets of backends that torch's suite knows, as its own plugins do."""
    from torch.testing._internal.common_distributed import DistTestCases

    import hethub.communicator  # noqa: F401  registers the backend

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("hethub")


def suite_class() -> type[unittest.TestCase]:
    import torch
    from torch.testing._internal.distributed import distributed_test
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    # The allowlist of backends whose C++ records tensor shapes in profiler events; Python cannot. That our operations
    # appear in a profile is tested in test_profiler.py.
    distributed_test.PROFILING_SUPPORTED_BACKENDS = []
    torch.set_num_threads(1)

    class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._fork_processes() if hasattr(self, "_fork_processes") else self._fork()

        def _fork(self):
            import torch.multiprocessing as multiprocessing

            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank, test_name, *rest, **named):
            # MultiProcessTestCase ends a rank with sys.exit; a forked one must not run the parent's exit handlers.
            try:
                super()._run(rank, test_name, *rest, **named)
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code or 0)

    return TorchSuite


class Recorder(unittest.TestResult):
    """Outcome and seconds per test."""

    def __init__(self):
        super().__init__()
        self.outcomes = {}
        self.began = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def _note(self, test, outcome, why=""):
        name = test.id().rsplit(".", 1)[-1]
        seconds = round(time.monotonic() - self.began, 2)
        self.outcomes[name] = {"outcome": outcome, "why": why[-4000:], "seconds": seconds}
        print(f"{outcome:7} {seconds:6.1f} s {name}", file=sys.stderr, flush=True)

    def addSuccess(self, test):
        self._note(test, "passed")

    def addSkip(self, test, reason):
        self._note(test, "skipped", reason)

    def addFailure(self, test, error):
        self._note(test, "failed", self._exc_info_to_string(error, test))

    addError = addFailure


def main() -> None:
    layout, backend, *names = sys.argv[1:]
    prepare_environment(layout, backend)
    if backend == "hethub":
        name_hethub_a_backend()
    elif layout != "native":
        make_gloo_mean_hethub()
    case = suite_class()
    wanted = names or unittest.TestLoader().getTestCaseNames(case)
    recorder = Recorder()
    unittest.TestSuite(case(name) for name in wanted).run(recorder)
    print(json.dumps(recorder.outcomes))


if __name__ == "__main__":
    main()
