"""Stores at URLs that fsspec can read, such as s3:// or memory://, and the verified copies on this machine.

Copies are in `$CSATTN_CACHE/artifacts` (default: ~/.cache/csattn/artifacts), which is a store like any other. A copy is
hashed during the download and appears when it is whole. The manifest is uploaded last: without it, an artifact does not
exist.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from csattn.artifact.directories import (
    BUILDING_PREFIX,
    lock_of,
    num_bytes_below,
    remove,
    remove_artifact,
    remove_except,
    used_at,
)
from csattn.artifact.durable import FileRecord, NewFile, fsync_dir, new_file, require_space, store_errors, write_bytes
from csattn.artifact.find import choose_artifact, is_artifact_id, store_entries
from csattn.artifact.layout import MANIFEST_FILE, MANIFEST_HASH_FILE
from csattn.artifact.manifest import Manifest
from csattn.artifact.reader import Progress, has_hash, is_whole, open_artifact, parse_manifest
from csattn.artifact.tensor_file import repair_advice
from csattn.cache import cache_dir
from csattn.errors import ArtifactCorruptError, ArtifactError, ArtifactNotFoundError

_CHUNK_BYTES = 4 * 2**20
_POLL_S, _PATIENCE_S = 1.0, 600.0  # while another machine uploads the same artifact


def cache_store() -> Path:
    """Return the store of copies. Builds for a remote store run here."""
    return cache_dir() / "artifacts"


class RemoteStore:
    """A store at a URL."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        if "://" not in self.url:  # fsspec would take it for a local directory
            raise ArtifactError(f"the store {url} names no place; give a bucket or a directory after the ://")
        with _remote_errors(f"connect to the store {self.url}"):
            try:
                self._fs, self._root = fsspec.core.url_to_fs(self.url)
            except (ValueError, ImportError) as error:
                raise ArtifactError(f"cannot use the store {url}: {error}; give a directory or another URL") from error

    def artifact_ids(self) -> list[str]:
        """Return the ids of completely uploaded artifacts, ascending."""
        with _remote_errors(f"list the store {self.url}"):
            self._fs.invalidate_cache()
            found = self._fs.ls(self._root, detail=False) if self._fs.isdir(self._root) else []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return sorted(name for name in names if is_artifact_id(name) and self.holds(name))

    def holds(self, artifact_id: str) -> bool:
        """Whether the artifact was uploaded completely."""
        with _remote_errors(f"look into the store {self.url}"):
            return bool(self._fs.exists(self._file(artifact_id, MANIFEST_FILE)))

    def resolve(self, prefix: str) -> str:
        """Return the id of the only artifact with this prefix; a whole id is not looked up."""
        return prefix if is_artifact_id(prefix) else choose_artifact(self.artifact_ids(), self.url, prefix)

    def manifests(self) -> tuple[dict[str, Manifest], dict[str, ArtifactError]]:
        """Return the manifest of each artifact, and the error for each damaged manifest, by id."""
        manifests, broken = dict[str, Manifest](), dict[str, ArtifactError]()
        for artifact_id in self.artifact_ids():
            try:
                manifests[artifact_id] = self.manifest(artifact_id)
            except ArtifactError as error:
                broken[artifact_id] = error
        return manifests, broken

    def manifest(self, artifact_id: str) -> Manifest:
        """Return the artifact's manifest. Raises ArtifactError if it does not exist or is damaged."""
        return self._manifest(artifact_id)[0]

    def verify(self, artifact_id: str, progress: Progress | None = None) -> Manifest:
        """Download and hash every file, without storing it. Raises ArtifactCorruptError for one that differs."""
        manifest, done_bytes = self.manifest(artifact_id), 0
        with open(os.devnull, "wb", buffering=0) as nowhere:
            for name, record in manifest.files.items():
                self._read(artifact_id, name, record, NewFile(nowhere.fileno()))
                done_bytes += record.size_bytes
                if progress is not None:
                    progress(done_bytes, manifest.size_bytes)
        return manifest

    def fetch(self, artifact_id: str) -> Path:
        """Return the directory of a whole copy of the artifact; download what is missing. A second caller waits."""
        cache = cache_store()
        target = cache / artifact_id
        if _is_here(target):
            return target
        with store_errors(f"make the cache {cache}", cache):
            cache.mkdir(parents=True, exist_ok=True)
        with lock_of(cache / f"{BUILDING_PREFIX}{artifact_id}").acquire():
            if not _is_here(target):
                self._download(artifact_id, cache, target)
        return target

    def upload(self, path: Path) -> None:
        """Upload a finished artifact, unless the store has it; the manifest last.

        Another machine's files for the same id may have other bytes (prefill on a CPU depends on the number of
        threads), so they must not mix: the machine that began last goes on, and the others wait for it.
        """
        if self.holds(path.name):
            return
        with open_artifact(path) as artifact:
            files = {name: record.size_bytes for name, record in artifact.manifest.files.items()}
        files |= {name: (path / name).stat().st_size for name in (MANIFEST_HASH_FILE, MANIFEST_FILE)}
        with _remote_errors(f"upload {path} to {self.url}"):
            self._fs.makedirs(f"{self._root}/{path.name}", exist_ok=True)
            while not self._put(path, files):
                self._await_other(path.name)

    def remove(self, artifact_id: str) -> None:
        """Remove an artifact and the copy on this machine. The manifest goes first, so nobody finds half of it."""
        with _remote_errors(f"remove {self.url}/{artifact_id}"):
            self._fs.rm_file(self._file(artifact_id, MANIFEST_FILE))
            self._fs.rm(f"{self._root}/{artifact_id}", recursive=True)
        remove_artifact(cache_store() / artifact_id)

    def _put(self, path: Path, files: Mapping[str, int]) -> bool:
        """Upload files of these sizes, the manifest last; false if another machine has begun to upload its own."""
        claim, claimed = f"{self._root}/.uploading-{path.name}", secrets.token_bytes(8)
        self._fs.pipe_file(claim, claimed)
        arrived = dict[str, Any]()

        def is_ours() -> bool:
            with suppress(FileNotFoundError):
                return bool(self._fs.cat_file(claim) == claimed)
            return False

        def put(name: str) -> bool:
            if not is_ours():
                return False
            place = self._file(path.name, name)
            try:
                self._fs.put_file(str(path / name), place)
                arrived[name] = self._fs.info(place)
                if (size_bytes := arrived[name]["size"]) != files[name]:
                    raise OSError(f"{size_bytes} of {files[name]} bytes of {name} arrived")
            except BaseException:
                with suppress(Exception):  # half a manifest would pass for that of a whole artifact
                    if is_ours():
                        self._fs.rm_file(place)
                raise
            return True

        # looked up after the claim: so a machine that has just finished cannot remove a claim that is still in use
        if not self.holds(path.name):
            parts = [name for name in files if name != MANIFEST_FILE]
            if not all(map(put, parts)):
                return False
            # a file that the other machine was uploading as this one began
            late = [name for name in parts if self._fs.info(self._file(path.name, name)) != arrived[name]]
            if not all(map(put, [*late, MANIFEST_FILE])):
                return False
        with suppress(Exception):  # left there it does no harm, and who may write may not always delete
            if is_ours():
                self._fs.rm_file(claim)
        return True

    def _await_other(self, artifact_id: str) -> None:
        """Wait until the store has the artifact, or until nothing has arrived for _PATIENCE_S."""
        seen, since = None, time.monotonic()
        while not self.holds(artifact_id) and time.monotonic() - since < _PATIENCE_S:
            time.sleep(_POLL_S)
            self._fs.invalidate_cache()
            if (now := self._fs.ls(f"{self._root}/{artifact_id}", detail=True)) != seen:
                seen, since = now, time.monotonic()

    def _download(self, artifact_id: str, cache: Path, target: Path) -> None:
        manifest, manifest_bytes, hash_line = self._manifest(artifact_id)
        work = cache / f"{BUILDING_PREFIX}{artifact_id}"
        parts = work / "download"
        with store_errors(f"download into {work}", cache):
            parts.mkdir(parents=True, exist_ok=True)
            remove_except(parts, set(manifest.files))  # a killed download leaves half a file
        missing = {name: of for name, of in manifest.files.items() if not has_hash(parts / name, of.sha256)}
        needed_bytes = sum(record.size_bytes for record in missing.values())
        require_space(cache, needed_bytes, "the download", "another cache with CSATTN_CACHE")
        for name, record in missing.items():
            with new_file(parts / name, record.size_bytes) as file:
                self._read(artifact_id, name, record, file)
        write_bytes(parts / MANIFEST_HASH_FILE, hash_line)
        write_bytes(parts / MANIFEST_FILE, manifest_bytes)
        with store_errors(f"publish {target}", cache):
            remove(target)  # not a good copy, or we would not be here
            os.rename(parts, target)
            fsync_dir(cache)
        shutil.rmtree(work, ignore_errors=True)

    def _read(self, artifact_id: str, name: str, record: FileRecord, file: NewFile) -> None:
        """Copy a file. Raises ArtifactCorruptError if its size or hash is not that of its record."""
        action = f"read {self.url}/{artifact_id}/{name}"
        with _remote_errors(action), self._fs.open(self._file(artifact_id, name), "rb") as source:
            while file.size_bytes <= record.size_bytes and (chunk := source.read(_CHUNK_BYTES)):
                file.write(chunk)
        if file.record != record:
            raise ArtifactCorruptError(
                f"{self.url}/{artifact_id}/{name} is not what its manifest says: it is truncated or altered; "
                f"{repair_advice(f'{self.url}/{artifact_id}')}"
            )

    def _manifest(self, artifact_id: str) -> tuple[Manifest, bytes, bytes]:
        """Return the manifest, its bytes, and the line with its hash."""
        place = f"{self.url}/{artifact_id}"
        with _remote_errors(f"read {place}"):
            if not self._fs.exists(self._file(artifact_id, MANIFEST_FILE)):
                raise ArtifactNotFoundError(
                    f"{place} holds no finished artifact; `csattn ls --store {self.url}` lists those that are there"
                )
            data = bytes(self._fs.cat_file(self._file(artifact_id, MANIFEST_FILE)))
            hash_line = bytes(self._fs.cat_file(self._file(artifact_id, MANIFEST_HASH_FILE)))
        manifest = parse_manifest(place, data, hash_line, repair_advice(place))
        if manifest.spec.artifact_id != artifact_id:
            raise ArtifactCorruptError(f"{place} holds the artifact {manifest.spec.artifact_id}; delete it")
        return manifest, data, hash_line

    def _file(self, artifact_id: str, name: str) -> str:
        return f"{self._root}/{artifact_id}/{name}"


def shrink_cache(max_bytes: int) -> list[Path]:
    """Evict the least recently used copies until the others take at most max_bytes; return what was removed."""
    cache = cache_store()
    with store_errors(f"look through the cache {cache}", cache):
        copies = [path for name in store_entries(cache) if is_artifact_id(name) and (path := cache / name).is_dir()]
        used = sorted(copies, key=used_at, reverse=True)
    removed, left_bytes = [], 0
    for path in used:
        left_bytes += (num_bytes := num_bytes_below(path))
        if left_bytes > max_bytes and remove_artifact(path):
            left_bytes -= num_bytes
            removed.append(path)
    return removed


def _is_here(path: Path) -> bool:
    """Whether a whole copy is there; if so, mark it as used now."""
    if not is_whole(path):
        return False
    with suppress(OSError):  # a read-only cache
        os.utime(path)
    return True


@contextmanager
def _remote_errors(action: str) -> Iterator[None]:
    """Turn any exception of a remote file system into an ArtifactError with a sentence. action: what was tried."""
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:
        cause: Any = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ArtifactError(f"cannot {action}: {cause[0]}; check the URL, the network and your credentials") from error
