"""Atomic, durable files: written under another name, flushed to the disk (fsync), then renamed.

`unsynced` leaves out the flush: after a power loss, a file may then exist without being whole.
"""

import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from csattn.errors import ArtifactError, StoreFullError

MAX_WRITE_BYTES = 16 * 2**20  # per system call, so that an interrupt is not held up
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL}  # file systems without F_FULLFSYNC
_is_synced = True  # of this process


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and the hash that a file must have."""

    size_bytes: int
    sha256: str  # hex


@contextmanager
def unsynced() -> Iterator[None]:
    """While open, this process does not flush files to the disk.

    For files whose every byte is checked before use, or which can be made again.
    """
    global _is_synced
    _is_synced = False
    try:
        yield
    finally:
        _is_synced = True


class NewFile:
    """A file being written, which counts and hashes what is appended."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view[:MAX_WRITE_BYTES])  # a write may be short
            self._sha256.update(view[:written])
            self.size_bytes += written
            view = view[written:]

    @property
    def record(self) -> FileRecord:
        return FileRecord(self.size_bytes, self._sha256.hexdigest())


@contextmanager
def new_file(path: Path, planned_bytes: int) -> Iterator[NewFile]:
    """Write a file that appears under its name, flushed to the disk, only if the block ends without an error.

    Two writers of one path do not disturb each other: the later file replaces the earlier. planned_bytes: for the
    message if the disk is full.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with store_errors(f"write {path}", path.parent, planned_bytes):
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                yield NewFile(descriptor)
                _sync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(partial, path)
            fsync_dir(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file durably."""
    with new_file(path, len(data)) as file:
        file.write(data)
    return file.record


def fsync_dir(path: Path) -> None:
    """Flush a directory, so that the names in it survive a power loss."""
    _sync_and_close(open_directory(path))


def fsync_files(directory: Path) -> None:
    """Flush a directory and its files, which others have written; not the directory's own name in its parent."""
    for path in directory.iterdir():
        _sync_and_close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    fsync_dir(directory)


def open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _sync_and_close(descriptor: int) -> None:
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    if not _is_synced:
        return
    os.fsync(descriptor)
    if (full_sync := getattr(fcntl, "F_FULLFSYNC", None)) is not None:  # macOS's fsync ends at the disk's cache
        try:
            fcntl.fcntl(descriptor, full_sync)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise


def require_space(
    store: Path, needed_bytes: int, work: str = "the build", choice: str = "another store with --store"
) -> None:
    """Raise StoreFullError if the store's file system has no room for so many bytes.

    work, choice: what needs them and what else may be chosen, for the message.
    """
    available = available_bytes(store)
    if available is not None and available < needed_bytes:
        raise StoreFullError(
            f"the store {store} has {_readable(available)} free and {work} needs {_readable(needed_bytes)}; "
            f"free some space or choose {choice}"
        )


def available_bytes(path: Path) -> int | None:
    """Return how many bytes can still be written below a path, which need not exist yet; None if unknown."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            status = os.statvfs(place)
            return status.f_bavail * status.f_frsize
    return None


def make_store(path: Path) -> None:
    """Make the directory of a store if it does not exist. Raises ArtifactError if that fails."""
    with store_errors(f"make the store {path}", path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ArtifactError(f"cannot make the store {path}: a file is in its place; name a directory") from error


@contextmanager
def store_errors(action: str, place: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError into an ArtifactError, or a StoreFullError, with a sentence. action: what was tried."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            advice = "close other artifacts, or raise the limit of open files (`ulimit -n`)"
            raise ArtifactError(f"cannot {action}: {cause}; {advice}") from error
        if error.errno not in _FULL:
            raise ArtifactError(f"cannot {action}: {cause}; check the store's permissions and its disk") from error
        available = available_bytes(place)
        sizes = [] if needed_bytes is None else [f"{_readable(needed_bytes)} needed"]
        sizes += [] if available is None else [f"{_readable(available)} available"]
        raise StoreFullError(
            f"cannot {action}: {cause} ({', '.join(sizes)}); nothing was published. Free some space or choose another "
            "store with --store; a build continues where it stopped"
        ) from error


def _readable(num_bytes: int) -> str:
    """Format a size in bytes, and rounded in MiB."""
    return f"{num_bytes:,} bytes ({num_bytes / 2**20:,.1f} MiB)"
