"""A search worker as a child process: how it is started, and its `main`."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

from workers.child import end_with, module_command
from workers.searchers.worker import SearchWorker, WorkerSpec

GRACE_S = 1.0  # for a worker to end by itself when its client has gone


class ChildProcess:
    """A `WorkerHandle` of a child."""

    def __init__(self, spec: WorkerSpec) -> None:
        command, environment = module_command("workers.searchers.process", json.dumps(asdict(spec)))
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)

    @property
    def pid(self) -> int:
        return self._child.pid

    def fault(self) -> str | None:
        code = self._child.poll()
        return None if code is None else f"a search worker has ended with exit status {code}; look at its output"

    def kill(self) -> None:
        """It holds nothing that would have to be put in order."""
        self._child.kill()
        self._child.wait()


def main(spec: str) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, which are the client's business
        signal.signal(number, signal.SIG_IGN)
    values = json.loads(spec)
    values["cpus"] = tuple(values["cpus"]) if values["cpus"] is not None else None
    with contextlib.suppress(ConnectionError, FileNotFoundError):  # the client may have gone before this worker came up
        SearchWorker(WorkerSpec(**values)).serve(_end_with_client)


def _end_with_client(connection: socket.socket) -> None:
    """Also in a step, whose next queries will not come. It is not given up: other workers look at the same word."""
    end_with(connection.fileno(), GRACE_S)


if __name__ == "__main__":
    main(sys.argv[1])
