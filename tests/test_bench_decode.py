"""The parts of `bench.decode` that are arithmetic: what it decodes with, its roofline, and how it keeps figures."""

import json

import numpy as np
import pytest
import torch

from bench.decode.recorded import WideIndex
from bench.decode.results import Results, merge_files
from bench.decode.roofline import best_ratio, full_bytes, index_bytes, weight_bytes
from bench.decode.tables import centroid_scores, distinct_rows, row_codes, score_lists
from bench.decode.widened import (
    GROUP_SIZE,
    HEAD_DIM,
    NUM_KV_HEADS,
    Recording,
    recorded_heads,
    tile_keys,
    wide_keys,
    wide_queries,
)
from csattn.config import IndexConfig, preset
from csattn.table.lists import ListTable
from csattn.table.rows import pack_codes
from workers.model_runner.shapes import shape_named

NUM_LAYERS, NUM_RECORDED_HEADS, GROUP, CONTEXT_LEN, NUM_STEPS, DIM = 4, 3, 3, 96, 10, 64


@pytest.fixture
def recording(rng: np.random.Generator) -> Recording:
    steps = NUM_LAYERS, NUM_RECORDED_HEADS * GROUP, NUM_STEPS, DIM
    return Recording(
        keys=rng.integers(-127, 128, (NUM_LAYERS, NUM_RECORDED_HEADS, CONTEXT_LEN, DIM), dtype=np.int8),
        key_steps=rng.uniform(0.01, 0.02, (NUM_LAYERS, NUM_RECORDED_HEADS, 1, DIM)).astype(np.float32),
        own=rng.standard_normal(steps).astype(np.float16),
        predicted=rng.standard_normal(steps).astype(np.float16),
        layer_ids=np.arange(NUM_LAYERS),
        text_sha256="",
    )


@pytest.mark.parametrize("wide_idx", [0, 1, 7])
def test_wide_heads_score_as_the_recorded_ones(recording, wide_idx):
    keys, q = wide_keys(recording, wide_idx), wide_queries(recording, wide_idx, "own")
    assert keys.shape == (NUM_KV_HEADS, CONTEXT_LEN, HEAD_DIM)
    assert q.shape == (NUM_STEPS, NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM)
    for head, (layer, kv_head) in enumerate(recorded_heads(wide_idx, NUM_LAYERS, NUM_RECORDED_HEADS)):
        k = torch.from_numpy(recording.keys[layer, kv_head] * recording.key_steps[layer, kv_head])
        recorded_q = torch.from_numpy(recording.own[layer, kv_head * GROUP : (kv_head + 1) * GROUP]).float()
        want = torch.einsum("gsd,nd->sgn", recorded_q, k) * DIM**-0.5
        want = torch.cat([want, want[:, :1].roll(NUM_STEPS // 2, dims=0)], dim=1)
        group = q[:, head * GROUP_SIZE : (head + 1) * GROUP_SIZE]
        got = torch.einsum("sgd,nd->sgn", group, keys[head]) * HEAD_DIM**-0.5
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_heads_of_a_wide_layer_come_from_different_heads():
    for wide_idx in range(8):
        assert len(set(recorded_heads(wide_idx, NUM_LAYERS, NUM_RECORDED_HEADS))) == NUM_KV_HEADS


@pytest.mark.parametrize("context_len", [1, 95, 96, 97, 500])
def test_tiled_keys_repeat_the_recorded_ones_with_a_little_noise(recording, context_len):
    keys = wide_keys(recording, 0)
    tiled = tile_keys(keys, context_len, torch.float32, seed=1)
    assert tiled.shape == (NUM_KV_HEADS, context_len, HEAD_DIM)
    torch.testing.assert_close(tiled[:, :96], keys[:, :context_len], rtol=0, atol=0)
    off = tiled - keys[:, torch.arange(context_len) % CONTEXT_LEN]
    if context_len > 200:
        share = off[:, 96:].std() / keys.std()
        assert 0.08 < share < 0.12
    assert torch.equal(tiled, tile_keys(keys, context_len, torch.float32, seed=1))


def make_index(rng: np.random.Generator, config: IndexConfig, num_heads: int) -> WideIndex:
    shape = num_heads, config.num_subspaces, config.num_centroids
    return WideIndex(
        config,
        query_basis=rng.standard_normal((num_heads, HEAD_DIM, HEAD_DIM), dtype=np.float32),
        key_basis=rng.standard_normal((num_heads, HEAD_DIM, HEAD_DIM), dtype=np.float32),
        key_mean=rng.standard_normal((num_heads, HEAD_DIM), dtype=np.float32),
        codebooks=rng.standard_normal((*shape, HEAD_DIM // config.num_subspaces), dtype=np.float32),
        scales=rng.uniform(4, 8, shape).astype(np.float32),
    )


def test_codes_are_rounded_scores_in_the_layout_of_row_tables(recording, rng):
    index = make_index(rng, preset("default", HEAD_DIM), NUM_KV_HEADS)
    keys = tile_keys(wide_keys(recording, 0), 192, torch.float32, seed=2)
    codes = row_codes(keys, index)
    for head in (0, 7):
        centred = (keys[head].numpy() - index.key_mean[head]) @ index.key_basis[head]
        parts = centred.reshape(192, index.config.num_subspaces, -1)
        scores = np.einsum("mcd,nmd->mcn", index.codebooks[head], parts)
        want = np.clip(np.rint(scores / index.scales[head][..., None]), -7, 7).astype(np.int8)
        differ = codes[head].numpy() != pack_codes(want, 4)
        assert differ.mean() < 1e-3  # between two codes, rounding decides


def test_lists_hold_the_best_keys_in_order(recording, rng):
    config = preset("paper", HEAD_DIM)
    index = make_index(rng, config, NUM_KV_HEADS * 2)  # two index heads for each KV head
    keys = tile_keys(wide_keys(recording, 0), 128, torch.float32, seed=2)
    scores, indices = score_lists(keys, index)
    assert scores.shape == (NUM_KV_HEADS * 2, config.num_subspaces, config.num_centroids, 32)
    ListTable(indices.numpy(), scores.numpy(), 128).check()
    head, subspace, centroid = 5, 2, 3
    row = centroid_scores(keys, index, head, 0)[subspace, centroid].half()
    assert set(indices[head, subspace, centroid].tolist()) == set(
        row.argsort(descending=True, stable=True)[:32].tolist()
    )


def test_distinct_rows_counts_a_row_once_for_a_group(rng):
    index = make_index(rng, preset("default", HEAD_DIM), 2)
    q = torch.from_numpy(rng.standard_normal((5, 6, HEAD_DIM), dtype=np.float32))
    counts = []
    for step in range(5):
        for head in range(2):
            taken = set()
            for member in range(3):
                parts = (q[step, head * 3 + member].numpy() @ index.query_basis[head]).reshape(32, -1)
                ids = np.einsum("md,mcd->mc", parts, index.codebooks[head]).argmax(1)
                taken |= set(enumerate(ids.tolist()))
            counts.append(len(taken))
    assert distinct_rows(q, index) == pytest.approx(np.mean(counts))


def test_the_roofline_of_an_8b_model():
    shape = shape_named("llama-3.1-8b")
    config = IndexConfig(
        layout="rows", num_subspaces=16, num_centroids=64, basis="key_whitened", center_keys=True, weigh_by_norm=True,
        share_group=True,
    )  # fmt: skip
    assert weight_bytes(shape) == pytest.approx(16.06e9, rel=1e-3)
    assert full_bytes(shape, 1) * shape.num_layers == 131_072
    assert index_bytes(shape, config, 131_072) == full_bytes(shape, 131_072)
    ratios = {
        (context_len, batch_size): round(best_ratio(shape, config, context_len, batch_size, 0.05), 2)
        for context_len in (32_768, 131_072)
        for batch_size in (1, 4)
    }
    assert ratios == {(32_768, 1): 1.23, (32_768, 4): 1.85, (131_072, 1): 1.85, (131_072, 4): 3.56}


def test_results_outlive_the_run_and_are_not_measured_twice(tmp_path):
    path = tmp_path / "new" / "results.json"
    key = {"kind": "op", "context_len": 8192, "batch_size": 1, "variant": "full", "placement": "device"}
    first = Results(path, {"machine": "a"})
    assert not first.has(**key)
    first.add({**key, "p50_us": 1.0})
    first.add({**key, "variant": "window", "refused": "no room"})
    again = Results(path, {"machine": "b"})
    assert again.has(**key) and not again.has(**{**key, "variant": "window"})
    again.add({**key, "p50_us": 2.0})
    assert json.loads(path.read_text())["machine"] == "b"
    other = tmp_path / "other.json"
    Results(other, {"machine": "c"}).add({**key, "p50_us": 3.0})
    merged = merge_files([path, other])
    assert sorted(case.get("p50_us", 0) for case in merged["cases"]) == [0, 3.0]
