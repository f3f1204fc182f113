"""A killed job's shared memory is removed by the next job: its own, and only where nobody uses it."""

import mmap
import os
import socket
import time

from hethub.communicator.joining.segments import remove_dead_segments


def test_only_dead_segments_of_this_user_and_host_are_removed(tmp_path):
    own = f"sm_segment.{socket.gethostname()}.{os.getuid()}"
    dead, alive, young = f"{own}.5e560001.0", f"{own}.5e560001.1", f"{own}.22720001.0"
    others = [f"sm_segment.elsewhere.{os.getuid()}.5e560001.0", f"sm_segment.{socket.gethostname()}.4242.5e560001.0",
              "sm_segment.mine", "hethub"]  # fmt: skip
    for name in (dead, alive, young, *others):
        (tmp_path / name).write_bytes(b"\0" * mmap.PAGESIZE)
        if name != young:
            os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    with open(tmp_path / alive, "r+b") as segment, mmap.mmap(segment.fileno(), mmap.PAGESIZE):
        assert remove_dead_segments(tmp_path) == [dead]
        assert {path.name for path in tmp_path.iterdir()} == {alive, young, *others}
    assert remove_dead_segments(tmp_path) == [alive]
