"""The registered contexts, in a small file of the store, from which a restarted service recovers them."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from csattn.artifact.durable import make_store, store_errors, write_bytes
from csattn.artifact.find import is_artifact_id
from csattn.artifact.lock import BuildLock
from csattn.errors import ArtifactCorruptError
from workers.serving.messages import CONTEXT_NAME, ContextState

FILE_NAME, LOCK_NAME = "contexts.json", ".contexts.lock"
_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SHOWN = 200  # characters of a parser's message
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A registered context."""

    name: str
    created_at: float  # seconds since the epoch
    text_sha256: str | None = None  # of the text it is built from; None if the name was given to an artifact
    artifact_id: str | None = None
    num_tokens: int | None = None
    error: str = ""  # why its build failed

    @property
    def state(self) -> ContextState:
        if self.error:
            return "failed"
        return "building" if self.artifact_id is None else "ready"


class ContextFile:
    """The file of records. Changes are atomic, also between processes."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._path = store / FILE_NAME

    def read(self) -> dict[str, Record]:
        """Return the records by name, in the order of registration. Raises ArtifactCorruptError for a bad file."""
        with store_errors(f"read {self._path}", self._store):
            try:
                text = self._path.read_bytes()
            except FileNotFoundError:
                return {}
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise ValueError(f"it is of version {data['version']!r}, this csattn reads version {_VERSION}")
            return {item["name"]: _record(item) for item in data["contexts"]}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ArtifactCorruptError(
                f"{self._path} cannot be read ({str(error)[:_MAX_SHOWN]}); move it away and register the contexts "
                "again: their artifacts are untouched"
            ) from error

    def change(self, edit: Callable[[dict[str, Record]], T]) -> T:
        """Let `edit` change the records, under a lock, and write them if it did; returns its result."""
        make_store(self._store)
        with BuildLock(self._store / LOCK_NAME).acquire():
            records = self.read()
            before = dict(records)
            result = edit(records)
            if list(records.items()) != list(before.items()):
                document = {"version": _VERSION, "contexts": [asdict(record) for record in records.values()]}
                write_bytes(self._path, json.dumps(document, indent=1).encode() + b"\n")
            return result


def _record(item: dict[str, Any]) -> Record:
    """Parse and validate a record: paths are made from its id and hash, and the store may come from somebody else."""
    record = Record(**item)
    is_ours = (
        CONTEXT_NAME.fullmatch(record.name)
        and (record.artifact_id is None or is_artifact_id(record.artifact_id))
        and (record.text_sha256 is None or _SHA256.fullmatch(record.text_sha256))
        and (record.num_tokens is None or (type(record.num_tokens) is int and record.num_tokens >= 0))
        and type(record.created_at) in (int, float)
        and math.isfinite(record.created_at)
        and isinstance(record.error, str)
        and record.error == record.error.encode(errors="replace").decode()
    )
    if not is_ours:
        raise ValueError(f"no service writes {record}")
    return record
