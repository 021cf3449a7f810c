"""`workers.engine.gpu.follower_process` without a device: its kernels run on the CPU.

Without arguments this is a `Nursery`'s process, which forks followers: importing what they need takes longer than most
tests of them.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_on_cpu.emulated import Emulator
from tests.workers.engine.emulated_engine import emulate
from workers.child import module_command
from workers.engine.gpu import followers
from workers.engine.gpu.follower_process import main

KERNELS = "CSATTN_TEST_KERNELS"  # environment variable: the directory of compiled kernels
MODULE = "tests.workers.engine.emulated_follower"


class Forked:
    """A process that this one did not start itself, with the methods of `Popen` that `Followers` calls."""

    def __init__(self, pid: int) -> None:
        self.pid, self._descriptor = pid, os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
        os.close(self._descriptor)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class Nursery:
    """Starts followers as `workers.engine.gpu.followers` does, by forking a process that has imported all they need."""

    def __init__(self) -> None:
        command, environment = module_command(MODULE)
        self._socket, theirs = socket.socketpair()
        self._start_other = followers._start
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs, env=environment)

    def start(self, module: str) -> tuple[Connection, Any]:
        if module != MODULE:
            return self._start_other(module)
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
        return Connection(ours.detach()), Forked(int(self._socket.recv(20)))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(requests: socket.socket) -> None:
    """Fork a follower for each descriptor that is sent, and answer with its process id, until the socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for exit codes
    parent = os.getpid()
    while descriptors := socket.recv_fds(requests, 4, 1)[1]:
        if pid := os.fork():
            os.close(descriptors[0])
            requests.send(str(pid).encode())
        else:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            main(str(descriptors[0]), str(parent))


if __name__ == "__main__":
    emulate(Emulator(Path(os.environ[KERNELS])), pytest.MonkeyPatch())
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        serve(socket.socket(fileno=0))
