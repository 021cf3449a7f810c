"""Stores: finding an artifact, listing whole ones, removing abandoned builds."""

import shutil
from pathlib import Path

import pytest

from csattn.artifact import (
    ArtifactWriter,
    collect_garbage,
    find_artifact,
    open_artifact,
    resolve_artifact,
    scan_store,
    unfinished_builds,
)
from csattn.errors import ArtifactCorruptError, ArtifactNotFoundError, ConfigError
from tests.artifact.synthetic import build, make_layer, make_spec, make_token_ids, write_layer


def test_an_artifact_is_found_by_path_and_by_id_prefix(tmp_path: Path) -> None:
    path = build(tmp_path, make_spec())
    assert resolve_artifact(path) == path
    for length in (1, 8, 16):
        assert find_artifact(tmp_path, path.name[:length]) == path
        with open_artifact(tmp_path / path.name[:length]) as artifact:
            assert artifact.path == path
    moved = path.rename(tmp_path / "my book")
    with open_artifact(moved) as artifact:
        assert artifact.spec == make_spec()


def test_a_name_too_long_for_a_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="give its directory, or STORE"):
        resolve_artifact(tmp_path / ("what is it? " * 30))


@pytest.mark.parametrize("prefix", ["", "0123456789abcdef0", "zz", "../store"])
def test_an_id_prefix_without_an_artifact_is_refused(tmp_path: Path, prefix: str) -> None:
    build(tmp_path, make_spec())
    with pytest.raises(ArtifactNotFoundError, match="csattn ls --store"):
        find_artifact(tmp_path, prefix)


def test_an_ambiguous_prefix_asks_for_more_digits(tmp_path: Path) -> None:
    for digit in range(6):
        (tmp_path / f"abcd{digit:012x}").mkdir()
    with pytest.raises(ArtifactNotFoundError, match=r"6 artifacts .* start with 'abcd' .*\.\.\.\); give more digits"):
        find_artifact(tmp_path, "abcd")


def test_a_listing_shows_whole_artifacts_only(tmp_path: Path) -> None:
    specs = [make_spec(seed=seed, layout=layout) for seed, layout in [(0, "sketch"), (1, "lists"), (2, "sketch")]]
    paths = [build(tmp_path, spec, seed) for seed, spec in enumerate(specs)]
    (paths[2] / "notes.txt").touch()
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "README").touch()
    with ArtifactWriter(tmp_path, make_spec(seed=3), make_token_ids(70, 3)) as writer:
        write_layer(writer, 0, *make_layer(writer.spec, 0))
    listed = scan_store(tmp_path)[0]
    assert {summary.path for summary in listed} == set(paths[:2])
    assert listed == sorted(listed, key=lambda summary: summary.artifact_id)
    for summary in listed:
        assert summary.size_bytes == sum(f.stat().st_size for f in summary.path.glob("*.safetensors"))
        assert (summary.model_name, summary.context_len, summary.kv_dtype) == ("Made-Up-1M", 70, "float32")
    assert {summary.layout for summary in listed} == {"sketch", "lists"}
    broken = scan_store(tmp_path)[1]
    assert set(broken) == {paths[2], tmp_path / "0123456789abcdef"}
    assert isinstance(broken[paths[2]], ArtifactCorruptError)


def test_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert scan_store(tmp_path / "none")[0] == []
    assert scan_store(tmp_path / "none")[1] == {}
    assert collect_garbage(tmp_path / "none") == []


def test_a_store_may_be_given_as_text(tmp_path: Path) -> None:
    path = build(tmp_path, make_spec())
    assert [summary.path for summary in scan_store(str(tmp_path))[0]] == [path]
    assert unfinished_builds(str(tmp_path)) == collect_garbage(str(tmp_path)) == []
    for refused, sentence in (("s3://bucket/store", "behind a URL: `csattn.artifact.remote_store`"), (5, "got 5")):
        with pytest.raises(ConfigError, match=sentence):
            scan_store(refused)  # type: ignore[arg-type]


def test_garbage_collection_removes_abandoned_builds_only(tmp_path: Path) -> None:
    finished = build(tmp_path, make_spec())
    abandoned = make_spec(seed=1)
    with ArtifactWriter(tmp_path, abandoned, make_token_ids(70, 1)) as writer:
        write_layer(writer, 0, *make_layer(abandoned, 0))
    (tmp_path / ".building-of-my-own").touch()
    lock_of_a_dead_process = tmp_path / f".building-{'0' * 16}.lock"
    lock_of_a_dead_process.touch()
    with ArtifactWriter(tmp_path, make_spec(seed=2), make_token_ids(70, 2)) as writer:
        removed = collect_garbage(tmp_path)
        assert removed == [lock_of_a_dead_process.with_suffix(""), tmp_path / f".building-{abandoned.artifact_id}"]
        write_layer(writer, 0, *make_layer(writer.spec, 0))
    shutil.rmtree(tmp_path / f".building-{writer.spec.artifact_id}")
    assert {entry.name for entry in tmp_path.iterdir()} == {finished.name, ".building-of-my-own"}
