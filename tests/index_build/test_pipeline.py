"""The whole build of an artifact on a small model: reuse, resumption, refusals and kills."""

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import open_artifact, scan_store, verify_artifact
from csattn.attention.attend import attend_chunk
from csattn.config import IndexConfig, ListConfig, SketchConfig
from csattn.errors import CaptureError, ConfigError, ContextError, StoreFullError
from csattn.models.loader import wrap_model
from index_build import capture, codebooks
from index_build.board import BuildProgress
from index_build.pipeline import build_artifact
from tests.forks import FORKS
from tests.tiny import MAX_POSITIONS, byte_tokenizer, loaded, make_model, token_ids

NUM_KILLS = 6  # tests/artifact/test_interrupted_build.py has one before every system call


# small lists: k-means is tested elsewhere
LISTS = ListConfig(num_centroids=16, num_iterations=2)
CONFIGS: dict[str, IndexConfig] = {
    "sketch": SketchConfig(),
    "lists": LISTS,
    "lists of torch": replace(LISTS, kmeans="torch"),
    "lists of each query head": replace(LISTS, share_group=False, center_keys=False, weigh_by_norm=False),
}


def build(store: Path, num_tokens: int = 300, config: IndexConfig = CONFIGS["sketch"], **options):
    return build_artifact(loaded(), token_ids(num_tokens), config, store, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_build_can_be_opened_and_verified(tmp_path: Path, name: str) -> None:
    report = build(tmp_path, config=CONFIGS[name])
    verify_artifact(report.path)
    with open_artifact(report.path) as artifact:
        assert artifact.spec.index_config == CONFIGS[name]
        np.testing.assert_array_equal(artifact.token_ids, token_ids(300))
        assert artifact.layer_kv(2).shape == (2, 300, 2, 16)
        index = artifact.layer_index(0)
        assert index.num_heads == (4 if name == "lists of each query head" else 2)
        assert index.next_query is not None
        assert artifact.layer_index(2).next_query is None


@pytest.mark.parametrize("kind", [list, torch.tensor, np.uint8, np.int64, np.uint64])
def test_token_ids_of_any_kind_give_one_artifact(tmp_path: Path, kind) -> None:
    given = token_ids(300).astype(kind) if kind in (np.uint8, np.int64, np.uint64) else kind(token_ids(300))
    assert build_artifact(loaded(), given, CONFIGS["sketch"], tmp_path).artifact_id == build(tmp_path).artifact_id


@pytest.mark.parametrize(
    ("ids", "error", "sentence"),
    [
        (np.ones(300), ConfigError, r"whole numbers in one row, \[context_len\], got float64 of shape \[300\]"),
        (np.ones((2, 300), np.int32), ConfigError, r"got int32 of shape \[2, 300\]"),
        ("text", ConfigError, r"of shape \[\]"),
        (-token_ids(300), ContextError, "the context has the token id -255; give ids of the model's vocabulary"),
        (token_ids(300).astype(np.int64) << 32, ContextError, "the context has the token id 1095216660480"),
    ],
)
def test_a_context_of_no_token_ids_is_refused(tmp_path: Path, ids, error, sentence) -> None:
    with pytest.raises(error, match=sentence):
        build_artifact(loaded(), ids, CONFIGS["sketch"], tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("notes", [{"of": object()}, {"share": float("nan")}, [1], 5])
def test_notes_that_are_no_json_are_refused_before_anything_is_built(tmp_path: Path, notes) -> None:
    with pytest.raises(ConfigError, match="notes of an artifact are kept as a JSON object, got"):
        build(tmp_path / "store", notes=notes)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("num_threads", [0, -1, "2", 1.5, 10**6])
def test_an_impossible_number_of_threads_is_refused(tmp_path: Path, num_threads) -> None:
    with pytest.raises(ConfigError, match=f"num_threads must be .*, got {num_threads!r}"):
        build(tmp_path / "store", num_threads=num_threads)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "mode", [*(torch.autocast("cpu", dtype=of) for of in (torch.bfloat16, torch.float16)), torch.device("meta")]
)
def test_torchs_modes_do_not_change_a_builds_bytes(tmp_path: Path, name: str, mode) -> None:
    """Otherwise others would get, by the same id, rows of less precision."""
    want = build(tmp_path / "plain", config=CONFIGS[name]).path
    with mode:
        got = build(tmp_path / "in a mode", config=CONFIGS[name]).path
    assert [file.read_bytes() for file in sorted(got.iterdir())] == [
        file.read_bytes() for file in sorted(want.iterdir())
    ]


def test_the_same_context_is_built_once(tmp_path: Path) -> None:
    first = build(tmp_path)
    second = build(tmp_path)
    assert (first.reused, second.reused) == (False, True)
    assert second.path == first.path
    for config in (LISTS, replace(LISTS, seed=1)):
        build(tmp_path, config=config)
    assert len(scan_store(tmp_path)[0]) == 3, "other centroids are another artifact"


def test_only_faiss_lists_require_faiss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS FAISS is not installed, because its OpenMP and torch's would crash the process."""
    program = "import sys, index_build.pipeline; assert 'faiss' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)
    of_faiss = replace(LISTS, kmeans="faiss")
    with monkeypatch.context() as on_a_mac:
        on_a_mac.setattr(codebooks, "KMEANS_ON_CPU", "torch")
        with pytest.raises(ConfigError, match="not available on macOS"):
            build(tmp_path, config=of_faiss)
    monkeypatch.setitem(sys.modules, "faiss", None)
    for config in (CONFIGS["sketch"], CONFIGS["lists of torch"]):
        assert "faiss" not in (build(tmp_path, config=config).path / "manifest.json").read_text()
    with pytest.raises(ConfigError, match="install faiss-cpu, or use --kmeans torch"):
        build(tmp_path, config=of_faiss)


@pytest.mark.parametrize("name", ["sketch", "lists", "lists of torch"])
def test_the_same_input_gives_the_same_bytes_on_any_number_of_threads(tmp_path: Path, name: str) -> None:
    reports = [build(tmp_path / str(n), num_threads=n, config=CONFIGS[name]) for n in (1, 3)]
    for file in reports[0].path.glob("*.safetensors"):
        assert file.read_bytes() == (reports[1].path / file.name).read_bytes(), file.name


@pytest.mark.parametrize("name", ["sketch", "lists"])
def test_prefill_uses_all_threads_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """FAISS and torch may share OpenMP: a number of threads set for one would also apply to the other."""
    seen = []

    def attend(*args, **options):
        seen.append(torch.get_num_threads())
        return attend_chunk(*args, **options)

    monkeypatch.setattr(capture, "attend_chunk", attend)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        build(tmp_path, config=CONFIGS[name])
        assert set(seen) == {3} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_progress_names_every_layer_and_phase(tmp_path: Path) -> None:
    seen: list[BuildProgress] = []
    build(tmp_path, on_progress=seen.append)
    assert [(p.layer_idx, p.phase) for p in seen] == [(i, p) for i in range(3) for p in ("prefill", "index", "write")]
    assert all(p.done == p.total == 300 for p in seen)


class Stop(Exception):
    """Ends a build at a chosen place."""


def test_an_interrupted_build_resumes_at_the_layer_where_it_stopped(tmp_path: Path) -> None:
    def stop(progress: BuildProgress) -> None:
        if (progress.layer_idx, progress.phase) == (2, "index"):
            raise Stop

    with pytest.raises(Stop):
        build(tmp_path / "a", on_progress=stop)
    assert scan_store(tmp_path / "a")[0] == []
    resumed, straight = build(tmp_path / "a"), build(tmp_path / "b")
    assert (resumed.resumed_at, straight.resumed_at) == (2, 0)
    for file in straight.path.glob("*.safetensors"):
        assert file.read_bytes() == (resumed.path / file.name).read_bytes(), file.name


def test_the_models_attention_is_restored_although_the_error_of_a_build_is_kept(tmp_path: Path) -> None:
    def stop(progress: BuildProgress) -> None:
        if progress.phase == "index":
            raise Stop

    before = loaded().model.config._attn_implementation
    with pytest.raises(Stop) as kept:
        build(tmp_path, on_progress=stop)
    assert loaded().model.config._attn_implementation == before, kept


@pytest.mark.parametrize(
    ("num_tokens", "match"), [(0, "0 tokens"), (1, "at least 256"), (255, "256"), (MAX_POSITIONS, "positions")]
)
def test_a_context_of_the_wrong_length_is_refused_before_anything_is_written(tmp_path, num_tokens, match) -> None:
    with pytest.raises(ContextError, match=match):
        build(tmp_path, num_tokens)
    assert list(tmp_path.iterdir()) == []


def test_nan_in_the_model_leaves_no_artifact(tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(CaptureError, match="NaN"):
        build_artifact(wrap_model(model, byte_tokenizer(), "broken"), token_ids(300), SketchConfig(), tmp_path)
    assert scan_store(tmp_path)[0] == []


def test_a_full_disk_is_refused_before_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((*real[:2], real[2], 0, 0, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr("shutil.disk_usage", lambda path: (100, 100, 0))
    with pytest.raises(StoreFullError, match="needs"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def _build_in_child(store: Path) -> None:
    torch.set_num_threads(1)
    build(store)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_build_killed_at_any_moment_never_leaves_a_broken_artifact(tmp_path: Path) -> None:
    """Builds are killed at random moments; whatever they leave, the next one completes and verifies."""
    chance = random.Random(7)
    whole_s = []
    for name in ("warm-up", "timing", "again"):
        started = time.monotonic()
        child = FORKS.Process(target=_build_in_child, args=(tmp_path / name,))
        child.start()
        child.join()
        assert child.exitcode == 0
        whole_s.append(time.monotonic() - started)
    want = scan_store(tmp_path / "timing")[0][0].artifact_id
    num_interrupted = 0
    for trial in range(NUM_KILLS):
        store = tmp_path / f"store-{trial}"
        child = FORKS.Process(target=_build_in_child, args=(store,))
        child.start()
        child.join(timeout=chance.uniform(0, 1.05 * min(whole_s[1:])))
        child.kill()
        child.join()
        listed = [summary.artifact_id for summary in scan_store(store)[0]]
        assert scan_store(store)[1] == {}
        assert listed in ([], [want])
        num_interrupted += not listed
        report = build(store)
        verify_artifact(report.path)
        assert report.artifact_id == want
    assert num_interrupted > NUM_KILLS // 3, "the kills came too late to mean anything"
