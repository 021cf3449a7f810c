"""File locks (flock) of builders and of a store's users. The kernel releases them however their holder dies."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from csattn.artifact.durable import open_directory, store_errors
from csattn.errors import ArtifactError

_held: set[int] = set()  # descriptors of the locks that this process holds


def _let_go_after_fork() -> None:
    """Close the descriptors in a forked child: it must not keep locks that its parent releases or dies with."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_after_fork)


def _close(descriptor: int) -> None:
    """Close the descriptor of a lock, unless a fork has done so in this process: then the lock is the parent's."""
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


class BuildLock:
    """An exclusive flock on a file that exists only while a process builds or waits.

    Use it in `with` after it is acquired, to release it at the end. Raises ArtifactError if the file system has no
    locks: two builders would each remove what the other makes.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        assert self._descriptor is not None, "entered a lock that is not held"
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def acquire(self, on_wait: Callable[[], None] | None = None) -> Self:
        """Acquire the lock. If another builder holds it, call `on_wait` once, then wait."""
        if not self.try_acquire():
            if on_wait is not None:
                on_wait()
            self._lock(fcntl.LOCK_EX)
        return self

    def try_acquire(self) -> bool:
        """Acquire the lock if nobody holds it; return whether it was acquired."""
        try:
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def exists(self) -> bool:
        """Whether a process holds the lock, or died while holding it."""
        return self._path.exists()

    def is_held(self) -> bool:
        """Whether a process holds the lock now. Does not create the file."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return _is_refused(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Release the lock and remove its file. In a forked process, its parent's locks stay."""
        assert self._descriptor is not None, "released a lock that is not held"
        try:
            if self._descriptor in _held:
                self._path.unlink(missing_ok=True)  # before unlocking: afterwards the file may be another process's
        finally:
            _close(self._descriptor)
            self._descriptor = None

    def _lock(self, operation: int) -> None:
        """Lock the file at the path; try again if its last holder removed the file that was opened here."""
        while self._descriptor is None:
            with store_errors(f"lock {self._path}", self._path.parent):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, operation)
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    _held.add(descriptor)
                    self._descriptor, descriptor = descriptor, -1
            except FileNotFoundError:  # removed after it was opened
                continue
            except BlockingIOError:
                raise
            except OSError as error:
                raise ArtifactError(
                    f"cannot lock {self._path}: {error.strerror}; its file system does not support locks (flock), "
                    "which builders need to exclude each other: choose another place (--store, CSATTN_CACHE), or "
                    "mount it with locks"
                ) from error
            finally:
                if descriptor >= 0:
                    os.close(descriptor)


class StoreUse:
    """A shared flock on a store's directory, which a service holds while it runs."""

    def __init__(self, store: Path):
        self._store = store
        self._descriptor: int | None = None

    def begin(self) -> None:
        """Acquire the lock; wait while a process is `alone_in` the store. No effect on a file system without locks."""
        if self._descriptor is not None:
            return
        with suppress(OSError):
            self._store.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_directory(self._store)
            _held.add(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def end(self) -> None:
        if self._descriptor is not None:
            _close(self._descriptor)
            self._descriptor = None


@contextmanager
def alone_in(store: Path) -> Iterator[bool]:
    """Yield whether nobody uses the store. If so, a `StoreUse` cannot begin before the block ends.

    On a file system without locks, nobody seems to use it.
    """
    with store_errors(f"look at {store}", store):
        descriptor = open_directory(store)
    _held.add(descriptor)
    try:
        yield not _is_refused(descriptor, fcntl.LOCK_EX)
    finally:
        _close(descriptor)


def _is_refused(descriptor: int, kind: int) -> bool:
    """Whether another process's lock prevents a lock of this kind; False on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
