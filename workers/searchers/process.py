"""A search worker as a child process: the client's handle of it, and the child's `main`."""

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import asdict

from workers.child import end_with, module_command
from workers.searchers.worker import SearchWorker, WorkerSpec

GRACE_S = 1.0  # how long a worker may take to end by itself when its client has gone


class ChildProcess:
    """Starts a worker as a child process; a `WorkerHandle`."""

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
        """Kill the process: it has no state that would have to be cleaned up."""
        self._child.kill()
        self._child.wait()


def main(spec: str) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal; the client handles them
        signal.signal(number, signal.SIG_IGN)
    values = json.loads(spec)
    values["cpus"] = tuple(values["cpus"]) if values["cpus"] is not None else None
    with contextlib.suppress(ConnectionError, FileNotFoundError):  # the client may have gone before this worker came up
        # if the client goes, this process ends even within a step, whose next queries will never come: the give-up
        # word cannot be set instead, because other workers read the same word
        SearchWorker(WorkerSpec(**values)).serve(lambda connection: end_with(connection.fileno(), GRACE_S))


if __name__ == "__main__":
    main(sys.argv[1])
