"""Files that services keep in a store: they can be measured and removed, and running services do without them."""

import asyncio
import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from csattn.artifact.lock import BuildLock, StoreUse, alone_in
from csattn.errors import ArtifactError
from tests.workers.serving.prompting import DOCUMENT, FIRST, SECOND, answer, answers, ask, make_backend
from workers.serving.kept_store import DIRECTORY, KeptFiles, kept_files, remove_kept

pytestmark = pytest.mark.usefixtures("builds")  # build in this process

ASKED = ask(DOCUMENT + "Which are red?"), ask(FIRST, "x", SECOND)


def test_kept_files_are_measured_removed_and_rebuilt(tmp_path: Path, builds) -> None:
    said = [text for text, _ in answers(tmp_path, *ASKED)]
    there = kept_files(tmp_path)
    on_disk = [path for path in (tmp_path / DIRECTORY).rglob("*") if path.is_file()]
    assert there.num_contexts == 1 and there.row_bytes > 0
    assert there.row_bytes == sum(path.stat().st_size for path in on_disk if path.suffix == ".block")
    assert there.num_bytes >= sum(path.stat().st_size for path in on_disk)
    remove_kept(tmp_path)
    assert kept_files(tmp_path) == KeptFiles(0, 0, 0) and not list((tmp_path / DIRECTORY).iterdir())
    assert [text for text, _ in answers(tmp_path, *ASKED)] == said and len(builds) == 2
    assert kept_files(tmp_path / "none") == KeptFiles(0, 0, 0)


def test_a_context_removed_during_measuring_counts_zero_bytes(tmp_path: Path, monkeypatch) -> None:
    """Another service removes it; an error would fail the request for whose context this one makes room."""
    said, real, gone = answers(tmp_path, ASKED[0]), os.scandir, list[str]()

    def look(path: Any) -> Any:
        if len(Path(path).name) == 16:
            gone.append(str(path))
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", look)
    there = kept_files(tmp_path)
    assert said and gone and (there.num_contexts, there.context_bytes) == (1, 0)


def test_kept_files_are_not_removed_while_a_service_uses_the_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            await answer(backend, ASKED[0])
            there = kept_files(tmp_path)
            with pytest.raises(ArtifactError, match=r"a service uses the store .*; stop it before you remove"):
                remove_kept(tmp_path)
            assert kept_files(tmp_path) == there and there.num_contexts == 1

    asyncio.run(main())
    remove_kept(tmp_path)
    assert kept_files(tmp_path).num_bytes == 0


def test_a_service_continues_after_its_kept_files_were_removed_without_a_lock(tmp_path: Path, builds) -> None:
    """The store's file system has no locks, or the service runs on another machine."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            first = [(await answer(backend, asked))[0] for asked in ASKED]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fcntl, "flock", refuse)
                remove_kept(tmp_path)
            assert kept_files(tmp_path).num_bytes == 0
            assert [(await answer(backend, asked))[0] for asked in ASKED] == first and len(builds) == 2

    asyncio.run(main())


def test_leftovers_are_removed_and_a_running_builds_files_stay(tmp_path: Path) -> None:
    place = tmp_path / DIRECTORY / ("0" * 32)
    for name in ("gone-0123", f".building-{'0' * 16}", f".building-{'1' * 16}"):
        (place / name).mkdir(parents=True)
        (place / name / "layer").write_bytes(b"x")
    (place / "tokens-0123.json").write_text("[]")
    (tmp_path / DIRECTORY / "0123.partial").write_bytes(b"x")
    lock = BuildLock(place / f".building-{'1' * 16}.lock").acquire()
    try:
        remove_kept(tmp_path)
        left = {path.name for path in place.iterdir()}
        assert left == {f".building-{'1' * 16}", f".building-{'1' * 16}.lock"}
        assert not list((tmp_path / DIRECTORY).glob("*.partial"))
    finally:
        lock.release()
    remove_kept(tmp_path)
    assert not list((tmp_path / DIRECTORY).iterdir())


def test_a_store_has_shared_users_or_one_exclusive_user(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first, second = StoreUse(store), StoreUse(store)
    first.begin()
    first.begin()
    second.begin()
    for user in first, second:
        with alone_in(store) as is_alone:
            assert not is_alone
        user.end()
        user.end()
    begun = threading.Event()

    def begin() -> None:
        first.begin()
        begun.set()

    waiting = threading.Thread(target=begin)
    with alone_in(store) as is_alone:
        assert is_alone
        waiting.start()
        assert not begun.wait(0.2), "who comes waits until the other is done"
    waiting.join(10.0)
    assert begun.is_set()
    first.end()
    assert os.listdir(store) == [], "nothing is left of it"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_does_not_hold_a_stores_exclusive_lock(tmp_path: Path) -> None:
    with alone_in(tmp_path) as is_alone:
        assert is_alone
        has_begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begins, b"!")
            time.sleep(60.0)
            os._exit(0)
    try:
        assert os.read(has_begun, 1) == b"!"
        with alone_in(tmp_path) as is_alone:
            assert is_alone
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(has_begun)
        os.close(begins)


@pytest.mark.parametrize("link", ["kept", "kept/0123", f"kept/{'0' * 32}"])
def test_symlinks_in_a_store_are_not_followed_by_removal(tmp_path: Path, link: str) -> None:
    """Links in a copied store may point at any file of the user who cleans up."""
    own, store = tmp_path / "home", tmp_path / "store"
    (own / "docs" / "old").mkdir(parents=True)
    (own / "docs" / "letter").write_text("precious")
    (store / link).parent.mkdir(parents=True, exist_ok=True)
    (store / link).symlink_to(own if link == "kept" else own / "docs")
    assert kept_files(store) == KeptFiles(0, 0, 0)
    remove_kept(store)
    assert (own / "docs" / "letter").read_text() == "precious" and (own / "docs" / "old").is_dir()
