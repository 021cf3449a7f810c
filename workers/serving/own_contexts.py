"""Contexts that prompts bring themselves: the leading part of a long one is made a context, which later ones find.

By its tokens: a prompt that begins with all tokens of a context needs only the rest. Those of different salts lie in
different directories, are looked for there alone, and are built there again.
"""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from csattn.artifact import open_artifact
from csattn.artifact.durable import store_errors
from csattn.artifact.find import is_artifact_id
from csattn.artifact.work import BUILDING_PREFIX, num_bytes_below, used_at
from csattn.config import preset
from csattn.errors import ArtifactError, ArtifactRoomError, CsattnError
from csattn.models import LoadedModel
from workers.serving.context_build import Builder
from workers.serving.context_counts import BuildCounts
from workers.serving.kept_store import DIRECTORY, GONE_PREFIX, DiskBudget, entries, kept_files, remove_at_once, salted
from workers.serving.messages import ContextNotReadyError, FailedBuild, closing
from workers.serving.names_in_store import by_names_in_store
from workers.serving.residency import Residency
from workers.serving.setbacks import Setbacks
from workers.serving.usable import Tokens, Usable
from workers.settings import Settings

LEFT_OUT = 256  # last tokens of a prompt, at least, that stay out of its context: a question, which others do not ask
STEP = 256  # a context's tokens are a multiple: prompts that differ behind it find it all the same
_STALE_S = 86400.0
_TOKENS_PREFIX = "tokens-"  # of what a build makes a context
_Key = tuple[Path, bytes]  # where it is built, and of what
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a prompt begins with."""

    path: Path | None  # of the context's artifact; None: it begins with none
    num_tokens: int = 0
    is_new: bool = False  # made for this prompt


@dataclass(slots=True)
class _Build:
    task: asyncio.Task[Path]
    num_waiting: int = 0
    has_begun: bool = False


class OwnContexts:
    """For one event loop. The directories are the truth: several services, of other models too, may share them."""

    def __init__(
        self, loaded: LoadedModel, settings: Settings, usable: Usable, residency: Residency, builder: Builder
    ) -> None:
        self._settings, self._usable, self._residency, self._builder = settings, usable, residency, builder
        self._directory = settings.store.path / DIRECTORY
        self.budget = DiskBudget("kept.context_bytes", settings.kept.context_bytes, self._directory)
        self.budget.find(kept_files(settings.store.path).context_bytes)
        self._identity = [loaded.fingerprint, loaded.tokenizer_hash]
        self._index_config = preset(settings.build.preset)
        self._checked: set[Path] = set()  # own ones whose every byte was looked at
        self._looks: dict[Path, asyncio.Task[bool]] = {}  # at every byte, under way
        self._builds: dict[_Key, _Build] = {}
        self._turn_to_build = asyncio.Semaphore(1)  # its own: who waits here is not behind builds that nobody waits for
        self.setbacks = Setbacks()
        self.num_bytes: int | None = None  # of all on disk, as they were when the last was built here
        self._num_failed = 0
        self._is_closed = False

    @property
    def counts(self) -> BuildCounts:
        num_begun = sum(build.has_begun for build in self._builds.values())
        return BuildCounts(len(self._builds) - num_begun, num_begun, self._num_failed)

    async def find(
        self, token_ids: Sequence[int], salt: str, registered: Sequence[Path], without: Collection[Path] = ()
    ) -> Found:
        """The longest context that the prompt begins with. registered: contexts that all may find."""
        ids, directory, without = np.asarray(token_ids, np.int32), self._of(salt), set(without)
        while True:
            found = await asyncio.to_thread(self._longest, ids, directory, registered, without)
            if found.path is None or found.path.parent != directory or await self._is_sound(found.path):
                return found
            without.add(found.path)

    async def make(self, token_ids: Sequence[int], salt: str) -> Found:
        """A context of the prompt's first tokens, `cut_of` them. Raises a ServingError where none can be made."""
        ids, directory, cut = np.asarray(token_ids, np.int32), self._of(salt), cut_of(len(token_ids))
        key = directory, hashlib.sha256(ids[:cut].tobytes()).digest()
        build = self._builds.get(key) or self._begin(key, ids[:cut])
        build.num_waiting += 1
        try:
            path = await asyncio.shield(build.task)  # who leaves does not end it: it is found when he comes again
        finally:
            build.num_waiting -= 1
            if not build.num_waiting and not build.has_begun:
                self._forget(key, build)
                build.task.cancel()
        return Found(path, cut, is_new=True)

    async def drop(self, path: Path) -> None:
        """If one that turned out damaged, or gone, is one of these, remove it."""
        if path.is_relative_to(self._directory):
            await asyncio.to_thread(self._remove, path)

    async def close(self) -> None:
        """End builds, and begin none; they go on when such a prompt comes again."""
        self._is_closed = True
        tasks = [build.task for build in self._builds.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _of(self, salt: str) -> Path:
        """The directory of the contexts of this model and salt."""
        return self._directory / hashlib.sha256(json.dumps([*self._identity, salt]).encode()).hexdigest()[:32]

    def _longest(self, ids: Tokens, directory: Path, registered: Sequence[Path], without: Collection[Path]) -> Found:
        own = [path for path in entries(directory) if is_artifact_id(path.name)]
        among = [path for path in [*own, *registered] if path not in without]
        tokens = {path: of for path in among if (of := self._tokens_of(path)) is not None}
        for path in sorted(tokens, key=lambda path: -len(tokens[path])):
            num_tokens = len(tokens[path])
            if num_tokens < len(ids) and np.array_equal(tokens[path], ids[:num_tokens]):
                if path in own:
                    with suppress(OSError):
                        os.utime(path)  # used now
                return Found(path, num_tokens)
        return Found(None)

    def _tokens_of(self, path: Path) -> Tokens | None:
        """None: it cannot be used, or has not the index that engines want of all they load."""
        known = self._usable.recall(path)
        return known.token_ids if known.spec and known.spec.index_config == self._index_config else None

    async def _is_sound(self, path: Path) -> bool:
        """Every byte is looked at, once for all who ask. One that is damaged goes, and is made again."""
        if path in self._checked:
            return True
        if path not in self._looks:
            look = self._looks[path] = asyncio.create_task(asyncio.to_thread(self._look, path))
            look.add_done_callback(lambda look: self._looks.pop(path) and (look.cancelled() or look.exception()))
        return await asyncio.shield(self._looks[path])  # one who leaves does not end it for the others

    def _look(self, path: Path) -> bool:
        try:
            open_artifact(path, verify="full").close()
        except ArtifactRoomError:  # it may be sound
            return False
        except ArtifactError as error:
            _log.warning("%s is removed: %s", path, error)
            self._remove(path)
            return False
        self._checked.add(path)
        return True

    def _begin(self, key: _Key, ids: Tokens) -> _Build:
        """When those before it are built."""
        if self._is_closed:
            raise closing()
        if failed := self.setbacks.of(key):
            raise _refusal(failed)

        async def run() -> Path:
            async with self._turn_to_build:
                build.has_begun = True
                return await self._build(key, ids)

        build = self._builds[key] = _Build(asyncio.create_task(run()))
        build.task.add_done_callback(lambda task: self._forget(key, build))
        return build

    async def _build(self, key: _Key, ids: Tokens) -> Path:
        directory, digest = key
        started = time.monotonic()
        _log.info("a context of %s tokens is being built of a prompt", f"{len(ids):,}")
        # its own: another service that builds the same is done with its file sooner or later
        ids_path = directory / f"{_TOKENS_PREFIX}{digest.hex()[:16]}-{secrets.token_hex(4)}.json"
        try:
            await asyncio.to_thread(self._write_tokens, ids_path, ids)
            source = ["--no-sync", "--tokens", str(ids_path)]  # who finds it later looks at every byte
            result = await self._builder.build(source, directory, lambda share, what: None, nice=0)
        except (CsattnError, OSError) as error:  # OSError: no process could be started
            self._num_failed += 1
            # all are told, and who knows a salt's hash can try guesses
            why = by_names_in_store(str(error), self._settings.store.path).replace(directory.name, "...")
            refusal = _refusal(self.setbacks.add(key, len(ids), why))
            refusal.detail = refusal.message.replace(why, str(error))
            _log.warning("%s", refusal.detail)
            raise refusal from error
        finally:
            with suppress(OSError):
                ids_path.unlink()
        self.setbacks.forget(key)
        path = directory / str(result["artifact"])
        self._checked.add(path)
        _log.info("a context of %s tokens was built in %.1f s", f"{len(ids):,}", time.monotonic() - started)
        await self._keep_to_budget(path)
        return path

    def _write_tokens(self, path: Path, ids: Tokens) -> None:
        directory, told = path.parent, json.dumps(ids.tolist())

        def write() -> None:
            with store_errors(f"make {directory}", self._settings.store.path):
                directory.mkdir(parents=True, exist_ok=True)
            path.write_text(told)

        with store_errors(f"write {path}", directory):
            try:
                write()
            except FileNotFoundError:  # another service has removed the directory, while it was empty
                write()

    def _forget(self, key: _Key, build: _Build) -> None:
        if self._builds.get(key) is build:
            del self._builds[key]
        if build.task.done() and not build.task.cancelled():
            build.task.exception()  # of which those who wait are told, if any still do

    async def _keep_to_budget(self, newest: Path) -> None:
        """Remove what nobody uses, the least recently used first, until all together take no more than they may."""
        sizes = await asyncio.to_thread(self._sizes)
        self._checked &= sizes.keys()
        for path in self._residency.loaded_below(self._directory):
            if path not in sizes:  # another service has removed it: its bytes stay on the disk while they are mapped
                await self._residency.forget(path)
        self.num_bytes = sum(sizes.values())
        budget = self.budget.find(self.num_bytes)
        for path, num_bytes in sizes.items():
            if self.num_bytes > budget and path != newest and not self._residency.is_used(path):
                await self._residency.forget(path)
                await asyncio.to_thread(self._remove, path)
                self.num_bytes -= num_bytes

    def _remove(self, path: Path) -> None:
        """At once for all who look, then its bytes."""
        self._checked.discard(path)
        self._usable.forget(path)
        remove_at_once(path)

    def _sizes(self) -> dict[Path, int]:
        """Of all salts, with what nobody goes on building; the least recently used first.

        What services that were killed did not come to remove goes here.
        """
        found: list[Path] = []
        directories = salted(self._directory)
        for directory in directories:
            with suppress(OSError):  # unless it is empty, it stays: of a salt that may never come again
                directory.rmdir()
        for path in [path for directory in directories for path in entries(directory)]:
            is_stale = used_at(path) < time.time() - _STALE_S
            if is_artifact_id(path.name) or (path.name.startswith(BUILDING_PREFIX) and is_stale):
                found.append(path)
            elif path.name.startswith(GONE_PREFIX):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_TOKENS_PREFIX) and is_stale:
                with suppress(OSError):
                    path.unlink()
        return {path: num_bytes_below(path) for path in sorted(found, key=used_at)}


def cut_of(num_tokens: int) -> int:
    """How many tokens of so long a prompt become a context."""
    return max(0, num_tokens - LEFT_OUT) // STEP * STEP


def _refusal(failed: FailedBuild) -> ContextNotReadyError:
    tries = "" if failed.num_tries == 1 else f" in {failed.num_tries} tries"
    return ContextNotReadyError(
        f"no context of {failed.num_tokens:,} tokens could be made of the prompt's beginning{tries}: {failed.why}; it "
        f"is not tried again for {failed.retry_in_s:.0f} s",
        retry_after_s=failed.retry_in_s,
    )
