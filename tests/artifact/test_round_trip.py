"""An artifact reads back the bytes that were written, from memory maps, under the same id."""

import copy
import dataclasses
import gc
import os
import pickle
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from csattn.artifact import Artifact, ArtifactSpec, ArtifactWriter, open_artifact, verify_artifact
from csattn.artifact.layout import (
    MANIFEST_HASH_FILE,
    arrays_from_index,
    artifact_bytes,
    file_layout,
    index_file,
    kv_file,
)
from csattn.artifact.tensor_file import PAGE_BYTES, TensorSpec, map_file, plan_file, write_file
from csattn.errors import ArtifactError, ConfigError
from csattn.sketch import SketchIndex
from tests.artifact.synthetic import NOTES, VERSIONS, build, make_layer, make_spec, make_token_ids, write_layer


def assert_holds_what_was_built(artifact: Artifact, spec: ArtifactSpec) -> None:
    for layer_idx in range(spec.model.num_layers):
        kv, index = make_layer(spec, layer_idx)
        got_kv, got_index = artifact.layer_kv(layer_idx), artifact.layer_index(layer_idx)
        assert got_kv.dtype == kv.dtype
        assert torch.equal(got_kv, kv)
        path, offset, num_bytes = artifact.layer_kv_place(layer_idx)
        assert path.read_bytes()[offset : offset + num_bytes] == kv.view(torch.uint8).numpy().tobytes()
        assert type(got_index) is type(index)
        assert got_index.context_len == spec.context_len
        if isinstance(index, SketchIndex):
            assert (got_index.num_fine, got_index.num_coarse) == spec.index_config.words(spec.model.head_dim)
        else:
            assert got_index.weigh_by_norm == index.weigh_by_norm
        assert_equal_up_to_rounding(got_index.next_query, index.next_query)
        want = arrays_from_index(index)
        for name, got in arrays_from_index(got_index).items():
            assert got.dtype == want[name].dtype
            np.testing.assert_array_equal(got, want[name])


def assert_equal_up_to_rounding(got: NDArray[np.float32] | None, want: NDArray[np.float32] | None) -> None:
    """Assert equality up to half a step of a row's 8 bits."""
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert got.dtype == np.float32
        steps = np.abs(want).max(axis=-1, keepdims=True) / 127
        assert (np.abs(got - want) <= 0.501 * steps).all()


@pytest.mark.parametrize("verify", ["fulll", "", True, None])
def test_an_unknown_check_is_refused(tmp_path: Path, verify) -> None:
    """Otherwise an artifact would be taken for verified that is not."""
    with pytest.raises(ConfigError, match=f"verify must be one of size, full, got {verify!r}"):
        open_artifact(build(tmp_path, make_spec()), verify=verify)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="nothing tells here what is open and mapped")
def test_mapped_arrays_hold_no_file_open_and_are_unmapped_with_the_last_one(tmp_path: Path) -> None:
    """A service may hold more contexts than the process may have open files."""
    spec = make_spec()

    def is_mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    artifact = open_artifact(build(tmp_path, spec))
    assert is_mapped() and not [file for file in psutil.Process().open_files() if str(tmp_path) in file.path]
    ids = artifact.token_ids
    assert not ids.flags.writeable
    artifact.close()
    assert ids.tolist() == make_token_ids(spec.context_len).tolist()
    del artifact, ids
    gc.collect()
    assert not is_mapped()


OPTIONS = st.one_of(
    st.fixed_dictionaries(
        {
            "layout": st.just("sketch"),
            "num_fine": st.sampled_from([1, 2]),
            "num_coarse": st.sampled_from([0, 2]),
            "segment_len": st.sampled_from([1024, 8192]),
        }
    ),
    st.fixed_dictionaries(
        {
            "layout": st.just("lists"),
            "list_len": st.sampled_from([0.01, 0.25, 1.0]),
            "share_group": st.booleans(),
            "weigh_by_norm": st.booleans(),
        }
    ),
)


@settings(max_examples=40, deadline=None)
@given(
    context_len=st.sampled_from([1, 2, 63, 64, 65, 1021, 2600]),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 64]),
    kv_dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    options=OPTIONS,
)
def test_an_artifact_reads_back_as_it_was_built(options: dict[str, object], **shape: object) -> None:
    spec = make_spec(**shape, **options)  # type: ignore[arg-type]
    with TemporaryDirectory() as store:
        path = build(Path(store), spec)
        manifest = verify_artifact(path)
        assert (manifest.spec, manifest.library_versions, manifest.build_notes) == (spec, VERSIONS, NOTES)
        with open_artifact(path) as artifact:
            np.testing.assert_array_equal(artifact.token_ids, make_token_ids(spec.context_len))
            assert artifact.size_bytes == artifact_bytes(spec)
            assert_holds_what_was_built(artifact, spec)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([("F32", "f4"), ("F16", "f2"), ("I32", "i4"), ("U32", "u4"), ("U8", "u1"), ("I8", "i1")]),
            st.lists(st.sampled_from([0, 1, 2, 3, 63, 65]), max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_safetensors_library_reads_our_files(kinds: list[tuple[tuple[str, str], list[int]]]) -> None:
    specs = [TensorSpec(f"t{i}", dtype, tuple(shape)) for i, ((dtype, _), shape) in enumerate(kinds)]
    arrays = {
        spec.name: (np.arange(np.prod(spec.shape, dtype=int)) % 97).astype(code).reshape(spec.shape)
        for spec, ((_, code), _) in zip(specs, kinds, strict=True)
    }
    layout = plan_file(specs, {"note": "é"})
    with TemporaryDirectory() as place:
        path = Path(place) / "x.safetensors"
        record = write_file(path, layout, arrays)
        assert record.size_bytes == path.stat().st_size
        theirs, ours = load_file(path), map_file(path, layout)
        assert set(ours) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(theirs[name], array)
            np.testing.assert_array_equal(ours[name], array)
            assert ours[name].dtype == array.dtype
            assert not ours[name].flags.writeable


def test_large_arrays_are_aligned_to_pages_and_small_ones_to_cache_lines(tmp_path: Path) -> None:
    spec = make_spec(3001, head_dim=64, kv_dtype="bfloat16")
    path = build(tmp_path, spec)
    for name in (kv_file(0), index_file(0)):
        layout = file_layout(spec, name)
        for tensor, offset in layout.tensors:
            assert offset % (PAGE_BYTES if tensor.num_bytes >= PAGE_BYTES else 64) == 0
        for array in map_file(path / name, layout).values():
            assert array.ctypes.data % (PAGE_BYTES if array.nbytes >= PAGE_BYTES else 64) == 0


def test_strided_rows_are_stored_in_order(tmp_path: Path) -> None:
    spec = make_spec(num_layers=1, kv_dtype="bfloat16")
    kv, index = make_layer(spec, 0)
    with ArtifactWriter(tmp_path, spec, make_token_ids(70)) as writer:
        write_layer(writer, 0, kv.transpose(1, 2).contiguous().transpose(1, 2), index)
        path = writer.finish({}, {})
    with open_artifact(path) as artifact:
        assert torch.equal(artifact.layer_kv(0), kv)


def test_the_artifact_id_depends_on_all_inputs_of_a_build_and_on_nothing_else() -> None:
    spec = make_spec()
    others = [
        make_spec(71),
        make_spec(seed=1),
        make_spec(fingerprint="model-b"),
        make_spec(kv_dtype="float16"),
        make_spec(layout="lists"),
        make_spec(num_fine=1),
        dataclasses.replace(spec, tokenizer_hash="tokenizer-b"),
    ]
    assert len({spec.artifact_id, *(other.artifact_id for other in others)}) == 8
    assert dataclasses.replace(spec, model_name="a copy of it").artifact_id == spec.artifact_id
    assert make_spec().artifact_id == spec.artifact_id


def test_a_second_build_returns_at_once_and_touches_nothing(tmp_path: Path) -> None:
    spec = make_spec()
    path = build(tmp_path, spec)
    before = {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()}
    with ArtifactWriter(tmp_path, spec, make_token_ids(70)) as writer:
        assert writer.finished_path == path == tmp_path / spec.artifact_id
    assert {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == [spec.artifact_id]


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    spec = make_spec(layout="lists")
    first, second = build(tmp_path / "a", spec), build(tmp_path / "b", spec)
    for entry in first.iterdir():
        assert entry.read_bytes() == (second / entry.name).read_bytes()


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        path = build(tmp_path / "store", make_spec())
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()} == {0o640}


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum on this machine")
def test_sha256sum_verifies_the_manifest(tmp_path: Path) -> None:
    path = build(tmp_path, make_spec())
    done = subprocess.run(["sha256sum", "--check", "--strict", MANIFEST_HASH_FILE], cwd=path, capture_output=True)
    assert done.stdout == b"manifest.json: OK\n"


def test_arrays_stay_valid_after_their_artifact_is_closed(tmp_path: Path) -> None:
    spec = make_spec()
    artifact = open_artifact(build(tmp_path, spec))
    kv = artifact.layer_kv(1)
    artifact.close()
    assert torch.equal(kv, make_layer(spec, 1)[0])
    assert repr(artifact) == f"<Artifact {spec.artifact_id} of 70 tokens, closed>"
    with pytest.raises(ArtifactError, match="is closed; open it again"):
        artifact.layer_kv(1)


def test_an_artifact_is_pickled_as_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV is not copied, and a path that was relative when it was opened is valid in another directory."""
    spec = make_spec()
    path = build(tmp_path, spec)
    monkeypatch.chdir(tmp_path)
    with open_artifact(Path(path.name)) as artifact:
        monkeypatch.chdir("/")
        pickled = pickle.dumps(artifact)
        assert len(pickled) < 1000
        with pickle.loads(pickled) as again:
            assert again.path == artifact.path == path
            assert_holds_what_was_built(again, spec)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_closed_artifact_cannot_be_copied_or_pickled(tmp_path: Path, make: Callable[[Artifact], object]) -> None:
    with open_artifact(build(tmp_path, make_spec())) as artifact:
        pass
    with pytest.raises(ArtifactError, match="is closed; open it again"):
        make(artifact)


def test_a_layer_index_out_of_range_is_refused(tmp_path: Path) -> None:
    with open_artifact(build(tmp_path, make_spec())) as artifact, pytest.raises(IndexError, match="layers 0 to 1"):
        artifact.layer_kv(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_len": 0}, "a context has 1 to 2147483647 tokens"),
        ({"kv_dtype": "int8"}, "kv_dtype must be one of"),
        ({"head_dim": 7, "layout": "lists"}, "cannot be split into 2 equal subspaces"),
        ({"head_dim": 7}, "needs heads of 8 to 512 dimensions"),
        ({"num_layers": 0}, "num_layers of a model must be a positive integer"),
    ],
)
def test_invalid_artifact_specs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_spec(**change)  # type: ignore[arg-type]


def test_contexts_longer_than_int32_are_refused() -> None:
    """They are refused before a forged manifest's segments are counted one by one."""
    with pytest.raises(ConfigError, match="1 to 2147483647 tokens, got context_len=2147483648"):
        dataclasses.replace(make_spec(), context_len=2**31)
