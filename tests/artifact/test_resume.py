"""A build continues where an earlier one stopped, verifies all that it finds, and replaces what is broken."""

import errno
import hashlib
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from csattn.artifact import (
    ArtifactWriter,
    KvDtype,
    RemoteStore,
    WorkDir,
    cache_store,
    open_artifact,
    reader,
    scan_store,
    work,
)
from csattn.artifact.layout import artifact_bytes, index_file, kv_file
from csattn.errors import ArtifactRoomError
from tests.artifact.builds import SPEC, assert_completes, building_dir, write_layers
from tests.artifact.faults import before_call, flip_byte
from tests.artifact.synthetic import TORCH_DTYPES, build, hidden_state, make_layer, make_spec, make_token_ids


def test_an_interrupted_build_resumes_where_it_stopped(tmp_path: Path) -> None:
    write_layers(tmp_path, 1)
    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        assert repr(writer) == f"<ArtifactWriter {SPEC.artifact_id}: 1/2 layers>"
        checkpoint = writer.work.load_checkpoint(SPEC.model.num_layers)
        assert checkpoint is not None
        assert checkpoint[0] == writer.finished_layers == 1
        first = [building_dir(tmp_path) / "artifact" / name for name in (kv_file(0), index_file(0))]
        assert writer.remaining_bytes == artifact_bytes(SPEC) - sum(file.stat().st_size for file in first)
        assert torch.equal(checkpoint[1], hidden_state(SPEC, 1))
    assert_completes(tmp_path)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_a_checkpoint_keeps_every_bit(tmp_path: Path, kv_dtype: KvDtype) -> None:
    spec = make_spec(kv_dtype=kv_dtype)
    hidden = torch.randn(spec.context_len, spec.model.hidden_size).to(TORCH_DTYPES[kv_dtype])
    with ArtifactWriter(tmp_path, spec, make_token_ids(70)) as writer:
        assert writer.work.load_checkpoint(spec.model.num_layers) is None
        writer.work.save_checkpoint(0, hidden)
        got = writer.work.load_checkpoint(spec.model.num_layers)
    assert got is not None
    assert got[0] == 0
    assert got[1].dtype == hidden.dtype
    assert torch.equal(got[1], hidden)


def forge(path: Path, body: bytes) -> None:
    """Write a record whose own hash is right."""
    path.write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("checkpoint.json", b"[]"),
        ("checkpoint.json", b"[" * 100_000),
        ("checkpoint.json", b'{"next_layer":-1}'),
        ("checkpoint.json", b'{"next_layer":"1"}'),
        ("checkpoint.json", b'{"next_layer":2,"files":[]}'),
        ("layer-001.json", b"{"),
        ("layer-001.json", b'{"files":{"hidden-002.safetensors":{"size_bytes":"x"}}}'),
    ],
)
def test_forged_records_count_as_absent(tmp_path: Path, name: str, body: bytes) -> None:
    write_layers(tmp_path, 2)
    forge(building_dir(tmp_path) / name, body)
    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        assert writer.finished_layers == (2 if name == "checkpoint.json" else 1)
        assert writer.work.load_checkpoint(SPEC.model.num_layers) is None
        assert not (building_dir(tmp_path) / name).exists()
    assert_completes(tmp_path)


def test_a_record_with_a_forged_size_counts_as_absent(tmp_path: Path) -> None:
    write_layers(tmp_path, 2)
    path = building_dir(tmp_path) / "layer-001.json"
    record = json.loads(path.read_bytes().splitlines()[0])
    record["files"][kv_file(1)]["size_bytes"] = "many"
    forge(path, json.dumps(record).encode())
    assert_completes(tmp_path)


def test_hidden_states_of_another_shape_count_as_absent(tmp_path: Path) -> None:
    """They are from another build, with a record of the right hash."""
    write_layers(tmp_path, 2)
    other = make_spec(context_len=69, num_kv_heads=1)
    WorkDir(tmp_path, other).path.mkdir()
    WorkDir(tmp_path, other).save_checkpoint(2, hidden_state(other, 2))
    for name in ("checkpoint.json", "hidden-002.safetensors"):
        (WorkDir(tmp_path, other).path / name).replace(building_dir(tmp_path) / name)
    WorkDir(tmp_path, other).path.rmdir()
    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        assert writer.work.load_checkpoint(SPEC.model.num_layers) is None
    assert_completes(tmp_path)


@pytest.mark.parametrize(
    ("name", "intact_layers", "has_checkpoint"),
    [
        (f"artifact/{kv_file(0)}", 0, False),
        (f"artifact/{index_file(1)}", 1, False),
        ("layer-000.json", 0, False),
        ("layer-001.json", 1, False),
        ("checkpoint.json", 2, False),
        ("hidden-002.safetensors", 2, False),
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "directory"])
def test_damaged_work_counts_as_absent(
    tmp_path: Path, name: str, intact_layers: int, has_checkpoint: bool, damage: str
) -> None:
    write_layers(tmp_path, 2)
    victim = building_dir(tmp_path) / name
    if damage == "flip":
        flip_byte(victim, victim.stat().st_size * 3 // 4)
    elif damage == "cut":
        os.truncate(victim, victim.stat().st_size - 1)
    else:
        victim.unlink()
    if damage == "directory":
        victim.mkdir()
    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        assert writer.finished_layers == intact_layers
        assert (writer.work.load_checkpoint(SPEC.model.num_layers) is not None) == has_checkpoint
    assert_completes(tmp_path)


def test_unknown_files_in_the_building_directory_are_removed(tmp_path: Path) -> None:
    write_layers(tmp_path, 1)
    work = building_dir(tmp_path)
    (work / "artifact" / "passwords.txt").touch()
    (work / "artifact" / f".{kv_file(1)}.partial").touch()
    (work / "artifact" / "folder").mkdir()
    (work / "folder").mkdir()
    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        assert writer.finished_layers == 1
        assert {entry.name for entry in (work / "artifact").iterdir()} == {kv_file(0), index_file(0)}
    assert_completes(tmp_path)


@pytest.mark.parametrize("kind", ["file", "link", "empty directory"])
def test_an_invalid_building_directory_is_replaced(tmp_path: Path, kind: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "elsewhere" / "artifact").mkdir(parents=True)
    (tmp_path / "elsewhere" / "precious").touch()
    if kind == "file":
        building_dir(store).touch()
    elif kind == "link":
        building_dir(store).symlink_to(tmp_path / "elsewhere")
    else:
        building_dir(store).mkdir()
    assert_completes(store)
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_broken_artifact_is_replaced(tmp_path: Path) -> None:
    path = build(tmp_path, SPEC)
    os.truncate(path / kv_file(0), 100)
    assert list(scan_store(tmp_path)[1]) == [path]
    assert scan_store(tmp_path)[0] == []
    assert_completes(tmp_path)


def test_an_artifact_that_this_process_lacks_resources_to_map_is_not_replaced(tmp_path: Path, monkeypatch) -> None:
    """The error does not say that it is broken, so a copy of it is not downloaded again either."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    remote = RemoteStore(f"file://{tmp_path}/remote")
    remote.upload(path := build(cache_store(), SPEC))
    before = path.stat().st_ino, *sorted(entry.stat().st_ino for entry in path.iterdir())
    monkeypatch.setattr(reader, "map_file", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(ArtifactRoomError):
        build(cache_store(), SPEC)
    with pytest.raises(ArtifactRoomError):
        remote.fetch(SPEC.artifact_id)
    assert before == (path.stat().st_ino, *sorted(entry.stat().st_ino for entry in path.iterdir()))


@pytest.mark.parametrize(("of", "name"), [(work, "map_file"), (Path, "read_bytes")])
def test_layers_that_this_process_lacks_resources_to_check_are_kept(tmp_path: Path, monkeypatch, of, name) -> None:
    write_layers(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(of, name, Mock(side_effect=OSError(errno.ENFILE, "Too many open files in system")))
        with pytest.raises(ArtifactRoomError, match=r"layer-000.* cannot be checked: Too many open files"):
            build(tmp_path, SPEC)
    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        assert writer.finished_layers == 1


def test_replacing_a_broken_artifact_does_not_disturb_its_readers(tmp_path: Path) -> None:
    artifact = open_artifact(build(tmp_path, SPEC))
    (artifact.path / "manifest.sha256").unlink()
    assert_completes(tmp_path)
    assert torch.equal(artifact.layer_kv(0), make_layer(SPEC, 0)[0])


def test_a_keyboard_interrupt_keeps_finished_layers(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with before_call(("replace",), 4, interrupt), pytest.raises(KeyboardInterrupt):
        build(tmp_path, SPEC)
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.glob("*.lock"))
    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        assert writer.finished_layers == 1
    assert_completes(tmp_path)
