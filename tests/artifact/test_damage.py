"""A damaged or forged artifact is refused with a clear message; a reader neither crashes nor waits."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from csattn.artifact import ArtifactWriter, open_artifact, verify_artifact
from csattn.artifact.find import find_artifact
from csattn.artifact.layout import file_layout, index_file, kv_file
from csattn.artifact.tensor_file import NUMPY_DTYPES
from csattn.config import SketchConfig
from csattn.errors import ArtifactCorruptError, ArtifactError, ArtifactMismatchError, ArtifactNotFoundError
from tests.artifact.faults import flip_byte, public_place, reseal, seal, without_root
from tests.artifact.synthetic import build, make_layer, make_spec, make_token_ids, write_layer


@pytest.fixture
def artifact_dir(tmp_path: Path) -> Path:
    return build(tmp_path / "store", make_spec(layout="lists"))


@pytest.mark.parametrize("layout", ["sketch", "lists"])
def test_random_damage_to_an_artifacts_files_is_always_refused(
    tmp_path: Path, layout: str, rng: np.random.Generator
) -> None:
    path = build(tmp_path, make_spec(layout=layout))
    files = sorted(path.iterdir())
    for _ in range(200):
        file = files[rng.integers(len(files))]
        original = file.read_bytes()
        position = int(rng.integers(len(original)))
        if rng.random() < 0.75:
            flip_byte(file, position, int(rng.integers(1, 256)))
        else:
            os.truncate(file, position)
        with pytest.raises(ArtifactError, match="copy it again or build it again") as refusal:
            verify_artifact(path)
        assert str(path) in str(refusal.value)
        file.write_bytes(original)
    verify_artifact(path)


@pytest.mark.parametrize("name", [kv_file(0), index_file(1), "tokens.safetensors", "manifest.json", "manifest.sha256"])
def test_a_missing_file_is_named(artifact_dir: Path, name: str) -> None:
    (artifact_dir / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name}.* is missing"):
        open_artifact(artifact_dir)


def test_an_unknown_file_in_an_artifact_is_refused(artifact_dir: Path) -> None:
    (artifact_dir / "notes.txt").touch()
    with pytest.raises(ArtifactCorruptError, match=r"notes\.txt does not belong to the artifact; remove it"):
        open_artifact(artifact_dir)


def test_metadata_files_of_macos_are_ignored(artifact_dir: Path) -> None:
    for name in (".DS_Store", "._manifest.json"):
        (artifact_dir / name).touch()
    verify_artifact(artifact_dir)


def test_a_file_of_another_artifact_or_layer_is_refused(tmp_path: Path) -> None:
    one, other = build(tmp_path, make_spec()), build(tmp_path, make_spec(seed=1), seed=1)
    for source, name in [(other / kv_file(0), kv_file(0)), (one / kv_file(1), kv_file(0))]:
        victim = shutil.copytree(one, tmp_path / "copy")
        shutil.copy(source, victim / name)
        with pytest.raises(ArtifactCorruptError, match="belongs to another artifact or layer"):
            open_artifact(victim)
        reseal(victim)  # even when the hashes have been made to agree
        with pytest.raises(ArtifactCorruptError, match="belongs to another artifact or layer"):
            open_artifact(victim)
        shutil.rmtree(victim)


def test_a_directory_named_after_another_artifact_is_refused(tmp_path: Path) -> None:
    one, other = build(tmp_path, make_spec()), build(tmp_path, make_spec(seed=1), seed=1)
    shutil.rmtree(one)
    other.rename(one)
    with pytest.raises(ArtifactCorruptError, match=f"holds the artifact {other.name}"):
        open_artifact(one)


@pytest.mark.parametrize("version", [2, 3, 4, 5, 7])
def test_another_format_version_is_refused_with_advice_to_build_again(artifact_dir: Path, version: int) -> None:
    """Artifacts from before sketches, too: their index has a layout that no longer exists. Version 3 had no marks;
    version 4 identified a model by its weights alone."""

    def as_of_then(manifest: dict[str, Any]) -> None:
        manifest.update(format_version=version)
        manifest["index_config"].update(layout="rows", score_bits=4, basis="key_whitened")

    reseal(artifact_dir, as_of_then)
    words = f"has format version {version} and this csattn reads version 6; build it again with `csattn build`"
    with pytest.raises(ArtifactMismatchError, match=words) as refusal:
        open_artifact(artifact_dir)
    assert "delete" not in str(refusal.value), "the csattn that made it may read it in the same store"


def test_a_long_format_version_is_shortened_in_the_error(artifact_dir: Path) -> None:
    seal(artifact_dir, json.dumps({"format": "csattn-artifact", "format_version": "5" * 100_000}).encode())
    with pytest.raises(ArtifactMismatchError, match="has format version '5555") as refusal:
        open_artifact(artifact_dir)
    assert len(str(refusal.value)) < 1000


def test_another_model_or_tokenizer_is_refused(artifact_dir: Path) -> None:
    with open_artifact(artifact_dir) as artifact:
        geometry = artifact.spec.model
        artifact.require_model("model-a", geometry, "tokenizer-a")
        with pytest.raises(ArtifactMismatchError, match=r"Made-Up-1M in float32 \(fingerprint model-a\).*model-b"):
            artifact.require_model("model-b", geometry, "tokenizer-a")
        other = replace(geometry, num_q_heads=64, head_dim=geometry.head_dim + 1)
        with pytest.raises(ArtifactMismatchError, match=r"has num_q_heads \d+, .* loaded model num_q_heads 64"):
            artifact.require_model("model-a", other, "tokenizer-a")
        with pytest.raises(ArtifactMismatchError, match="has fingerprint cccccccccccc; load"):
            artifact.require_model(64 * "c", geometry, "tokenizer-a")  # shortened: nobody compares more digits by eye
        with pytest.raises(ArtifactMismatchError, match="tokenizer-a and the loaded one is tokenizer-b"):
            artifact.require_model("model-a", geometry, "tokenizer-b")


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        ("int4", r"in float32, its weights rounded to int4 \(add --weights int4, in Python weights='int4'\), or build"),
        ("none", r"in float32, its weights not rounded \(leave out --weights, in Python weights=\), or build"),
        (None, "in float32, its weights rounded in the same way, or build"),
        ({"bits": 4}, "in float32, its weights rounded in the same way, or build"),
    ],
)
def test_the_refusal_of_another_model_names_the_rounding_of_weights(
    artifact_dir: Path, noted: object, words: str
) -> None:
    if noted is not None:
        reseal(artifact_dir, lambda manifest: manifest["build_notes"].update(weights=noted))
    with open_artifact(artifact_dir) as artifact, pytest.raises(ArtifactMismatchError, match=words):
        artifact.require_model("model-b", artifact.spec.model, "tokenizer-a")


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "other format": lambda m: m.update(format="zip"),
    "no version": lambda m: m.pop("format_version"),
    "no model": lambda m: m.pop("model"),
    "model is a list": lambda m: m.update(model=[1]),
    "unknown geometry": lambda m: m["model"].update(wings=2),
    "no layers": lambda m: m["model"].update(num_layers=0),
    "more layers than files": lambda m: m["model"].update(num_layers=3),
    "a billion layers": lambda m: m["model"].update(num_layers=10**9),
    "heads of windows in no layer": lambda m: m["model"].update(window_heads=[1, 8]),
    "layers are a number": lambda m: m["model"].update(layers=2),
    "a layer is a list": lambda m: m["model"].update(layers=[["rows"], ["rows"]]),
    "too few layers": lambda m: m["model"].update(layers=[{"keeps": "rows"}]),
    "unknown kind of layer": lambda m: m["model"].update(layers=[{"keeps": "rows"}, {"keeps": "all"}]),
    "kind is a list": lambda m: m["model"].update(layers=[{"keeps": "rows"}, {"keeps": ["rows"]}]),
    "window of nothing": lambda m: m["model"].update(layers=[{"keeps": "rows"}, {"keeps": "window"}]),
    "fractional window": lambda m: m["model"].update(layers=[{"keeps": "rows"}, {"keeps": "window", "window": 4.0}]),
    "rows of itself": lambda m: m["model"].update(layers=[{"keeps": "rows"}, {"keeps": "rows", "rows_of": 1}]),
    "no rows at all": lambda m: m["model"].update(layers=2 * [{"keeps": "window", "window": 9}]),
    "fractional heads": lambda m: m["model"].update(num_kv_heads=2.0),
    "other head_dim": lambda m: m["model"].update(head_dim=16),
    "head_dim that cannot be split": lambda m: m["model"].update(head_dim=5),
    "true for 1": lambda m: m.update(context_len=True),
    "longer context": lambda m: m.update(context_len=71),
    "enormous context": lambda m: m.update(context_len=10**18),
    "negative context": lambda m: m.update(context_len=-70),
    "other id": lambda m: m.update(artifact_id="0" * 16),
    "no id": lambda m: m.pop("artifact_id"),
    "other tokenizer": lambda m: m.update(tokenizer_hash="tokenizer-b"),
    "empty tokenizer": lambda m: m.update(tokenizer_hash=""),
    "other kv dtype": lambda m: m.update(kv_dtype="float16"),
    "unknown kv dtype": lambda m: m.update(kv_dtype="float8"),
    "option of a later version": lambda m: m["index_config"].update(warp=9),
    "missing option": lambda m: m["index_config"].pop("layout"),
    "option of another type": lambda m: m["index_config"].update(num_subspaces="2"),
    "fractional option": lambda m: m["index_config"].update(num_centroids=3.0),
    "unknown layout": lambda m: m["index_config"].update(layout="rows"),
    "layout is a list": lambda m: m["index_config"].update(layout=["lists"]),
    "other layout": lambda m: m.update(index_config=SketchConfig().to_json()),
    "options are a list": lambda m: m.update(index_config=[1]),
    "files is a list": lambda m: m.update(files=[]),
    "no files": lambda m: m.update(files={}),
    "file outside": lambda m: m["files"].update({"../../etc/passwd": m["files"].pop(kv_file(0))}),
    "record with more in it": lambda m: m["files"][kv_file(0)].update(mode=7),
    "negative size": lambda m: m["files"][kv_file(0)].update(size_bytes=-1),
    "short hash": lambda m: m["files"][kv_file(0)].update(sha256="00"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_with_a_valid_hash_is_refused(artifact_dir: Path, forgery: str) -> None:
    reseal(artifact_dir, FORGERIES[forgery])
    with pytest.raises(ArtifactCorruptError, match="build it again"):
        open_artifact(artifact_dir)


def test_an_artifact_without_one_of_its_layers_is_refused(artifact_dir: Path) -> None:
    (artifact_dir / kv_file(1)).unlink()
    manifest = json.loads((artifact_dir / "manifest.json").read_bytes())
    del manifest["files"][kv_file(1)]
    seal(artifact_dir, json.dumps(manifest).encode())
    with pytest.raises(ArtifactCorruptError, match="the manifest lists the wrong files"):
        open_artifact(artifact_dir)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"\xff" * 100_000,
        b"[" * 100_000,
        b'{"format": "csattn-artifact", "format_version": NaN}',
        b'{"format": "csattn-artifact", "format": "csattn-artifact", "format_version": 1}',
    ],
)
def test_a_malformed_manifest_is_refused(artifact_dir: Path, text: bytes) -> None:
    seal(artifact_dir, text)
    with pytest.raises(ArtifactError, match="not one that csattn writes") as refusal:
        open_artifact(artifact_dir)
    assert len(str(refusal.value)) < 1000


def forge_array(artifact_dir: Path, name: str, forge: Callable[[NDArray[Any]], object], layer_idx: int = 0) -> None:
    """Change an array of a layer's index in its file, and make all hashes agree with it."""
    with open_artifact(artifact_dir) as artifact:
        layout = file_layout(artifact.spec, index_file(layer_idx))
    spec, offset = next((spec, offset) for spec, offset in layout.tensors if spec.name == name)
    array = np.memmap(artifact_dir / index_file(layer_idx), NUMPY_DTYPES[spec.dtype], "r+", offset, spec.shape)
    forge(array)
    array.flush()
    reseal(artifact_dir)


def _move_bit(to: int) -> Callable[[NDArray[np.uint32]], None]:
    """Replace the first row of the last list by row `to`, which is beyond the context."""

    def move(listed: NDArray[np.uint32]) -> None:
        words = listed[-1, -1, -1].reshape(-1)
        word = np.flatnonzero(words)[0]
        words[word] &= words[word] - np.uint32(1)
        words[to // 32] |= np.uint32(1 << to % 32)
        listed[-1, -1, -1] = words.reshape(listed.shape[-2:])

    return move


LISTED_ARE_OTHERS = r"listed does not have \d+ of the context's \d+ rows in each list"


@pytest.mark.parametrize(
    ("context_len", "forge"),
    [
        *((70, _move_bit(to)) for to in (70, 95, 1023)),
        *((context_len, _move_bit(context_len)) for context_len in (1025, 1056)),
        *((70, partial(np.copyto, src=np.uint32(words))) for words in (0, 2**32 - 1)),
    ],
)
def test_forged_lists_never_reach_a_kernel(
    tmp_path: Path, context_len: int, forge: Callable[[NDArray[Any]], None]
) -> None:
    path = build(tmp_path, make_spec(context_len, layout="lists"))
    verify_artifact(path)
    forge_array(path, "listed", forge)
    with pytest.raises(ArtifactCorruptError, match=LISTED_ARE_OTHERS):
        verify_artifact(path)
    with open_artifact(path) as artifact:
        artifact.layer_index(1)
        with pytest.raises(ArtifactCorruptError, match=LISTED_ARE_OTHERS):
            artifact.layer_index(0)


@pytest.mark.parametrize("start", [-1, 1, 2**31 - 1, -(2**31)])
def test_forged_offsets_of_scores_are_refused(artifact_dir: Path, start: int) -> None:
    forge_array(artifact_dir, "starts", lambda starts: _set(starts, start))
    with pytest.raises(ArtifactCorruptError, match="starts are not where the scores of listed rows begin"):
        verify_artifact(artifact_dir)


def test_forged_minimum_scores_are_refused(artifact_dir: Path) -> None:
    forge_array(artifact_dir, "least", lambda least: _set(least, -100.0))
    with pytest.raises(ArtifactCorruptError, match="least are not the least scores of the lists"):
        verify_artifact(artifact_dir)


def _set(array: NDArray[Any], value: float) -> None:
    array[(-1,) * array.ndim] = value


@pytest.mark.parametrize(
    ("layout", "name"),
    [("lists", name) for name in ("scores", "least", "codebooks", "key_mean", "next_query_scale")]
    + [("sketch", name) for name in ("key_mean", "query_transform", "value_mean", "value_transform")],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, -3e38])
def test_nan_infinite_and_huge_values_in_an_index_are_refused(
    tmp_path: Path, layout: str, name: str, value: float
) -> None:
    path = build(tmp_path, make_spec(layout=layout))
    with np.errstate(over="ignore"):  # float16 overflows to -inf
        forge_array(path, name, lambda array: _set(array, value))
    damaged = name.removesuffix("_scale")
    with open_artifact(path) as artifact, pytest.raises(ArtifactCorruptError, match=f"{damaged} holds NaN, inf"):
        artifact.layer_index(0)


@pytest.mark.parametrize("starts", [[1024, 2048], [0, 1023], [0, 0], [0, -1024], [0, 3072], [0, -(2**31)]])
def test_forged_segments_are_refused(tmp_path: Path, starts: list[int]) -> None:
    path = build(tmp_path, make_spec(2600, num_layers=1, segment_len=1300))
    verify_artifact(path)
    forge_array(path, "segment_starts", lambda array: array.__setitem__(slice(None), starts))
    with pytest.raises(ArtifactCorruptError, match="segment_starts are not multiples of 1024 that ascend from 0"):
        verify_artifact(path)


def _swap_marks(marks: NDArray[np.uint32]) -> None:
    """Move the mark of the first head's first marked row to a row beyond the context."""
    word = tuple(index[0] for index in np.nonzero(marks))
    marks[word] &= marks[word] - np.uint32(1)
    marks[0, -1, -1] |= np.uint32(1 << 31)


@pytest.mark.parametrize(
    "forge",
    [_swap_marks, lambda marks: marks.__setitem__(..., 0), lambda marks: np.invert(marks, out=marks)],
    ids=["beyond", "none", "most"],
)
def test_forged_marks_are_refused(tmp_path: Path, forge: Callable[[NDArray[Any]], None]) -> None:
    path = build(tmp_path, make_spec(2600, num_layers=1, segment_len=1300))
    verify_artifact(path)
    forge_array(path, "marks", forge)
    with pytest.raises(ArtifactCorruptError, match="marks are not at 5 of each head's 2600 rows"):
        verify_artifact(path)


def test_a_negative_zero_score_is_refused(artifact_dir: Path) -> None:
    forge_array(artifact_dir, "scores", lambda array: array.__setitem__((-1, -1, -1, 0), -0.0))
    with pytest.raises(ArtifactCorruptError, match=r"scores hold -0\.0"):
        verify_artifact(artifact_dir)


def test_a_writer_refuses_an_index_that_a_reader_would_refuse(tmp_path: Path) -> None:
    spec = make_spec()
    kv, index = make_layer(spec, 0)
    index.key_mean[0, 0, 0] = np.nan
    with (
        ArtifactWriter(tmp_path, spec, make_token_ids(70)) as writer,
        pytest.raises(ArtifactError, match="index of layer 0 cannot be stored: key_mean holds NaN"),
    ):
        write_layer(writer, 0, kv, index)


def test_forged_tokens_are_refused(artifact_dir: Path) -> None:
    flip_byte(artifact_dir / "tokens.safetensors", -1)
    reseal(artifact_dir)
    with pytest.raises(ArtifactCorruptError, match="does not hold the tokens that the manifest describes"):
        open_artifact(artifact_dir)


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """Code that counts tokens by id would write out of bounds."""
    spec = make_spec()
    path = build(tmp_path, replace(spec, model=replace(spec.model, vocab_size=10)))
    with pytest.raises(ArtifactCorruptError, match="holds token ids outside of the model's vocabulary of 10; delete"):
        open_artifact(path)


@pytest.mark.parametrize("name", [kv_file(0), "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_a_pipe_or_directory_in_place_of_a_file_is_refused_at_once(
    artifact_dir: Path, name: str, make: Callable[[Path], None]
) -> None:
    (artifact_dir / name).unlink()
    make(artifact_dir / name)
    with pytest.raises(ArtifactCorruptError):
        verify_artifact(artifact_dir)


def test_opening_a_store_as_an_artifact_does_not_advise_to_delete_it(artifact_dir: Path) -> None:
    store = artifact_dir.parent
    with pytest.raises(ArtifactNotFoundError, match=r"csattn ls --store .* and how an id starts") as refusal:
        open_artifact(store)
    assert "delete" not in str(refusal.value)


def test_a_renamed_artifact_is_found_by_path_but_not_by_name(artifact_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact_dir, tmp_path / "manual")
    with pytest.raises(ArtifactNotFoundError, match="an artifact's directory is named by its id"):
        find_artifact(tmp_path, "manual")
    assert open_artifact(tmp_path / "manual").spec.artifact_id == artifact_dir.name, "by its path it is read"
    (tmp_path / "report.txt").touch()
    (tmp_path / "empty").mkdir()
    for name in ("report.txt", "empty"):
        with pytest.raises(ArtifactNotFoundError, match="csattn ls --store"):
            find_artifact(tmp_path, name)
    shutil.copytree(artifact_dir, tmp_path / artifact_dir.name)
    (tmp_path / "manual").rename(tmp_path / artifact_dir.name[:4])
    assert find_artifact(tmp_path, artifact_dir.name[:4]) == tmp_path / artifact_dir.name


def test_a_path_without_an_artifact_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="there is no artifact 'nothing'"):
        open_artifact(tmp_path / "nothing")
    with pytest.raises(ArtifactNotFoundError, match=f"there is no store at {tmp_path / 'absent'}"):
        open_artifact(tmp_path / "absent" / "0123")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactNotFoundError, match="holds no finished artifact"):
        open_artifact(tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactNotFoundError, match="file is a file; an artifact is a directory: give that, or STORE"):
        open_artifact(tmp_path / "file")
    with pytest.raises(ArtifactNotFoundError, match="is a file, not a store"):
        open_artifact(tmp_path / "file" / "abc")


@pytest.mark.parametrize("name", [kv_file(1), "manifest.json", "."])
def test_a_file_without_read_permission_is_refused(name: str) -> None:
    with public_place() as place:
        path = build(place, make_spec())
        (path / name).chmod(0)
        with without_root(), pytest.raises(ArtifactError, match="Permission denied; check its permissions"):
            open_artifact(path)
        (path / name).chmod(0o755)


def test_progress_of_a_verification_reaches_the_end(artifact_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify_artifact(artifact_dir, lambda done, total: seen.append((done, total)))
    assert len(seen) == len(json.loads((artifact_dir / "manifest.json").read_bytes())["files"])
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(f.stat().st_size for f in artifact_dir.glob("*.safetensors"))
