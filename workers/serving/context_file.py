"""Which contexts there are, in a small file of the store: a service that starts again has them again."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from csattn.artifact.durable import store_errors, write_bytes
from csattn.artifact.lock import BuildLock
from csattn.errors import ArtifactCorruptError
from workers.serving.messages import ContextState

FILE_NAME, LOCK_NAME = "contexts.json", ".contexts.lock"
_VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A name and what it stands for."""

    name: str
    created_at: float  # seconds since the epoch
    text_sha256: str | None = None  # of the text it is built from; None where it was named after an artifact
    artifact_id: str | None = None
    num_tokens: int | None = None
    error: str = ""  # why its building failed

    @property
    def state(self) -> ContextState:
        if self.error:
            return "failed"
        return "building" if self.artifact_id is None else "ready"


class ContextFile:
    """Changes are whole or not made at all, also where several processes make them."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._path = store / FILE_NAME

    def read(self) -> dict[str, Record]:
        """By name, in the order of registration."""
        with store_errors(f"read {self._path}", self._store):
            try:
                text = self._path.read_bytes()
            except FileNotFoundError:
                return {}
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise ValueError(f"it is of version {data['version']!r}, this csattn reads version {_VERSION}")
            return {item["name"]: Record(**item) for item in data["contexts"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactCorruptError(
                f"{self._path} cannot be read ({error}); move it away and name the contexts again: their artifacts "
                "are untouched"
            ) from error

    def change(self, edit: Callable[[dict[str, Record]], T]) -> T:
        """Let `edit` change the records, and write them if it did."""
        with store_errors(f"make the store {self._store}", self._store):
            self._store.mkdir(parents=True, exist_ok=True)
        lock = BuildLock(self._store / LOCK_NAME).acquire()
        try:
            records = self.read()
            before = dict(records)
            result = edit(records)
            if list(records.items()) != list(before.items()):
                document = {"version": _VERSION, "contexts": [asdict(record) for record in records.values()]}
                write_bytes(self._path, json.dumps(document, indent=1).encode() + b"\n")
            return result
        finally:
            lock.release()
