"""Memory of a process as the system reports it, and its peak over some time."""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

_EVERY_S = 0.01
_PR_SET_THP_DISABLE = 41


def small_pages_only() -> None:
    """Disable transparent huge pages for this process, so that its resident memory is only what it has touched.

    Huge pages come and go by chance. Raises OSError if the system cannot disable them.
    """
    if ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError("this system cannot do without huge pages, so that memory cannot be compared")


def resident_bytes() -> dict[str, int]:
    """Return this process's resident memory: its own, of mapped files, and shared (`anon`, `file`, `shmem`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return {"anon": found["RssAnon"], "file": found["RssFile"], "shmem": found["RssShmem"]}


def mapped_bytes(directory: Path, suffix: str, pid: int | str = "self") -> int:
    """Return the resident bytes of the files in a directory that a process has mapped and whose names end in suffix."""
    num_bytes, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = f" {directory.resolve()}/" in line and line.endswith(suffix)
        elif inside and line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) * 1024
    return num_bytes


class Watch:
    """Samples figures every hundredth of a second while its block runs; `most` has the largest of each name."""

    def __init__(self, ask: Callable[[], dict[str, int]]):
        self._ask = ask
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-watch")
        self.most: dict[str, int] = {}
        self.num_samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            for name, value in self._ask().items():
                self.most[name] = max(self.most.get(name, 0), value)
            self.num_samples += 1
            if self._over.wait(_EVERY_S):
                return
