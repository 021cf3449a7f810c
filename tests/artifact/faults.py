"""Ways to damage an artifact, and the processes that build it."""

import errno
import hashlib
import json
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

SYSTEM_CALLS = ("open", "write", "fsync", "replace", "rename", "unlink")


def flip_byte(path: Path, position: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def reseal(artifact_dir: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Make every hash and size of an artifact agree with the present content of its files, as a forger would."""
    path = artifact_dir / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for name in manifest["files"]:
        data = (artifact_dir / name).read_bytes()
        manifest["files"][name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    seal(artifact_dir, json.dumps(manifest).encode())


def seal(artifact_dir: Path, manifest: bytes) -> None:
    """Replace the content of the manifest, and write its hash."""
    (artifact_dir / "manifest.json").write_bytes(manifest)
    (artifact_dir / "manifest.sha256").write_text(f"{hashlib.sha256(manifest).hexdigest()}  manifest.json\n")


def fork(work: Callable[[], object]) -> int:
    """Run the work in a child and return its process id; the child exits with 0 if the work raised nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking a process with threads: the child uses none
        pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def exit_status(pid: int) -> int:
    """Wait for a child, and return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def before_call(calls: tuple[str, ...], number: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """Call `act` before the n-th of those system calls (from 0). Yields the calls made so far."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, _counted(name, getattr(os, name), number, act, made))
        yield made


def _counted(
    name: str, call: Callable[..., Any], number: int, act: Callable[[], None], made: list[str]
) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        made.append(name)
        if len(made) == number + 1:
            act()
        return call(*args, **options)

    return counted


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


DISK_FULL = fail_with(errno.ENOSPC)
DISK_BROKEN = fail_with(errno.EIO)


@contextmanager
def without_root() -> Iterator[None]:
    """Give up root's rights, if the tests have them, so that file modes apply."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def public_place() -> Iterator[Path]:
    """Yield a temporary directory that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        try:
            yield place
        finally:
            for directory in (place, *place.rglob("*")):
                with suppress(OSError):
                    if directory.is_dir():
                        directory.chmod(0o755)
