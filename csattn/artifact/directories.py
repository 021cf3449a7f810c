"""Directories in a store or a cache, finished or not: their size, their last use, and their removal."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from csattn.artifact.durable import store_errors
from csattn.artifact.lock import BuildLock

BUILDING_PREFIX = ".building-"
LOCK_SUFFIX = ".lock"
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


def remove_artifact(path: Path) -> bool:
    """Remove a finished artifact, at once for all readers; return whether it was there and no other process held it.

    Those that have it open can still read it, through their memory maps.
    """
    gone = path.with_name(f"{BUILDING_PREFIX}{path.name}")
    lock = lock_of(gone)
    if not lock.try_acquire():
        return False
    with lock, store_errors(f"remove {path}", path.parent):
        remove(gone)
        try:
            os.rename(path, gone)
        except FileNotFoundError:  # another process has removed it
            return False
        remove(gone)
    return True


def lock_of(work: Path) -> BuildLock:
    """The lock of a work directory, `.building-ID`, and of the artifact that it becomes."""
    return BuildLock(work.with_name(f"{work.name}{LOCK_SUFFIX}"))


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
