"""The benchmarks of endless generation and of growing tails measure what they say."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from bench import streaming
from bench.table_drift import makings, mechanism, quality
from bench.timing import GateError
from csattn.config import preset
from csattn.table.tail import make_tail
from tests.tiny import loaded, token_ids
from workers.streaming.config import StreamConfig

HEAD_DIM, CONTEXT_LEN = 16, 200
FREQUENCIES = (100.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))).astype(np.float32)


@pytest.fixture(scope="module")
def layer() -> makings.Layer:
    """Keys near a few points, and queries that like some of them, after RoPE."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2, 5, HEAD_DIM))[:, rng.integers(0, 5, 800)] + 0.3 * rng.standard_normal(
        (2, 800, HEAD_DIM)
    )
    q = np.repeat(k, 2, axis=0)[:, rng.permutation(800)] + rng.standard_normal((4, 800, HEAD_DIM))
    turned = [makings.turned_by(x.astype(np.float32), np.arange(800), FREQUENCIES) for x in (q, k)]
    return makings.Layer(*turned, FREQUENCIES)


def test_the_definition_of_the_benchmark_is_the_stream() -> None:
    model, config = loaded(), StreamConfig(sink_len=4, window_len=12)
    ids = torch.from_numpy(token_ids(61)).long()
    got = streaming.stream_nll(model, config, ids, 7)
    torch.testing.assert_close(got, streaming.definition(model, ids, config), rtol=1e-3, atol=1e-3)
    other = streaming.definition(model, ids, StreamConfig(sink_len=2, window_len=14))
    assert (got - other).abs().max() > 0.01, "which rows are kept should matter"


@pytest.mark.parametrize("policy", streaming.MEMORY_CONFIGS)
def test_memory_is_read_while_a_policy_generates(policy) -> None:
    measured = streaming.memory(streaming.MEMORY_CONFIGS[policy], 60)
    assert (measured["config"]["policy"], measured["num_tokens"]) == (policy, 60)
    assert 10 < measured["resident_first_mb"] <= measured["resident_most_mb"]


def test_scores_depend_on_distances_alone(layer) -> None:
    q, k = layer.q[:, 700:710], layer.k.repeat(2, axis=0)[:, 600:650]
    turned_q, turned_k = (makings.turned_by(x, -500, FREQUENCIES) for x in (q, k))
    np.testing.assert_allclose(turned_q @ turned_k.mT, q @ k.mT, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(makings.turned_by(turned_q, np.full(10, 500), FREQUENCIES), q, atol=1e-4)


def test_every_making_has_all_rows_and_scores_that_compare(layer) -> None:
    """With 8 bits, many centroids and few dimensions, the scores of all parts are nearly the products themselves."""
    config = makings.replace(preset("default", HEAD_DIM), score_bits=8, num_centroids=128, num_subspaces=16)
    with ThreadPoolExecutor(1) as threads:
        built, seconds = makings.row_makings(layer, CONTEXT_LEN, 300, config, threads)
    assert set(seconds) == {"rebuilt", "second index"}
    for name, parts in built.items():
        assert sum(part.num_rows for part in parts) == CONTEXT_LEN + 300, name
    q = layer.q[3, 520]
    exact = layer.k[1, : CONTEXT_LEN + 300] @ q
    for name in ("rebuilt", "second index", "turned", "foreseen"):
        scores = np.concatenate([part.scores(q, 1)[0] for part in built[name]])
        assert np.corrcoef(scores, exact)[0, 1] > 0.98, name
        assert abs(np.mean(scores - exact)) < 0.1 * exact.std(), name


class Exact:
    """A part that knows the products."""

    def __init__(self, layer: makings.Layer, rows: slice, noise: float = 0.0):
        self.layer, self.rows, self.noise = layer, rows, noise
        self.num_rows = rows.stop - rows.start

    def scores(self, q, head):
        noise = self.noise * np.random.default_rng(1).standard_normal(self.num_rows)
        return (self.layer.k[head, self.rows] @ q).astype(np.float64) + noise, np.ones(self.num_rows, np.bool_)


def test_exact_scores_find_everything_and_noisy_ones_do_not(layer) -> None:
    tokens = np.arange(700, 705)
    parts = [Exact(layer, slice(0, 200)), Exact(layer, slice(200, 600))]
    best = quality.quality(layer, tokens, 200, parts)
    assert (best["recall"], best["context_recall"], best["tail_recall"]) == (1, 1, 1)
    assert best["mass"] == pytest.approx(1)
    assert best["score_error"] == pytest.approx(0, abs=1e-6)
    apart = quality.quality(layer, tokens, 200, parts, shared_out=True)
    noisy = quality.quality(layer, tokens, 200, [parts[0], Exact(layer, slice(200, 600), noise=5.0)])
    assert 0.2 < apart["recall"] < 1
    assert noisy["tail_recall"] < 0.9
    assert noisy["mass"] < best["mass"]


@pytest.mark.parametrize("name", ["default", "lists"])
def test_the_long_tail_passes_its_gates_and_a_wrong_code_does_not(layer, name) -> None:
    with ThreadPoolExecutor(1) as threads:
        index = layer.index_of(slice(0, CONTEXT_LEN), preset(name, HEAD_DIM), threads)
    points = mechanism.measure_mechanism(layer, index, [0, 40, 130])
    assert [point["tail_len"] for point in points] == [0, 40, 130]
    assert points[2]["tail_bytes"] >= points[1]["tail_bytes"] > 0
    if name == "default":
        tail = makings.tail_of(index, layer.k[:, CONTEXT_LEN : CONTEXT_LEN + 10])
        tail.codes[0, 0, 0, 5] += 1
        with mechanism.SearchPool(1) as pool, pytest.raises(GateError, match="row 5"):
            mechanism.check_bits(layer, index, tail, layer.k, pool)
    assert make_tail(index).num_rows == 0


def test_clipping_and_distance_from_the_centroids_are_seen(layer) -> None:
    with ThreadPoolExecutor(1) as threads:
        index = layer.index_of(slice(0, CONTEXT_LEN), preset("default", HEAD_DIM), threads)
    keys = layer.k[:, :50]
    assert quality.clipped_share(keys, index) == 0
    assert quality.clipped_share(20 * keys, index) > 0.3
    near, far = layer.q[:, :CONTEXT_LEN], np.random.default_rng(2).standard_normal((4, 200, HEAD_DIM), dtype=np.float32)
    assert quality.centroid_cosine(far, index) < quality.centroid_cosine(near, index) <= 1
