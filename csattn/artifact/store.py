"""A store: a directory of artifacts, each under its id."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from csattn.artifact.directories import BUILDING_PREFIX, LOCK_SUFFIX, lock_of, remove
from csattn.artifact.durable import store_errors
from csattn.artifact.find import is_artifact_id, store_entries
from csattn.artifact.manifest import Manifest
from csattn.artifact.places import is_url, local_path
from csattn.artifact.reader import open_artifact
from csattn.errors import ArtifactError, ConfigError

_WORK = re.compile(rf"({re.escape(BUILDING_PREFIX)}[0-9a-f]{{16}})({re.escape(LOCK_SUFFIX)})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSummary:
    """One line of a store's listing."""

    artifact_id: str
    path: Path | str  # str: a URL
    model_name: str
    context_len: int
    layout: str  # of the index
    kv_dtype: str
    weights: str | None  # see `Manifest.weights`
    size_bytes: int
    source: str | None  # the text's name, if the builder noted it

    @classmethod
    def of(cls, path: Path | str, manifest: Manifest) -> Self:
        spec = manifest.spec
        return cls(
            artifact_id=spec.artifact_id,
            path=path,
            model_name=spec.model_name,
            context_len=spec.context_len,
            layout=spec.index_config.layout,
            kv_dtype=spec.kv_dtype,
            weights=manifest.weights,
            size_bytes=manifest.size_bytes,
            source=manifest.source,
        )


def unfinished_builds(store: Path | str) -> list[Path]:
    """Return the work directories of builds that have not published: they run, or were interrupted and can resume."""
    store = _directory(store)
    names = {match[1] for name in store_entries(store) if (match := _WORK.fullmatch(name))}
    return [store / name for name in sorted(names)]


def is_being_built(work: Path) -> bool:
    """Whether a process holds the lock of one of the `unfinished_builds`."""
    return lock_of(work).is_held()


def collect_garbage(store: Path | str) -> list[Path]:
    """Remove the work directories of interrupted builds, and return them. These builds can no longer be resumed.

    A running build keeps its directory.
    """
    return [work for work in unfinished_builds(store) if _remove_unless_held(work)]


def remove_unfinished(store: Path, artifact_id: str) -> None:
    """Remove the work directory of an interrupted build, if there is one. A running build keeps its directory."""
    if (work := store / f"{BUILDING_PREFIX}{artifact_id}") in unfinished_builds(store):
        _remove_unless_held(work)


def _remove_unless_held(work: Path) -> bool:
    lock = lock_of(work)
    if not lock.try_acquire():
        return False
    with lock, store_errors(f"remove {work}", work.parent):
        remove(work)
    return True


def scan_store(store: Path | str) -> tuple[list[ArtifactSummary], dict[Path, ArtifactError]]:
    """Return the finished artifacts of a store on this machine that pass the cheap checks, sorted by id.

    Also returns the error of each directory named like an artifact that fails them.
    """
    store = _directory(store)
    summaries: list[ArtifactSummary] = []
    broken: dict[Path, ArtifactError] = {}
    for path in (store / name for name in store_entries(store) if is_artifact_id(name)):
        try:
            with open_artifact(path) as artifact:
                summaries.append(ArtifactSummary.of(path, artifact.manifest))
        except ArtifactError as error:
            broken[path] = error
    return summaries, broken


def _directory(store: Path | str) -> Path:
    """Return the path of a store on this machine. Raises ConfigError for a URL, or what is no path."""
    if is_url(store):
        raise ConfigError(f"the store {store} is behind a URL: `csattn.artifact.remote_store` has what it holds")
    return local_path(store)
