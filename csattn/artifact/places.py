"""Open artifacts and stores at a place: a path on this machine, or a URL (see `remote.py`)."""

import os
from pathlib import Path
from typing import Literal

from csattn.artifact import reader
from csattn.artifact.find import resolve_artifact
from csattn.artifact.manifest import Manifest
from csattn.artifact.reader import Artifact, Progress
from csattn.artifact.remote import RemoteStore
from csattn.errors import ArtifactError, ConfigError


def is_url(place: Path | str) -> bool:
    """Whether a place is a URL, not a path."""
    return isinstance(place, str) and "://" in place


def may_be_path(text: str) -> bool:
    """Whether the system accepts the text as a path at all."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate that encodes no byte
        return False


def local_path(place: object) -> Path:
    """Return the path of a directory, with `~` expanded. Raises ConfigError for an empty path, or what is none."""
    if not isinstance(place, str | Path) or not str(place).strip() or not may_be_path(str(place)):
        raise ConfigError(f"a store or an artifact is a directory or a URL, got {place!r}; give its path")
    return Path(os.path.expanduser(place))


def remote_store(place: Path | str) -> RemoteStore | None:
    """Return the store at a URL; None for a directory."""
    return RemoteStore(str(place)) if is_url(place) else None


def open_artifact(
    place: Path | str, *, verify: Literal["size", "full"] = "size", progress: Progress | None = None
) -> Artifact:
    """Open the artifact at a path or URL, which may be `<store>/<prefix of the id>`.

    An artifact at a URL is opened as a copy on this machine, every byte of which was checked when it was downloaded.
    Always checked: the manifest's own hash, the set of files, their sizes, headers and shapes, the token ids.
    With verify="full" every byte is hashed and every index is checked as well. Raises ArtifactError.
    """
    path = fetch_artifact(place)
    try:
        return reader.open_artifact(path, verify=verify, progress=progress)
    except ArtifactError:
        if not is_url(place) or path.exists():
            raise
        # another process has evicted the copy
        return reader.open_artifact(fetch_artifact(place), verify=verify, progress=progress)


def fetch_artifact(place: Path | str) -> Path:
    """Return the artifact's directory; for a URL, that of a verified copy, downloaded if necessary."""
    if not is_url(place):
        return resolve_artifact(local_path(place))
    remote, artifact_id = _locate(place)
    return remote.fetch(artifact_id)


def read_manifest(place: Path | str) -> Manifest:
    """Return the manifest of the artifact at a place. From a URL, nothing else is downloaded."""
    if not is_url(place):
        with reader.open_artifact(local_path(place)) as artifact:
            return artifact.manifest
    remote, artifact_id = _locate(place)
    return remote.manifest(artifact_id)


def verify_artifact(place: Path | str, progress: Progress | None = None) -> Manifest:
    """Hash every file in place and compare it with the manifest. Raises ArtifactError at the first that differs."""
    if not is_url(place):
        with reader.open_artifact(local_path(place), verify="full", progress=progress) as artifact:
            return artifact.manifest
    remote, artifact_id = _locate(place)
    return remote.verify(artifact_id, progress)


def _locate(place: Path | str) -> tuple[RemoteStore, str]:
    """Return the store and the artifact's id of a URL."""
    url, _, prefix = str(place).rstrip("/").rpartition("/")
    remote = RemoteStore(url)
    return remote, remote.resolve(prefix)
