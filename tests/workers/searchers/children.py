"""Search workers in their own processes, which tests may kill; and counts of what must not be left of them."""

import contextlib
import os
from pathlib import Path

from tests.forks import FORKS
from workers.searchers.worker import SearchWorker, WorkerSpec


class ForkedProcess:
    """A worker process that starts fast: it is forked from a server that has loaded its imports."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._child = FORKS.Process(target=SearchWorker(spec).serve)
        self._child.start()
        self.pid = self._child.pid

    def fault(self) -> str | None:
        return None if self._child.is_alive() else "it has ended"

    def kill(self) -> None:
        self._child.kill()
        self._child.join()
        self._child.close()


class Children:
    """Launches worker processes and keeps all of them, and the latest one of each worker number."""

    def __init__(self) -> None:
        self.started: list[ForkedProcess] = []
        self.latest: dict[int, ForkedProcess] = {}

    def __call__(self, spec: WorkerSpec) -> ForkedProcess:
        child = self.latest[spec.number] = ForkedProcess(spec)
        self.started.append(child)
        return child

    def signal(self, number: int, what: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.latest[number].pid, what)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def named_files() -> set[str]:
    """Return the named shared memory and the named sockets of this process."""
    names = {str(file) for file in Path("/dev/shm").glob("csattn-*")}
    names |= {str(file) for file in Path("/tmp").glob(f"csattn-{os.getpid()}-*")}
    sockets = Path("/proc/net/unix").read_text().splitlines() if os.path.exists("/proc/net/unix") else []
    return names | {line for line in sockets if f"csattn-{os.getpid()}-" in line}


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
