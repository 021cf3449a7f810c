"""Stores at a URL: partial uploads are not seen, damaged files not cached, and one download serves all readers."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from csattn.artifact import (
    RemoteStore,
    cache_store,
    durable,
    fetch_artifact,
    open_artifact,
    read_manifest,
    reader,
    scan_store,
    shrink_cache,
    verify_artifact,
)
from csattn.artifact.directories import used_at
from csattn.artifact.layout import index_file, kv_file
from csattn.errors import ArtifactCorruptError, ArtifactError, ArtifactNotFoundError, StoreFullError
from tests.artifact import synthetic
from tests.artifact.faults import SYSTEM_CALLS, before_call, exit_status, fork, kill_self
from tests.artifact.synthetic import build, make_layer, make_spec

SPEC = make_spec()
ID = SPEC.artifact_id


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "cache"))
    return cache_store()


@pytest.fixture(params=["memory", "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteStore]:
    """An empty store."""
    yield RemoteStore(f"memory://{tmp_path}/store" if request.param == "memory" else f"file://{tmp_path}/remote")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def uploaded(remote: RemoteStore, tmp_path: Path) -> RemoteStore:
    remote.upload(build(tmp_path / "local", SPEC))
    return remote


def change(remote: RemoteStore, name: str, alter: Callable[[bytes], bytes]) -> None:
    """Alter a file of the uploaded artifact in place."""
    fs, path = fsspec.core.url_to_fs(f"{remote.url}/{ID}/{name}")
    fs.pipe_file(path, alter(fs.cat_file(path)))


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def test_copies_are_not_kept_in_the_working_directory_if_the_cache_variable_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_store() == tmp_path / ".cache" / "csattn" / "artifacts"


def test_an_uploaded_artifact_is_downloaded_unchanged(uploaded: RemoteStore, cache: Path, tmp_path: Path) -> None:
    assert uploaded.artifact_ids() == [ID]
    with open_artifact(f"{uploaded.url}/{ID[:5]}", verify="full") as artifact:
        assert artifact.path == cache / ID
        assert artifact.manifest == read_manifest(tmp_path / "local" / ID) == read_manifest(f"{uploaded.url}/{ID}")
        assert torch.equal(artifact.layer_kv(1), make_layer(SPEC, 1)[0])
    assert verify_artifact(f"{uploaded.url}/{ID}").spec == SPEC
    assert [path.name for path in cache.iterdir()] == [ID]
    assert [summary.artifact_id for summary in scan_store(cache)[0]] == [ID]


def test_concurrent_readers_share_one_download(
    uploaded: RemoteStore, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[str] = []
    download = RemoteStore._download
    monkeypatch.setattr(RemoteStore, "_download", lambda *given: [downloads.append(given[1]), download(*given)])
    places: list[Path] = []
    url = f"{uploaded.url}/{ID}"
    threads = [threading.Thread(target=lambda: places.append(fetch_artifact(url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert places == [cache / ID] * 8
    assert downloads == [ID]
    assert [path.name for path in cache.iterdir()] == [ID]


def test_an_incomplete_upload_is_not_listed_or_opened(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = build(tmp_path / "local", SPEC)
    put_file = type(remote._fs).put_file
    names = [*read_manifest(local).files, "manifest.sha256", "manifest.json"]
    for number in range(len(names)):
        sent: list[str] = []

        def fail(fs: object, source: str, target: str, last: int = number, sent: list[str] = sent, **more: object):
            if len(sent) == last:
                raise ConnectionError("the line is dead")
            sent.append(target.rpartition("/")[2])
            return put_file(fs, source, target, **more)

        with monkeypatch.context() as patch:
            patch.setattr(type(remote._fs), "put_file", fail)
            with pytest.raises(ArtifactError, match=r"cannot upload .*: the line is dead; check the URL"):
                remote.upload(local)
        assert sent == names[:number]
        assert remote.artifact_ids() == []
        with pytest.raises(ArtifactNotFoundError, match="holds no finished artifact"):
            open_artifact(f"{remote.url}/{ID}")
    remote.upload(local)
    assert verify_artifact(f"{remote.url}/{ID}").spec == SPEC


def test_half_a_manifest_does_not_pass_for_an_artifact(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, put_file = build(tmp_path / "local", SPEC), type(remote._fs).put_file

    def fill(fs: Any, source: str, target: str, **more: object) -> None:
        put_file(fs, source, target, **more)
        if target.endswith("manifest.json"):
            fs.pipe_file(target, b"{")
            raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(type(remote._fs), "put_file", fill)
        with pytest.raises(ArtifactError, match="the disk is full"):
            remote.upload(local)
    assert not remote.holds(ID)
    remote.upload(local)
    assert verify_artifact(f"{remote.url}/{ID}").spec == SPEC


@pytest.mark.parametrize(("at", "ahead"), [(0, 0), (1, 3), (1, 1), (3, 1), (6, 0)])
def test_files_of_two_machines_that_upload_at_once_do_not_mix(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, ahead: int
) -> None:
    """The other begins while a file is under way, which arrives after the other has uploaded `ahead` of its own."""
    local = build(tmp_path / "local", SPEC)
    monkeypatch.setattr(synthetic, "make_layer", lambda spec, i: (2 * make_layer(spec, i)[0], make_layer(spec, i)[1]))
    other = build(tmp_path / "other", SPEC)
    assert (local / kv_file(0)).read_bytes() != (other / kv_file(0)).read_bytes()
    put_file, num_put = type(remote._fs).put_file, {local: 0, other: 0}
    is_ahead, has_arrived = threading.Event(), threading.Event()
    machine = threading.Thread(target=RemoteStore(remote.url).upload, args=(other,))

    def put(fs: object, source: str, target: str, **more: object) -> None:
        path = Path(source).parent
        is_late, is_other = path == local and num_put[local] == at, path == other
        if is_late:
            machine.start()
            assert is_ahead.wait(60)
        if is_other and num_put[other] == ahead:
            is_ahead.set()
            assert has_arrived.wait(60)
        num_put[path] += 1
        put_file(fs, source, target, **more)
        if is_late:
            has_arrived.set()

    monkeypatch.setattr(type(remote._fs), "put_file", put)
    monkeypatch.setattr("csattn.artifact.remote._POLL_S", 0.01)
    remote.upload(local)
    machine.join()
    assert verify_artifact(f"{remote.url}/{ID}").files == read_manifest(other).files
    assert len(remote._fs.ls(remote._root)) == 1, "nothing but the artifact is left"


def test_an_upload_goes_on_after_another_machine_began_one_and_died(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, put_file, others = build(tmp_path / "local", SPEC), type(remote._fs).put_file, [b"claim"]

    def put(fs: Any, source: str, target: str, **more: object) -> None:
        put_file(fs, source, target, **more)
        if others:
            fs.pipe_file(f"{remote._root}/.uploading-{ID}", others.pop())

    monkeypatch.setattr(type(remote._fs), "put_file", put)
    monkeypatch.setattr("csattn.artifact.remote._POLL_S", 0.01)
    monkeypatch.setattr("csattn.artifact.remote._PATIENCE_S", 0.05)
    remote.upload(local)
    assert not others and verify_artifact(f"{remote.url}/{ID}").spec == SPEC


@pytest.mark.parametrize("name", ["tokens.safetensors", kv_file(0), index_file(1), "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize(
    "alter",
    [flip, lambda data: data[:-1], lambda data: data + b"x", lambda data: b""],
    ids=["flip", "cut", "add", "empty"],
)
def test_a_damaged_remote_file_is_refused_and_not_cached(
    uploaded: RemoteStore, cache: Path, name: str, alter: Callable[[bytes], bytes]
) -> None:
    good = fsspec.open(f"{uploaded.url}/{ID}/{name}").open().read()
    change(uploaded, name, alter)
    url = f"{uploaded.url}/{ID}"
    for look in (open_artifact, verify_artifact):
        with pytest.raises(ArtifactCorruptError, match="altered"):
            look(url)
    assert not (cache / ID).exists()
    assert (uploaded.manifests()[1].keys() == {ID}) == name.startswith("manifest")
    change(uploaded, name, lambda data: good)
    with open_artifact(url, verify="full") as artifact:
        assert artifact.spec == SPEC


@pytest.mark.parametrize("name", ["../../../../elsewhere/file", "/elsewhere/file", "more.bin", None])
def test_a_forged_manifest_that_lists_other_files_is_refused(
    uploaded: RemoteStore, tmp_path: Path, name: str | None
) -> None:
    """A manifest without files is refused, too. Nothing is written to the forged paths."""
    fs, path = fsspec.core.url_to_fs(f"{uploaded.url}/{ID}")
    manifest = json.loads(fs.cat_file(f"{path}/manifest.json"))
    if name is None:
        manifest["files"] = {}
    else:
        outside = str(tmp_path) + name if name.startswith("/") else name
        manifest["files"][outside] = {"size_bytes": 3, "sha256": hashlib.sha256(b"bad").hexdigest()}
        with suppress(OSError):
            fs.pipe_file(f"{path}/{outside}", b"bad")
    data = json.dumps(manifest).encode()
    fs.pipe_file(f"{path}/manifest.json", data)
    fs.pipe_file(f"{path}/manifest.sha256", f"{hashlib.sha256(data).hexdigest()}  manifest.json\n".encode())
    before = sorted(tmp_path.rglob("*"))
    for look in (open_artifact, verify_artifact, read_manifest):
        with pytest.raises(ArtifactCorruptError, match="the manifest lists the wrong files"):
            look(f"{uploaded.url}/{ID}")
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path.is_file()] == []


def test_an_artifact_under_another_id_is_refused(uploaded: RemoteStore) -> None:
    fs, path = fsspec.core.url_to_fs(f"{uploaded.url}/{ID}")
    fs.mv(path, path.replace(ID, "0" * 16), recursive=True)
    with pytest.raises(ArtifactCorruptError, match=f"holds the artifact {ID}"):
        open_artifact(f"{uploaded.url}/{'0' * 16}")


def test_an_interrupted_download_resumes_where_it_stopped(
    uploaded: RemoteStore, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    read_file = RemoteStore._read

    def note(store: RemoteStore, artifact_id: str, name: str, *more: object) -> None:
        read.append(name)
        if read.count(kv_file(1)) == 1 and name == kv_file(1):
            raise ArtifactError("the line is dead")
        read_file(store, artifact_id, name, *more)

    monkeypatch.setattr(RemoteStore, "_read", note)
    with pytest.raises(ArtifactError, match="the line is dead"):
        fetch_artifact(f"{uploaded.url}/{ID}")
    assert not (cache / ID).exists()
    verify_artifact(fetch_artifact(f"{uploaded.url}/{ID}"))
    assert sorted(read) == sorted([*read_manifest(cache / ID).files, kv_file(1)])
    assert [path.name for path in cache.iterdir()] == [ID]


def test_a_download_needs_space_for_its_missing_files_only(
    uploaded: RemoteStore, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = index_file(1)
    missing_bytes = read_manifest(f"{uploaded.url}/{ID}").files[last].size_bytes
    good = fsspec.open(f"{uploaded.url}/{ID}/{last}").open().read()
    change(uploaded, last, flip)
    with pytest.raises(ArtifactCorruptError):
        fetch_artifact(f"{uploaded.url}/{ID}")
    change(uploaded, last, lambda data: good)
    monkeypatch.setattr(durable, "available_bytes", lambda path: missing_bytes - 1)
    with pytest.raises(StoreFullError, match=rf"the download needs {missing_bytes:,} bytes .*with CSATTN_CACHE"):
        fetch_artifact(f"{uploaded.url}/{ID}")
    monkeypatch.setattr(durable, "available_bytes", lambda path: missing_bytes)
    assert fetch_artifact(f"{uploaded.url}/{ID}") == cache / ID


def test_a_download_killed_before_any_system_call_is_continued(
    uploaded: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{uploaded.url}/{ID}"

    def fetch_and_die(number: int) -> None:
        with before_call(SYSTEM_CALLS, number, kill_self):
            fetch_artifact(url)

    for number in range(100):
        monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / f"cache-{number}"))
        status = exit_status(fork(lambda number=number: fetch_and_die(number)))  # type: ignore[misc]
        with open_artifact(url) as artifact:
            assert artifact.spec == SPEC
        if status == 0:
            break
    assert number > 40


def test_a_cached_copy_that_is_damaged_later_is_downloaded_again(uploaded: RemoteStore, cache: Path) -> None:
    path = fetch_artifact(f"{uploaded.url}/{ID}")
    os.truncate(path / kv_file(0), 100)
    verify_artifact(fetch_artifact(f"{uploaded.url}/{ID}"))


def test_a_cached_copy_that_is_evicted_while_it_is_opened_is_downloaded_again(
    uploaded: RemoteStore, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, require_hashes = list[Path](), reader._require_hashes

    def evict_first(*given: Any) -> None:
        removed.extend([] if removed else shrink_cache(0))
        require_hashes(*given)

    monkeypatch.setattr(reader, "_require_hashes", evict_first)
    with open_artifact(f"{uploaded.url}/{ID}", verify="full") as artifact:
        assert removed == [cache / ID] and artifact.spec == SPEC


def test_a_last_use_far_in_the_future_counts_as_long_ago(tmp_path: Path) -> None:
    """Otherwise a copy would not be evicted before that time. The clock of another machine may be a little ahead."""
    for ahead_s, is_heeded in ((-1e6, True), (3600.0, True), (1e6, False)):
        when = time.time() + ahead_s
        os.utime(tmp_path, (when, when))
        assert (used_at(tmp_path) > 0.0) == is_heeded


def test_least_recently_used_copies_are_evicted_first_and_open_ones_stay_readable(
    remote: RemoteStore, tmp_path: Path
) -> None:
    specs = [make_spec(fingerprint=f"model-{number}") for number in range(3)]
    for spec in specs:
        remote.upload(build(tmp_path / "local", spec))
    for age, spec in enumerate(specs):
        os.utime(fetch_artifact(f"{remote.url}/{spec.artifact_id}"), (1000 + age, 1000 + age))
    fetch_artifact(f"{remote.url}/{specs[0].artifact_id}")  # used again: the most recently used
    oldest = open_artifact(cache_store() / specs[1].artifact_id)
    one_bytes = sum(file.stat().st_size for file in oldest.path.iterdir())
    assert shrink_cache(10 * one_bytes) == []
    assert shrink_cache(2 * one_bytes) == [oldest.path]
    np.testing.assert_array_equal(oldest.layer_kv(0), make_layer(specs[1], 0)[0])
    assert {summary.artifact_id for summary in scan_store(cache_store())[0]} == {
        specs[0].artifact_id,
        specs[2].artifact_id,
    }
    (cache_store() / ("0" * 16)).write_text("no copy, by that name")
    assert len(shrink_cache(0)) == 2
    assert [path.name for path in cache_store().iterdir()] == ["0" * 16]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://abc", "the store s3:/ names no place; give a bucket or a directory after the ://"),
        ("nowhere://x/y", "cannot use the store nowhere://x.*Protocol not known"),
        ("ftp://127.0.0.1:1/x/y", "cannot connect to the store ftp://127.0.0.1:1/x: .*refused; check the URL"),
        ("file:///absent/store/abc", "there is no artifact 'abc' in file:///absent/store"),
        ("file:///absent/store/0123456789abcdef", "holds no finished artifact"),
    ],
)
def test_urls_without_an_artifact_are_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        open_artifact(url)


def test_a_url_without_a_place_is_no_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an unset variable: s3://$BUCKET."""
    monkeypatch.chdir(tmp_path)
    for url in ("memory://", "file:///"):
        with pytest.raises(ArtifactError, match=f"the store {url} names no place"):
            RemoteStore(url)
    assert not list(tmp_path.iterdir())
