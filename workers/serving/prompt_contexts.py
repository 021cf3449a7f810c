"""Contexts from prompts: the leading part of a long prompt is built into a context, which later prompts find.

They find it by its tokens: a prompt that begins with all tokens of a context needs only its other tokens computed.
Contexts of different salts are separate: each salt has a directory, in which alone they are looked for and built.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from csattn.artifact import open_artifact
from csattn.artifact.directories import BUILDING_PREFIX, LOCK_SUFFIX, num_bytes_below, used_at
from csattn.artifact.durable import store_errors
from csattn.artifact.find import is_artifact_id
from csattn.artifact.store import is_being_built, remove_unfinished
from csattn.config import IndexConfig, ListConfig, preset
from csattn.errors import ArtifactError, ArtifactRoomError, CsattnError
from csattn.models import LoadedModel
from workers.capacity import spec_of
from workers.serving.backoff import BuildBackoff
from workers.serving.build_queue import Build, BuildQueue
from workers.serving.context_build import Builder
from workers.serving.examiner import Examiner, Tokens
from workers.serving.kept_store import DIRECTORY, GONE_PREFIX, DiskBudget, entries, kept_files, remove_at_once, salted
from workers.serving.messages import ContextNotReadyError, ContextTooLongError, FailedBuild
from workers.serving.names_in_store import by_names_in_store
from workers.serving.residency import Residency
from workers.settings import Settings

LEFT_OUT = 256  # at least so many last tokens of a prompt stay out of its context: a question that others do not ask
STEP = 256  # a context's length is a multiple of this, so that prompts that differ only after it find it
_STALE_S = 86400.0
_TOKENS_PREFIX = "tokens-"  # of files with the token ids of a build
_Key = tuple[Path, bytes]  # directory of a build, and SHA-256 of its token ids
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """The context that a prompt begins with."""

    path: Path | None  # of its artifact; None: the prompt begins with no context
    num_tokens: int = 0
    is_new: bool = False  # made for this prompt
    num_shared: int = 0  # the most first tokens that the prompt has in common with any context


@dataclass(slots=True, eq=False)
class _Build(Build):
    num_waiting: int = 0  # requests that wait for it


class PromptContexts:
    """Finds, builds and removes such contexts. For one event loop.

    The directories are authoritative: several services, also of other models, may share them.
    """

    def __init__(
        self, loaded: LoadedModel, settings: Settings, examiner: Examiner, residency: Residency, builder: Builder
    ) -> None:
        self._settings, self._examiner, self._residency, self._builder = settings, examiner, residency, builder
        self._directory = settings.store.path / DIRECTORY
        self.budget = DiskBudget("kept.context_bytes", settings.kept.context_bytes, self._directory)
        self.budget.find(kept_files(settings.store.path).context_bytes)
        self._identity, self._geometry = [loaded.fingerprint, loaded.tokenizer_hash], loaded.geometry
        self._index_config = preset(settings.build.preset)
        self._checked: set[Path] = set()  # artifacts whose every byte has been verified
        self._verifications: dict[Path, asyncio.Task[bool]] = {}  # such verifications under way
        self.builds: BuildQueue[_Key, _Build] = BuildQueue()  # apart from registered contexts: nobody waits for those
        self.backoff = BuildBackoff()
        self.num_bytes: int | None = None  # of all on the disk, when the last one was built here

    async def find(
        self, token_ids: Sequence[int], salt: str, registered: Sequence[Path], without: Collection[Path] = ()
    ) -> Found:
        """Return the longest usable context that the prompt begins with, among those of its salt and `registered`.

        registered: contexts that requests of any salt may find. without: contexts to leave out.
        """
        ids, directory, without = np.asarray(token_ids, np.int32), self._of(salt), set(without)
        while True:
            found = await asyncio.to_thread(self._longest, ids, directory, registered, without)
            if found.path is None or found.path.parent != directory or await self._is_intact(found.path):
                return found
            without.add(found.path)

    async def make(self, token_ids: Sequence[int], salt: str) -> Found:
        """Build a context of these tokens. Raises a ServingError if that fails, or if it could not be loaded."""
        like = self._settings.build
        self._residency.require_possible(spec_of(self._geometry, len(token_ids), like.dtype, like.preset))
        ids, directory = np.asarray(token_ids, np.int32), self._of(salt)
        key = directory, hashlib.sha256(ids.tobytes()).digest()
        build = self.builds.get(key) or self._begin(key, ids)
        build.num_waiting += 1
        try:
            # if the client leaves, the build goes on: a retry finds its result
            path: Path = await asyncio.shield(build.task)
        finally:
            build.num_waiting -= 1
            if not build.num_waiting and not build.has_begun:
                self.builds.cancel(key, build)
        return Found(path, len(ids), is_new=True)

    async def drop(self, path: Path) -> None:
        """Remove a context that turned out damaged or gone, if it is one of these."""
        if path.is_relative_to(self._directory):
            await asyncio.to_thread(self._remove, path)

    def _of(self, salt: str) -> Path:
        """The directory of the contexts of this model and salt."""
        return self._directory / hashlib.sha256(json.dumps([*self._identity, salt]).encode()).hexdigest()[:32]

    def _longest(self, ids: Tokens, directory: Path, registered: Sequence[Path], without: Collection[Path]) -> Found:
        own = [path for path in entries(directory) if is_artifact_id(path.name)]
        among = [path for path in [*own, *registered] if path not in without]
        tokens = {path: of for path in among if (of := self._tokens_of(path)) is not None}
        shared = {path: num_common(of, ids) for path, of in tokens.items()}
        most = max(shared.values(), default=0)
        for path in sorted(tokens, key=lambda path: -len(tokens[path])):
            if shared[path] == len(tokens[path]) < len(ids) and self._is_possible(path):
                if path in own:
                    with suppress(OSError):
                        os.utime(path)  # for the LRU order of `_keep_to_budget`
                return Found(path, len(tokens[path]), num_shared=most)
        return Found(None, num_shared=most)

    def _tokens_of(self, path: Path) -> Tokens | None:
        """The context's tokens; None if it is unusable or its index is not of the preset that the engine is set to."""
        known = self._examiner.recall(path)
        return known.token_ids if known.spec and self._is_of_preset(known.spec.index_config) else None

    def _is_possible(self, path: Path) -> bool:
        """Whether the budget of loaded contexts is large enough for this one."""
        spec = self._examiner.recall(path).spec
        with suppress(ContextTooLongError):
            return spec is not None and self._residency.require_possible(spec) > 0
        return False

    def _is_of_preset(self, config: IndexConfig) -> bool:
        """Whether an index is of the preset that the engine is set to; any library may have run its k-means."""
        wanted = self._index_config
        if isinstance(wanted, ListConfig) and isinstance(config, ListConfig):
            wanted = replace(wanted, kmeans=config.kmeans)
        return config == wanted

    async def _is_intact(self, path: Path) -> bool:
        """Verify every byte of an artifact, once for all requests. A damaged one is removed."""
        if path in self._checked:
            return True
        if path not in self._verifications:
            verification = self._verifications[path] = asyncio.create_task(asyncio.to_thread(self._verify, path))
            verification.add_done_callback(
                lambda task: self._verifications.pop(path) and (task.cancelled() or task.exception())
            )
        return await asyncio.shield(self._verifications[path])  # if one request is cancelled, it goes on for the others

    def _verify(self, path: Path) -> bool:
        try:
            open_artifact(path, verify="full").close()
        except ArtifactRoomError:  # it could not be mapped, but may be intact
            return False
        except ArtifactError as error:
            _log.warning("%s is removed: %s", path, error)
            self._remove(path)
            return False
        self._checked.add(path)
        return True

    def _begin(self, key: _Key, ids: Tokens) -> _Build:
        """Queue a build: it starts when those before it have ended."""
        if failed := self.backoff.of(key):
            raise _refusal(failed)
        return self.builds.add(key, _Build(), partial(self._build, key, ids))

    async def _build(self, key: _Key, ids: Tokens) -> Path:
        directory, digest = key
        started = time.monotonic()
        _log.info("a context of %s tokens is being built from a prompt", f"{len(ids):,}")
        # a file of this build's own: another service that builds the same context removes its file at another time
        ids_path = directory / f"{_TOKENS_PREFIX}{digest.hex()[:16]}-{secrets.token_hex(4)}.json"
        try:
            await asyncio.to_thread(self._write_tokens, ids_path, ids)
            source = ["--no-sync", "--tokens", str(ids_path)]  # no fsync: every byte is verified when it is found
            result = await self._builder.build(source, directory, lambda *progress: None, nice=0)
        except (CsattnError, OSError) as error:  # OSError: no process could be started
            self.builds.num_failed += 1
            # all clients can see the message, and whoever knows a salt's hash can test guesses of the salt
            why = by_names_in_store(str(error), self._settings.store.path).replace(directory.name, "...")
            refusal = _refusal(self.backoff.add(key, len(ids), why))
            refusal.detail = refusal.message.replace(why, str(error))
            _log.warning("%s", refusal.detail)
            raise refusal from error
        finally:
            with suppress(OSError):
                ids_path.unlink()
        self.backoff.forget(key)
        path = directory / str(result["artifact"])
        self._checked.add(path)
        _log.info("a context of %s tokens was built in %.1f s", f"{len(ids):,}", time.monotonic() - started)
        await self._keep_to_budget(path)
        return path

    def _write_tokens(self, path: Path, ids: Tokens) -> None:
        directory, data = path.parent, json.dumps(ids.tolist())

        def write() -> None:
            with store_errors(f"make {directory}", self._settings.store.path):
                directory.mkdir(parents=True, exist_ok=True)
            path.write_text(data)

        with store_errors(f"write {path}", directory):
            try:
                write()
            except FileNotFoundError:  # another service removed the directory while it was empty
                write()

    async def _keep_to_budget(self, newest: Path) -> None:
        """Remove unused contexts, the least recently used first, until all together are within the budget."""
        sizes = await asyncio.to_thread(self._sizes)
        self._checked &= sizes.keys()
        for path in self._residency.loaded_below(self._directory):
            if path not in sizes:  # removed by another service, but its bytes stay on the disk while mapped
                await self._residency.forget(path)
        self.num_bytes = sum(sizes.values())
        budget = self.budget.find(self.num_bytes)
        for path, num_bytes in sizes.items():
            if self.num_bytes > budget and path != newest and not self._residency.is_used(path):
                await self._residency.forget(path)
                await asyncio.to_thread(self._remove, path)
                self.num_bytes -= num_bytes

    def _remove(self, path: Path) -> None:
        """Remove an artifact, at once for all readers, or an abandoned build, and forget what is known of it."""
        self._checked.discard(path)
        self._examiner.forget(path)
        if path.name.startswith(BUILDING_PREFIX):
            with suppress(ArtifactError):  # it is tried again after the next build
                remove_unfinished(path.parent, path.name.removeprefix(BUILDING_PREFIX))
        else:
            remove_at_once(path)

    def _sizes(self) -> dict[Path, int]:
        """Bytes of the artifacts and abandoned builds of all salts, the least recently used first.

        Also removes what killed services left behind.
        """
        found: list[Path] = []
        directories = salted(self._directory)
        for directory in directories:
            with suppress(OSError):  # removes it only if it is empty: its salt may never come again
                directory.rmdir()
        for path in [path for directory in directories for path in entries(directory)]:
            is_stale = used_at(path) < time.time() - _STALE_S
            is_work = path.name.startswith(BUILDING_PREFIX) and path.suffix != LOCK_SUFFIX
            if is_artifact_id(path.name) or (is_work and is_stale and not is_being_built(path)):
                found.append(path)
            elif path.name.startswith(GONE_PREFIX):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_TOKENS_PREFIX) and is_stale:
                with suppress(OSError):
                    path.unlink()
        return {path: num_bytes_below(path) for path in sorted(found, key=used_at)}


def prefix_len(num_tokens: int) -> int:
    """How many first tokens of a prompt of num_tokens become a context: a multiple of STEP, without LEFT_OUT."""
    return max(0, num_tokens - LEFT_OUT) // STEP * STEP


def num_common(tokens: Tokens, others: Tokens) -> int:
    """How many first tokens two texts have in common."""
    length = min(len(tokens), len(others))
    differ = tokens[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length


def _refusal(failed: FailedBuild) -> ContextNotReadyError:
    tries = "" if failed.num_tries == 1 else f" in {failed.num_tries} tries"
    return ContextNotReadyError(
        f"no context of {failed.num_tokens:,} tokens could be built from the prompt's beginning{tries}: {failed.why}; "
        f"it is not tried again for {failed.retry_in_s:.0f} s",
        retry_after_s=failed.retry_in_s,
    )
