"""An artifact's files between the disk and the system's page cache: read before they are needed, dropped after.

Nothing here fails: who reads them in earnest meets the error again, and tells of it.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PIECE_BYTES = 4 << 20


def read_index(artifact: Path) -> None:
    """All that is read of a context but its rows."""
    with suppress(OSError):
        for path in sorted(artifact.iterdir()):
            if ".kv." not in path.name:
                _read(path, lambda: False)


def read_rows(artifact: Path, is_over: Callable[[], bool]) -> None:
    """Layer by layer, until they are no longer wanted."""
    with suppress(OSError):
        for path in sorted(artifact.glob("*.kv.*")):
            _read(path, is_over)


def drop_pages(artifact: Path) -> None:
    """Give back the memory of what is no longer mapped, by this process or another."""
    if not hasattr(os, "posix_fadvise"):  # not on macOS
        return
    with suppress(OSError):
        for path in artifact.iterdir():
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path, is_over: Callable[[], bool]) -> None:
    with path.open("rb", buffering=0) as file:
        while not is_over() and os.read(file.fileno(), _PIECE_BYTES):
            pass
