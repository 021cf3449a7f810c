"""Directories in a store or a cache, finished or not: their size, their last use, and their removal."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

_AHEAD_S = 86400.0  # how far another machine's clock may be ahead


def remove_except(directory: Path, kept: set[str]) -> None:
    """Remove everything in a directory except these names."""
    for entry in directory.iterdir():
        if entry.name not in kept:
            remove(entry)


def remove(path: Path) -> None:
    """Remove a file or a whole directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def num_bytes_below(path: Path) -> int:
    """Return the total size of the files below a directory; others may be removing them."""
    total = 0
    for directory, _, names in os.walk(path):  # a removed directory is skipped
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total


def used_at(path: Path) -> float:
    """Return when an artifact was last used, in seconds since the epoch, or 0 if it is gone.

    Also 0 for a time more than a day ahead: after the clock was set back, it would count as the last used for too long.
    """
    try:
        when = path.stat().st_mtime
    except OSError:
        return 0.0
    return when if when < time.time() + _AHEAD_S else 0.0
