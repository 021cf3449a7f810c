"""What services keep of prompts and turns in a store: its size, its budget on the disk, and its removal.

    kept/<model and salt>/<id>/    contexts made from prompts
    kept/<hash>.block              blocks of rows of turns

Removal is atomic for readers: a running service finds a directory or file whole, or does without it.
"""

import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from csattn.artifact import collect_garbage
from csattn.artifact.directories import BUILDING_PREFIX, num_bytes_below
from csattn.artifact.durable import available_bytes
from csattn.artifact.find import is_artifact_id
from csattn.artifact.lock import alone_in
from csattn.errors import ArtifactError
from offload.block_files import PARTIAL, SUFFIX
from workers.words import size

DIRECTORY = "kept"  # in the store
GONE_PREFIX = "gone-"  # of directories that are being removed
_SALTED = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger(__name__)


class DiskBudget:
    """The budget for files of one kind: the setting, but at most as much as they leave free on the disk.

    Others use the disk, too. When the budget is first less than the setting, that is logged once.
    """

    def __init__(self, setting: str, most_bytes: int, directory: Path) -> None:
        self._setting, self._most_bytes, self._directory = setting, most_bytes, directory
        self.num_bytes = most_bytes  # the result of the last `find`
        self._is_logged = False

    def find(self, kept_bytes: int) -> int:
        """Return the budget, given how many bytes the files take now."""
        free = available_bytes(self._directory)
        self.num_bytes = self._most_bytes if free is None else min(self._most_bytes, (kept_bytes + free) // 2)
        if self.num_bytes < self._most_bytes and not self._is_logged:
            self._is_logged = True
            message = "%s is %s, but for now the limit is %s: up to half of the free space on the disk of %s is used"
            _log.info(message, self._setting, size(self._most_bytes), size(self.num_bytes), self._directory)
        return self.num_bytes


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """How much a store keeps."""

    num_contexts: int
    context_bytes: int  # including unfinished builds, and what is being removed
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.context_bytes + self.row_bytes


def kept_files(store: Path) -> KeptFiles:
    """Measure what the store keeps now; zeros if there is no store."""
    num_contexts, context_bytes, row_bytes = 0, 0, 0
    for path in salted(store / DIRECTORY):
        num_contexts += sum(is_artifact_id(entry.name) for entry in entries(path))
        context_bytes += num_bytes_below(path)
    for path in _row_files(store / DIRECTORY):
        with suppress(OSError):
            row_bytes += path.stat().st_size
    return KeptFiles(num_contexts, context_bytes, row_bytes)


def remove_kept(store: Path) -> None:
    """Remove all that the store keeps, except builds that run. Raises ArtifactError if a service uses the store."""
    with alone_in(store) as is_alone:
        if not is_alone:
            raise ArtifactError(
                f"a service uses the store {store}; stop it before you remove what it has kept (running, it keeps to "
                "kept.context_bytes and kept.disk_bytes)"
            )
        for path in salted(store / DIRECTORY):
            _remove_contexts(path)
        for path in _row_files(store / DIRECTORY):
            with suppress(OSError):
                path.unlink()


def remove_at_once(path: Path) -> None:
    """Remove a directory: rename it, so that it is gone for all readers at once, then delete its files."""
    gone = path.with_name(f"{GONE_PREFIX}{secrets.token_hex(4)}")
    with suppress(OSError):
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def salted(directory: Path) -> list[Path]:
    """The directories of models and salts in a store's `kept/`.

    Everything in them may be removed. So symbolic links, and names that services do not give, are left out: a store
    that was copied may have either.
    """
    return [
        path for path in entries(directory) if _SALTED.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def entries(directory: Path) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory)]
    except OSError:  # none yet, or no directory
        return []


def _row_files(directory: Path) -> list[Path]:
    return [path for path in entries(directory) if path.suffix in (SUFFIX, PARTIAL)]


def _remove_contexts(directory: Path) -> None:
    """Remove the contexts of one model and salt."""
    collect_garbage(directory)
    for path in entries(directory):
        if path.is_dir() and not path.name.startswith(BUILDING_PREFIX):
            remove_at_once(path)
        elif not path.name.startswith(BUILDING_PREFIX):
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):  # not empty: another process builds in it
        directory.rmdir()
