"""A follower's process answers every call, or ends so that the first process notices."""

import os
import pickle
import signal
import subprocess
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread, Timer
from types import SimpleNamespace

import pytest

from workers.engine.gpu import follower, followers


class FailingFollower:
    """Its rows cannot be copied."""

    def __init__(self, spec: object) -> None:
        pass

    def read_rows(self) -> object:
        def copied() -> None:
            raise RuntimeError("an illegal memory access")

        return copied

    def close(self) -> None:
        pass


def test_a_follower_whose_rows_cannot_be_copied_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Event()
    monkeypatch.setattr(follower, "Follower", FailingFollower)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    here, there = Pipe()
    thread = Thread(target=follower.follow, args=(there,))
    thread.start()
    here.send_bytes(pickle.dumps(SimpleNamespace(share=SimpleNamespace(num_devices=2))))
    assert pickle.loads(here.recv_bytes()) == (0, None)
    here.send_bytes(pickle.dumps((1, "read_rows", ())))
    assert here.poll(20), "nobody answers the call"
    assert pickle.loads(here.recv_bytes()) == (None, "RuntimeError: an illegal memory access")
    assert ended.wait(20)
    here.send_bytes(pickle.dumps((2, "close", ())))
    thread.join(20)
    assert not thread.is_alive()


def test_an_interrupt_while_followers_start_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started, start = [], followers._start

    def start_and_interrupt(module: str) -> tuple[Connection, "subprocess.Popen[bytes]"]:
        started.append(start(module))
        Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return started[-1]

    monkeypatch.setattr(followers, "_start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        followers.Followers([SimpleNamespace(rendezvous=tmp_path / "meeting")], "sleeping")
    [(connection, child)] = started
    assert child.poll() is not None and connection.closed
