"""What a stranger can send to the hub's port: nothing of it ends the hub, holds it up, or fails the job."""

import contextlib
import json
import queue
import random
import resource
import socket
import threading
import time

import pytest

from hethub.communicator.joining import hub as hub_module
from hethub.communicator.joining.connection import Connection, proof
from hethub.communicator.joining.hub import Hub
from hethub.communicator.joining.liveness import Liveness
from hethub.spec.errors import RunFailed
from tests.faults.hub_job import TOKEN, check_alive
from tests.support.command import ranks
from tests.support.job_files import write_job

NUM_LINES = 10_000


def crafted():
    """Lines that broke the hub, or could: what is compared, what is parsed, what is looked up."""
    yield '{"rank": 1, "proof": "é"}'.encode()  # compare_digest takes no such text
    yield b"[" * 60_000
    yield b'{"a":' * 20_000
    yield b'{"rank": 1, "proof": "\\ud800"}'
    yield b'{"rank": 1, "proof": null}'
    yield b'{"rank": 1, "proof": ["' + b"0" * 64 + b'"]}'
    yield b'{"rank": true, "proof": "x"}'
    yield b'{"rank": 1e400, "proof": "x"}'
    yield b'{"rank": ' + b"9" * 5_000 + b', "proof": "x"}'
    yield b'{"rank": -1, "proof": "x"}'
    yield b'{"rank": 2, "proof": "x"}'
    yield b'{"type": "failed", "rank": 0, "reason": "of a stranger"}'
    yield b'{"type": "ending"}'
    yield b'{"type": "goodbye"}'
    yield b"{}"
    yield b"null"
    yield b'"text"'
    yield b"NaN"
    yield b"\xff\xfe\x00"
    yield b"GET / HTTP/1.1\r\nHost: hub\r\n\r"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    yield b""


def lines(seed=1):
    """10,000 of them: crafted ones, mutations of those and of an honest hello, and noise."""
    draw = random.Random(seed)
    known = [*crafted(), json.dumps({"rank": 1, "proof": "0" * 64, "host": "stranger"}).encode()]
    yield from known
    for _ in range(NUM_LINES - len(known)):
        line = bytearray(draw.choice(known)[:600])
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(line) + 1)
            line[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
        yield bytes(line) if draw.random() < 0.8 else draw.randbytes(draw.randrange(1, 300))


def send_all(port, several):
    """One connection after another, each with a few lines, some cut off, some reset."""
    draw, batch = random.Random(2), []
    for number, line in enumerate(several):
        batch.append(line)
        if draw.random() < 0.7 and number < NUM_LINES - 1:
            continue
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            if draw.random() < 0.2:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with contextlib.suppress(OSError):  # the hub has hung up on it
                stranger.sendall(b"\n".join(batch) + (b"\n" if draw.random() < 0.9 else b""))
        batch = []


def test_ten_thousand_lines_of_strangers_change_nothing(job):
    send_all(job.hub.port, lines())
    check_alive(job)


@pytest.mark.parametrize("line", [*crafted()], ids=lambda line: repr(line[:24]))
def test_a_crafted_line_changes_nothing(job, line):
    stranger, _ = job.knock()
    with stranger, contextlib.suppress(OSError):  # the hub hangs up as soon as it has read enough
        stranger.sendall(line + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        stranger.makefile("rb").read()
    check_alive(job)


def test_no_crafted_line_takes_the_place_of_a_rank_that_has_not_come():
    """Where all have come nothing that is said is compared with a proof."""
    hub = Hub(address="127.0.0.1", size=2, token=TOKEN, silence_seconds=20, meeting_seconds=60)
    for line in (*crafted(), json.dumps({"rank": 1, "proof": proof(TOKEN, "another nonce", 1)}).encode()):
        with socket.create_connection(("127.0.0.1", hub.port), timeout=20) as stranger, contextlib.suppress(OSError):
            stranger.sendall(line + b"\n")
            stranger.shutdown(socket.SHUT_WR)
            assert b"welcome" not in stranger.makefile("rb").read()
    both = [
        Liveness(hub_address=("127.0.0.1", hub.port), rank=rank, token=TOKEN, silence_seconds=20) for rank in (0, 1)
    ]
    for rank in both:
        rank.wait_for_all(20)
    for rank in both:  # behind all: one that goes without a goodbye is a failure of the others
        rank.close()
    hub.close()


def test_a_proof_holds_for_one_rank_and_one_connection():
    assert len({proof(TOKEN, nonce, rank) for nonce in ("one", "other") for rank in (0, 1)}) == 4


def test_a_stranger_that_goes_on_and_on_is_hung_up_on(job):
    stranger, _ = job.knock()
    stranger.settimeout(hub_module.HELLO_SECONDS / 2)  # behind all of it who says nothing is hung up on, too
    with stranger, contextlib.suppress(ConnectionResetError):
        stranger.sendall(b"x" * 600)
        assert stranger.makefile("rb").read() == b""
    check_alive(job)


def test_of_a_stranger_that_is_refused_nothing_more_is_heard(job):
    """Two lines at once: it is hung up on once."""
    stranger, _ = job.knock()
    with stranger:
        stranger.sendall(b'{"rank": 1, "proof": "x"}\n' * 2)
        assert stranger.makefile("rb").read() == b""
    check_alive(job)


def test_a_stranger_that_makes_room_for_another_may_have_spoken_at_the_same_time(job, monkeypatch):
    strangers = [job.knock()[0] for _ in range(66)]
    beating, go = threading.Event(), threading.Event()
    monkeypatch.setattr(job.hub, "_beat", lambda: (beating.set(), go.wait(20)))
    assert beating.wait(20)
    strangers.append(
        socket.create_connection(("127.0.0.1", job.hub.port), timeout=20)
    )  # which the first makes room for
    strangers[0].sendall(b"{}\n")
    monkeypatch.undo()
    go.set()
    assert b"nonce" in strangers[-1].makefile("rb").readline()
    for stranger in strangers:
        stranger.close()
    check_alive(job)


def test_a_rank_that_comes_among_strangers_is_not_the_first_to_go():
    hub = Hub(address="127.0.0.1", size=2, token=TOKEN, silence_seconds=20, meeting_seconds=60)
    knocking = [socket.create_connection(("127.0.0.1", hub.port), timeout=20) for _ in range(70)]
    greeted = [each.makefile("rb") for each in knocking]
    nonces = [json.loads(each.readline() or b'{"nonce": null}')["nonce"] for each in greeted]
    knocking[-2].sendall(json.dumps({"rank": 1, "proof": proof(TOKEN, nonces[-2], 1)}).encode() + b"\n")
    assert b"welcome" in greeted[-2].readline()
    for each in (*greeted, *knocking):
        each.close()
    hub.close()


def test_a_hub_that_closes_passes_on_what_it_was_told_before(job, monkeypatch):
    """Rank 0 tells why it leaves, and leaves."""
    beating, go = threading.Event(), threading.Event()
    monkeypatch.setattr(job.hub, "_beat", lambda: (beating.set(), go.wait(20)))
    assert beating.wait(20)
    job.ranks[0].report("failed: on purpose")
    threading.Thread(target=job.hub.close).start()
    while not job.hub._closed:
        time.sleep(0.01)
    go.set()
    assert str(job.ranks[1].wait_for_failure(20)) == "rank 0 failed: on purpose"


def test_the_hubs_own_rank_is_told_last(job, monkeypatch):
    """Once it knows, its process may end, and the hub with it."""
    told, send = [], Connection.send

    def noted(self, **message):
        told.append((self.rank, message.get("type")))
        send(self, **message)

    monkeypatch.setattr(Connection, "send", noted)
    job.ranks[1].report("failed: on purpose")
    assert job.ranks[0].wait_for_failure(20) is not None
    assert [rank for rank, kind in told if kind == "failure"] == [1, 0]


def test_a_rank_that_is_here_cannot_come_again(job):
    stranger, nonce = job.knock()
    with stranger:
        stranger.sendall(json.dumps({"rank": 1, "proof": proof(TOKEN, nonce, 1)}).encode() + b"\n")
        assert b"welcome" not in stranger.makefile("rb").read()
    check_alive(job)


def test_strangers_are_few_and_do_not_stay(job, monkeypatch):
    monkeypatch.setattr(hub_module, "HELLO_SECONDS", 0.5)
    strangers = [job.knock()[0] for _ in range(100)]
    assert len(job.hub._nonces) <= 66
    deadline = time.monotonic() + 20
    while job.hub._nonces and time.monotonic() < deadline:
        for stranger in strangers:  # a slow sender is none the better for its bytes
            with contextlib.suppress(OSError):
                stranger.send(b"{")
        time.sleep(0.1)
    assert not job.hub._nonces
    for stranger in strangers:
        stranger.close()
    check_alive(job)


def test_no_descriptor_left_is_no_end_of_the_hub(job):
    stranger, _ = job.knock()
    stranger.settimeout(hub_module.HELLO_SECONDS / 2)  # after all of it who says nothing is hung up on, too
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket() for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(each.fileno() for each in waiting) + 1, hard))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(socket.socket())
    try:
        for each in waiting:
            each.connect(("127.0.0.1", job.hub.port))
        assert stranger.recv(1) == b""  # it makes room
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in (stranger, *waiting, *held):
            each.close()
    check_alive(job)


def test_a_hub_that_breaks_is_a_failure_of_rank_0(job, monkeypatch, capsys):
    def broken(*_):
        raise ZeroDivisionError("of the hub")

    monkeypatch.setattr(job.hub, "_hear", broken)
    job.ranks[1].goodbye()
    assert "its liveness hub ended: ZeroDivisionError: of the hub" in str(job.ranks[0].wait_for_failure(20))
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_rank_that_never_comes_is_named_with_its_place():
    hub = Hub(
        address="127.0.0.1", size=3, token=TOKEN, silence_seconds=20, meeting_seconds=0.2,
        place=lambda rank: f" (on host-{rank})",
    )  # fmt: skip
    only = Liveness(hub_address=("127.0.0.1", hub.port), rank=0, token=TOKEN, silence_seconds=20)
    with pytest.raises(RunFailed, match=r"rank 0 did not say within 0\.01 s who has come"):
        only.wait_for_all(0.01)
    with pytest.raises(RunFailed, match=r"rank 1 \(on host-1\) has not come"):
        only.wait_for_all(3600)
    said = str(only.wait_for_failure(20))
    assert said == "rank 1 (on host-1) has not come: it did not join within 0.2 s of rank 0; nor did rank 2"
    only.close()
    hub.close()


def test_a_failure_reaches_who_connects_and_who_asks_late(job):
    """What connects may wait for who is gone without end."""
    with pytest.raises(ZeroDivisionError):
        job.ranks[0].unless_failed(lambda: 1 / 0, [0, 1])
    assert job.ranks[0].unless_failed(lambda: 7, [0, 1]) == 7
    job.ranks[1].report("failed: on purpose")
    with pytest.raises(RunFailed, match="rank 0 ends because rank 1 failed: on purpose"):
        job.ranks[0].unless_failed(threading.Event().wait, [0, 1])
    heard = queue.SimpleQueue()
    job.ranks[0].when_failed(heard.put)
    assert str(heard.get(timeout=20)) == "rank 1 failed: on purpose"


def test_who_comes_late_hears_what_has_failed_and_the_first_failure_counts():
    hub = Hub(address="127.0.0.1", size=2, token=TOKEN, silence_seconds=20, meeting_seconds=60)
    here = Liveness(hub_address=("127.0.0.1", hub.port), rank=0, token=TOKEN, silence_seconds=20)
    time.sleep(1.5)  # two beats of the hub, which waits for the other one
    assert here.failure is None
    here.report("failed: first")
    here.report("failed: second")
    assert str(here.wait_for_failure(20)) == "rank 0 failed: first"
    late = Liveness(hub_address=("127.0.0.1", hub.port), rank=1, token=TOKEN, silence_seconds=20)
    assert str(late.wait_for_failure(20)) == "rank 0 failed: first"
    for each in (here, late):
        each.close()
    hub.close()


def test_a_long_reason_is_cut_and_heard(job):
    job.ranks[1].report("failed: " + "x" * 100_000)
    for rank in job.ranks:
        assert str(rank.wait_for_failure(20)).startswith("rank 1 failed: xxx")


def test_a_launcher_that_ends_ranks_which_have_all_come_is_no_failure(job):
    job.ranks[1].report_end()
    check_alive(job)


def test_a_rank_that_has_left_has_not_stopped(job):
    job.ranks[1].goodbye()
    deadline = time.monotonic() + 20
    while not job.hub._ranks[1].left and time.monotonic() < deadline:
        time.sleep(0.01)
    job.hub._ranks[1].heard -= 1000
    time.sleep(1.5)  # two beats of the hub
    assert job.ranks[0].failure is None


def send_all_during_the_run(rank):
    """Rank 1 finds out where the hub is and lets a thread send strangers' lines to it."""
    if rank == 1:
        joins = Liveness.__init__

        def joins_and_knocks(self, *, hub_address, **more):
            joins(self, hub_address=hub_address, **more)
            threading.Thread(target=send_all, args=(hub_address[1], lines()), daemon=True).start()

        Liveness.__init__ = joins_and_knocks


@pytest.mark.slow
def test_a_run_trains_while_strangers_knock(tmp_path):
    job = write_job(tmp_path / "job", train={"steps": 100})
    results = ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path, hook=send_all_during_the_run)
    assert [ended.exit_code for ended in results] == [0] * 4, results[0].stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 100
