"""The registered contexts of a service: registers them by name, builds them in the background, deletes them."""

import asyncio
import errno
import hashlib
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from csattn.artifact import ArtifactSpec, find_artifact, open_artifact
from csattn.artifact.durable import store_errors, write_bytes
from csattn.artifact.store import remove_unfinished
from csattn.errors import ArtifactError, ConfigError
from csattn.plain_text import as_read
from workers.serving.build_queue import Build, BuildQueue
from workers.serving.context_build import Builder
from workers.serving.context_file import ContextFile, Record
from workers.serving.context_texts import ContextTexts
from workers.serving.examiner import Examination
from workers.serving.messages import (
    CONTEXT_NAME,
    BadRequestError,
    ContextExistsError,
    ContextInfo,
    ContextNotReadyError,
    OverloadedError,
    ServingError,
    StorageUnavailableError,
    UnknownContextError,
    UnknownModelError,
)
from workers.serving.names_in_store import by_names_in_store

TEXTS = "texts"  # directory in the store with the texts of unfinished builds
_TEXT = re.compile(r"[0-9a-f]{32}\.txt|\.[0-9a-f]{32}\.txt\.[0-9a-f]{8}\.partial")  # a text, or one being written
MAX_ENTERING = 2  # texts that are tokenised at the same time: they use the threads in which files are read, too
MAX_WAITING = 64  # texts that wait for that, in memory
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_RETRY_S = 5.0  # retry time when many contexts are being registered
_DISK_S = 30.0  # retry time that clients get when the disk takes nothing

Examine = Callable[[Path], Examination]  # examines the artifact at a path
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Build(Build):
    record: Record
    progress: float = 0.0
    what: str = "waiting for another build"


class Contexts:
    """Registers, builds and deletes contexts. For one event loop.

    The store's file is authoritative, as several services, also of other models, may share a store. Whether this
    service can answer from an artifact is found by examining it.
    """

    def __init__(self, store: Path, builder: Builder, texts: ContextTexts, examine: Examine) -> None:
        self._store, self._builder, self._texts, self._examine = store, builder, texts, examine
        self._file = ContextFile(store)
        self._register_slots, self._num_registering = asyncio.Semaphore(MAX_ENTERING), 0
        self.builds: BuildQueue[str, _Build] = BuildQueue()  # by name
        self._unfinished: dict[str | None, str] = {}  # by hashes of texts, ids of artifacts that were begun here
        self._unwritten: dict[Record, Record] = {}  # results of builds that could not be written

    async def start(self) -> None:
        """Continue builds that were under way when a service ended, and remove texts that a killed one left."""
        with suppress(ArtifactError, OSError):  # a read-only store, say
            await asyncio.to_thread(self._file.change, self._drop_unneeded)
        for record in (await self._records()).values():
            if record.state == "building":
                self._build(record)

    async def infos(self, name: str | None = None) -> list[ContextInfo]:
        """Describe all contexts, or the one of that name."""
        records = [record for record in (await self._records()).values() if name in (None, record.name)]
        faults = await asyncio.to_thread(lambda: [self._fault(record) for record in records])
        return [self._info(record, fault) for record, fault in zip(records, faults, strict=True)]

    async def paths(self) -> list[Path]:
        """The artifacts of all contexts that have one, whether or not this service can answer from it."""
        records = [self._unwritten.get(record, record) for record in (await self._records()).values()]
        return [self._store / record.artifact_id for record in records if record.artifact_id is not None]

    async def artifact_path(self, name: str) -> Path:
        """The artifact of a context. Raises UnknownModelError, or ContextNotReadyError if it has none."""
        record = (await self._records()).get(name)
        if record is None:
            raise UnknownModelError(
                f"there is no context {name[:64]!r}; GET /v1/contexts lists them, POST registers one", "model"
            )
        record = self._unwritten.get(record, record)
        if record.state == "building":
            progress = 100 * self._progress(record)
            raise ContextNotReadyError(
                f"the context {name!r} is still being built ({progress:.0f} %); ask again when it is ready"
            )
        if record.artifact_id is None:
            prefix = f"the context {name!r} could not be built"
            raise ContextNotReadyError(
                f"{prefix}: {self._public_message(record.error)}", detail=f"{prefix}: {record.error}"
            )
        return self._store / record.artifact_id

    async def register(self, name: str, text: str) -> ContextInfo:
        """Start to build a context, unless this text has this name already. One that failed or was lost is built again.

        Raises BadRequestError, before anything is written, for a text that can never be a context, and
        ContextExistsError if the name has another text.
        """
        require_name(name)
        text = as_read(text)  # a text has one digest, whatever its line ends
        if not text.strip():
            raise BadRequestError("the context's text is empty; give some text", "text")
        if self._num_registering >= MAX_ENTERING + MAX_WAITING:
            raise OverloadedError("many contexts are being registered; send this one again later", None, _RETRY_S)
        data = text.encode()
        digest = hashlib.sha256(data).hexdigest()
        self._num_registering += 1
        try:
            async with self._register_slots:
                record = await asyncio.to_thread(self._enter, name, text, data, digest)
        except ArtifactError as error:
            raise self._refusal("registered", error) from error
        finally:
            self._num_registering -= 1
        if record.state == "building":
            if self._build_of(record) is None:
                await self.builds.end(name)  # of another text: another service deleted and registered the name again
            if self.builds.get(name) is None:
                self._build(record)
        return self._info(record, await asyncio.to_thread(self._fault, record))

    async def delete(self, name: str) -> Path | None:
        """Forget a context, cancel its build, and remove what it has made so far unless another context needs it.

        A finished artifact stays in the store; its path is returned.
        """
        try:
            record = await asyncio.to_thread(self._file.change, lambda records: records.pop(name, None))
        except ArtifactError as error:
            raise self._refusal("deleted", error) from error
        if record is None:
            raise UnknownContextError(f"there is no context {name[:64]!r}; GET /v1/contexts lists them", "name")
        await self.builds.end(name)
        is_needed = await asyncio.to_thread(self._drop_text, record)
        if not is_needed and (artifact_id := self._unfinished.pop(record.text_sha256, "")):
            with suppress(ArtifactError):  # `csattn gc` removes it, and says why if it cannot
                await asyncio.to_thread(remove_unfinished, self._store, artifact_id)
        return None if record.artifact_id is None else self._store / record.artifact_id

    async def _records(self) -> dict[str, Record]:
        try:
            return await asyncio.to_thread(self._file.read)
        except ArtifactError as error:
            raise ServingError(self._public_message(str(error)), detail=str(error)) from error

    def _enter(self, name: str, text: str, data: bytes, digest: str) -> Record:
        known = compared = self._file.read().get(name)
        if known is not None:
            self._require_same(known, text, digest)
        is_gone = (
            known is not None
            and known.artifact_id is not None
            and self._examine(self._store / known.artifact_id).is_lost
        )
        if known is not None and known.state != "failed" and not is_gone:
            return known  # nothing to write: the store may be read-only
        self._texts.require(text)

        def edit(records: dict[str, Record]) -> Record:
            known = records.get(name)
            is_still_gone = is_gone and known == compared
            if known is not None and known != compared:  # to tokenise the text takes a while
                self._require_same(known, text, digest)
            if known is None or known.state == "failed" or is_still_gone:
                # the text before the record: a recorded context can always be built. `_drop_text` takes the same lock,
                # so nobody drops the text meanwhile because no record needs it
                text_path = self._text_path(digest)
                with store_errors(f"make {text_path.parent}", self._store):
                    text_path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(text_path, data)
            if known is None:
                known = Record(name=name, created_at=time.time(), text_sha256=digest)
            elif is_still_gone:
                known = replace(known, artifact_id=None, num_tokens=None, text_sha256=digest)
            records[name] = replace(known, error="")
            return records[name]

        try:
            return self._file.change(edit)
        except ArtifactError:
            self._drop_text(Record(name=name, created_at=0.0, text_sha256=digest))
            raise

    def _require_same(self, known: Record, text: str, digest: str) -> None:
        if known.text_sha256 == digest:
            return
        artifact_path = None if known.artifact_id is None else self._store / known.artifact_id
        is_lost = artifact_path is not None and self._examine(artifact_path).is_lost
        if is_lost and known.text_sha256 is None:
            raise ContextExistsError(
                f"the artifact {known.artifact_id} that is named {known.name!r} is missing or damaged, so its text is "
                "unknown; delete it first, or choose another name",
                "name",
            )
        is_same = False
        if artifact_path is not None and not is_lost:
            with open_artifact(artifact_path) as artifact:
                is_same = self._texts.is_of(artifact, text)  # texts that differ in space around them have equal tokens
        if not is_same:
            raise ContextExistsError(
                f"the context {known.name!r} has another text; delete it first, or choose another name", "name"
            )

    def _build(self, record: Record) -> None:
        build = _Build(record)
        self.builds.add(record.name, build, partial(self._run_build, build))
        self._unwritten.pop(record, None)

    def _build_of(self, record: Record) -> _Build | None:
        build = self.builds.get(record.name)
        return build if build is not None and build.record == record else None

    async def _run_build(self, build: _Build) -> None:
        record, started, build.what = build.record, time.monotonic(), "starts"
        _log.info("the context %s is being built", record.name)

        def on_progress(progress: float, what: str, artifact_id: str) -> None:
            build.progress, build.what = progress, what
            self._unfinished[record.text_sha256] = artifact_id

        try:
            assert record.text_sha256 is not None, "what is being built has a text"
            source = ["--context", str(self._text_path(record.text_sha256))]
            result = await self._builder.build(source, self._store, on_progress)
            self._unfinished.pop(record.text_sha256, None)
            done = replace(record, artifact_id=result["artifact"], num_tokens=result["context_len"])
            what, seconds = f"{record.name}, of {result['context_len']:,} tokens,", time.monotonic() - started
            if result["reused"]:
                _log.info("the context %s was in the store already, found in %.1f s", what, seconds)
            else:
                _log.info("the context %s was built in %.1f s", what, seconds)
        except Exception as error:  # whatever it is, requests for the context report it
            if not await self._is_wanted(record):  # so its text is gone, too
                _log.info("the context %s has been built, deleted or replaced by another service", record.name)
                return
            self.builds.num_failed += 1
            done = replace(record, error=str(error) or type(error).__name__)
            _log.warning("the context %s could not be built: %s", record.name, done.error)
        try:
            await asyncio.to_thread(self._finish, record, done)
        except Exception as error:  # a full disk, say: the result is known as long as this service lives
            trace = None if isinstance(error, ArtifactError | OSError) else error
            why = "the result of building the context %s could not be written: %s"
            _log.warning(why, record.name, error, exc_info=trace)
            self._unwritten[record] = done

    async def _is_wanted(self, record: Record) -> bool:
        with suppress(ServingError):
            return (await self._records()).get(record.name) == record
        return True

    def _finish(self, record: Record, done: Record) -> None:
        def edit(records: dict[str, Record]) -> None:
            if records.get(record.name) == record:  # not deleted meanwhile
                records[record.name] = done

        self._file.change(edit)
        if done.state == "ready":
            self._drop_text(record)

    def _drop_text(self, record: Record) -> bool:
        """Remove the record's text, unless a build still needs it; return whether one does."""

        def edit(records: dict[str, Record]) -> bool:
            is_needed = record.text_sha256 in _needed(records)
            if record.text_sha256 is not None and not is_needed:
                self._text_path(record.text_sha256).unlink(missing_ok=True)
            return is_needed

        return self._file.change(edit)

    def _drop_unneeded(self, records: dict[str, Record]) -> None:
        """Remove all texts, also half-written ones, that no build needs."""
        needed = {self._text_path(digest).name for digest in _needed(records)}
        for path in (self._store / TEXTS).iterdir():
            if _TEXT.fullmatch(path.name) and path.name not in needed:
                path.unlink(missing_ok=True)

    def _text_path(self, digest: str) -> Path:
        return self._store / TEXTS / f"{digest[:32]}.txt"

    def _fault(self, record: Record) -> str:
        """Why this service cannot answer from the record's artifact, and what a client can do; empty if it can answer,
        or if there is no artifact yet."""
        if record.artifact_id is None or not (found := self._examine(self._store / record.artifact_id)).fault:
            return ""
        remedy = "only the service's operator can mend that"
        if found.is_lost and record.text_sha256 is not None:
            remedy = "send its text again with POST /v1/contexts, and it is built again"
        elif found.is_lost:  # `register` would refuse any text, because it may not be the same
            remedy = f"DELETE /v1/contexts/{record.name}, then POST /v1/contexts builds one of that name from a text"
        return f"{found.fault.partition('; ')[0]}; {remedy}"  # without the remedies of the command line

    def _progress(self, record: Record) -> float:
        build = self._build_of(record)
        return 1.0 if record.state == "ready" else build.progress if build else 0.0

    def _info(self, record: Record, fault: str) -> ContextInfo:
        record = self._unwritten.get(record, record)
        build = self._build_of(record)
        return ContextInfo(
            name=record.name,
            state="failed" if fault else record.state,
            artifact_id=record.artifact_id,
            num_tokens=record.num_tokens,
            created_at=record.created_at,
            progress=self._progress(record),
            what=self._public_message(record.error or fault or (build.what if build else "")),
        )

    def _refusal(self, done: str, error: ArtifactError) -> ServingError:
        """The error for the client. If the disk is full or read-only, say, it says no more than that."""
        prefix = f"the context cannot be {done}"
        if not (isinstance(cause := error.__cause__, OSError) and cause.errno in _UNWRITTEN):
            return ServingError(f"{prefix}: {self._public_message(str(error))}", detail=f"{prefix}: {error}")
        why = (
            f"{prefix}: the service's store cannot be written ({cause.strerror}); send it again once the service's "
            "operator has corrected that"
        )
        return StorageUnavailableError(why, None, _DISK_S, f"{prefix}: {error}")

    def _public_message(self, why: str) -> str:
        """A message for clients, with the names of files relative to the store."""
        return by_names_in_store(why, self._store)


def _needed(records: dict[str, Record]) -> set[str]:
    """The hashes of texts that are built, or may be built again."""
    return {of.text_sha256 for of in records.values() if of.state != "ready" and of.text_sha256 is not None}


def name_artifact(store: Path, name: str, artifact_id: str, dtype: str) -> None:
    """Give a name to an artifact of the store. The same name for the same artifact again changes nothing, and needs no
    store that can be written.

    Raises as `record_of` does, and ArtifactError or StoreFullError for a new name that cannot be written.
    """
    new = record_of(store, name, artifact_id, dtype)
    known = ContextFile(store).read().get(name)
    if known is not None and known.artifact_id == new.artifact_id:
        return

    def edit(records: dict[str, Record]) -> None:
        _require_free(records, new)
        records.setdefault(name, new)

    ContextFile(store).change(edit)


def record_of(store: Path, name: str, artifact_id: str, dtype: str) -> Record:
    """What `csattn serve --context name=artifact_id` would record. artifact_id: an id, a prefix of one, or a path.

    Raises ConfigError if the artifact does not have the dtype of the service's model, ContextExistsError if another
    has the name. It is not checked here that the service's model built the artifact.
    """
    require_name(name)
    spec = spec_named(store, artifact_id)
    if spec.kv_dtype != dtype:
        raise ConfigError(
            f"the context {name!r} was built in {spec.kv_dtype} and the service loads its model in {dtype}; start it "
            f"with --set build.dtype={spec.kv_dtype}, or build the context again with --dtype {dtype}"
        )

    new = Record(name=name, created_at=time.time(), artifact_id=spec.artifact_id, num_tokens=spec.context_len)
    _require_free(ContextFile(store).read(), new)
    return new


def spec_named(store: Path, artifact_id: str) -> ArtifactSpec:
    """The spec of an artifact of the store. artifact_id: an id, a prefix of one, or a path."""
    path = Path(artifact_id)
    prefix = path.name if path.parent.resolve() == store.resolve() else artifact_id
    with open_artifact(find_artifact(store, prefix)) as artifact:
        return artifact.spec


def _require_free(records: dict[str, Record], new: Record) -> None:
    known = records.get(new.name)
    if known is not None and known.artifact_id != new.artifact_id:
        raise ContextExistsError(
            f"the context {new.name!r} is {known.artifact_id or 'still being built'}, not {new.artifact_id}; delete "
            "it first, or choose another name"
        )


def require_name(name: str) -> None:
    if not CONTEXT_NAME.fullmatch(name):
        raise BadRequestError(
            "a context's name has up to 64 letters from a to z and A to Z, digits, dots, underscores and hyphens, and "
            f"begins with a letter or a digit, got {name[:64]!r}",
            "name",
        )
