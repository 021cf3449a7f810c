"""The parts of `bench.decode` that are arithmetic: what it decodes with, its roofline, and how it keeps figures."""

import ctypes

import numpy as np
import pytest
import torch

from bench.decode.baselines import StreamedAttention, full_attention_ways, reference_attention, relative_error
from bench.decode.kernel_times import Span, own_times
from bench.decode.recorded import Recorded, WideIndex, of_variant
from bench.decode.roofline import best_ratio, full_bytes, index_bytes, weight_bytes
from bench.decode.sparse_op import SparseOp
from bench.decode.steps import STEPS_BETWEEN_LAYERS, RecordedQueries, apart, together
from bench.decode.tables import distinct_rows, make_table
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
from bench.decode.workload import STEPS_BETWEEN_REQUESTS, Workload
from bench.timing import GateError
from csattn.attention.device_reference import attend_step
from csattn.batch import StepRows, make_step_rows
from csattn.config import IndexConfig, SearchConfig, preset
from csattn.search.device import IndexShape
from csattn.table.rows import unpack_codes
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
    )


def test_tables_are_those_of_the_build(recording, rng):
    """The keys are centred, turned into the key basis, and belong to the index head's KV head."""
    for config, num_heads in ((preset("default", HEAD_DIM), NUM_KV_HEADS), (preset("paper", HEAD_DIM), 16)):
        index = make_index(rng, config, num_heads)
        keys = tile_keys(wide_keys(recording, 0), 192, torch.float32, seed=2)
        first, second = make_table(keys, index)
        head, subspace, centroid = num_heads - 1, 3, 5
        centred = (keys[-1].numpy() - index.key_mean[head]) @ index.key_basis[head]
        part = centred.reshape(192, config.num_subspaces, -1)[:, subspace]
        scores = part @ index.codebooks[head, subspace, centroid]
        if config.layout == "rows":
            codes = unpack_codes(first.numpy(), 192)[head, subspace, centroid]
            want = np.clip(scores / second[head, subspace, centroid].numpy(), -7, 7)
            assert np.abs(codes - want).max() < 0.51
        else:
            want = np.sort(scores)[::-1][:48]
            np.testing.assert_allclose(first[head, subspace, centroid].numpy(), want, rtol=2e-3)
            np.testing.assert_allclose(scores[second[head, subspace, centroid].numpy()], want, rtol=2e-3)


def test_distinct_rows_counts_a_row_once_for_a_group(rng):
    index = make_index(rng, preset("default", HEAD_DIM), 2)
    q = torch.from_numpy(rng.standard_normal((5, 6, HEAD_DIM), dtype=np.float32))
    counts = []
    for step in range(5):
        for head in range(2):
            taken = set()
            for member in range(3):
                parts = (q[step, head * 3 + member].numpy() @ index.query_basis[head]).reshape(
                    index.config.num_subspaces, -1
                )
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


class Listening:
    """An attention that keeps what it is asked."""

    lookahead, in_graph = True, True

    def __init__(self) -> None:
        self.tails = torch.zeros(9, 1, 1, 1, 2, HEAD_DIM)
        self.asked: list[tuple[str, int, torch.Tensor]] = []

    def begin_step(self, rows: StepRows) -> None:
        self.asked.clear()

    def look_ahead(self, layer_idx: int, q: torch.Tensor, rows: StepRows) -> None:
        self.asked.append(("ahead", layer_idx, q.clone()))

    def attend(self, layer_idx: int, q: torch.Tensor, rows: StepRows, out: torch.Tensor) -> None:
        self.asked.append(("own", layer_idx, q.clone()))

    def end_step(self, rows: StepRows) -> None: ...


def test_recorded_queries_take_the_place_of_the_models_step_by_step(recording):
    work = Workload(Recorded(recording, {}), 128, batch_size=2, device=torch.device("cpu"))
    listening = Listening()
    attention = RecordedQueries(listening, work)
    rows = make_step_rows(2, work.device)
    wrong = torch.full((2, NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM), torch.nan)
    for step in range(NUM_STEPS + 2):  # and round again
        attention.begin_step(rows)
        for layer_idx in range(9):
            if layer_idx < 8:
                attention.look_ahead(layer_idx + 1, wrong, rows)
            attention.attend(layer_idx, wrong, rows, wrong)
        attention.end_step(rows)
        asked = [(which, q) for which, layer_idx, q in listening.asked if layer_idx == 8]
        for (which, q), name in zip(asked, ("predicted", "own"), strict=True):
            assert which == {"predicted": "ahead", "own": "own"}[name]
            recorded = wide_queries(recording, 0, name).bfloat16()  # layer 8 is wide layer 0 again, at another step
            assert torch.equal(q[0], recorded[(step + STEPS_BETWEEN_LAYERS) % NUM_STEPS])
            assert torch.equal(q[1], recorded[(step + STEPS_BETWEEN_LAYERS + STEPS_BETWEEN_REQUESTS) % NUM_STEPS])


class SearchForTheFirst:
    """In place of a search on the device: chooses the first rows behind the sinks."""

    def __init__(self, shape: IndexShape, **sizes: object) -> None: ...

    def search(self, q, indexes, layer_idx, context_ids, out) -> None:
        for row, context_id in enumerate(context_ids.tolist()):
            top_k = int(indexes.top_ks[context_id])
            out.kv_indices[row, :, :top_k] = torch.arange(4, 4 + top_k, dtype=torch.int32)
            out.valid_len[row] = top_k


class AttentionAtAddresses:
    """In place of attention on the device: the definition, on rows that it finds where their source says."""

    wrong_by = 0.0

    def __init__(self, *, softmax_scale: float, **sizes: object) -> None:
        self._softmax_scale = softmax_scale

    def attend(self, q, resident, tails, far, far_rows, rows, out, moments=None) -> None:
        kv = [
            [
                self._rows(address, num, tails)
                for address, num in zip(source.addresses, source.rows_per_head, strict=True)
            ]
            for source in (resident, far)
        ]
        out.copy_(attend_step(q, kv[0], tails, kv[1], far_rows, rows, self._softmax_scale) + self.wrong_by)

    def _rows(self, address: torch.Tensor, rows_per_head: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        shape = like.shape[1], int(rows_per_head), 2, like.shape[-1]
        memory = (ctypes.c_uint16 * int(np.prod(shape))).from_address(int(address))
        return torch.from_numpy(np.frombuffer(memory, np.uint16)).view(torch.bfloat16).view(shape)


@pytest.fixture
def sparse_op(monkeypatch, recording, rng) -> SparseOp:
    monkeypatch.setattr("bench.decode.sparse_op.DeviceSearch", SearchForTheFirst)
    monkeypatch.setattr("bench.decode.sparse_op.DeviceAttention", AttentionAtAddresses)
    monkeypatch.setattr("bench.decode.sparse_op.MOST_SETS", 3)
    indexes = {"default": [make_index(rng, preset("default", HEAD_DIM), NUM_KV_HEADS) for _ in range(2)]}
    work = Workload(Recorded(recording, indexes), 1024, batch_size=2, device=torch.device("cpu"))
    return SparseOp(work, shape_named("llama-3.1-8b"), SearchConfig(), "default")


def test_steps_of_a_layer_attend_to_what_the_last_search_chose_in_it(sparse_op):
    assert sparse_op.num_sets == 3 and sparse_op.num_calls == 8 and sparse_op.top_k == 51
    sparse_op.check()
    sparse_op.plan(SearchConfig(keep=0.15, search_period=4))
    assert sparse_op.num_calls == 12 and sparse_op.top_k == 154
    for i in range(12):
        sparse_op.step_call(i)()
    searched = [int(selection.valid_len.sum()) for selection in sparse_op.selections]
    assert [i for i, rows in enumerate(searched) if rows] == [0, 4, 8]
    assert torch.isfinite(sparse_op.out).all()


def test_a_wrong_result_is_not_timed(sparse_op, monkeypatch):
    monkeypatch.setattr(AttentionAtAddresses, "wrong_by", 0.1)
    with pytest.raises(GateError, match="off by"):
        sparse_op.check()


def test_what_leaves_the_rest_out_where_it_is_asked_for_is_not_timed(sparse_op):
    sparse_op.plan(SearchConfig(estimate_rest=True))
    with pytest.raises(GateError, match="off by"):
        sparse_op.check()


def test_a_variant_names_an_index_and_whether_the_rest_is_estimated():
    assert of_variant("default", SearchConfig()) == ("default", SearchConfig())
    assert of_variant("pooled+rest", SearchConfig(keep=0.1)) == ("pooled", SearchConfig(keep=0.1, estimate_rest=True))


@pytest.mark.parametrize("num_contexts", [3, 1])
def test_full_attention_reads_a_shared_context_once_for_all_requests(num_contexts):
    q = torch.randn(3, 8, 16)
    k, v = (torch.randn(num_contexts, 2, 33, 16) for _ in range(2))
    out = apart(full_attention_ways()["math, packed"](together(q, k), k, v), 3, k)
    want = reference_attention(q[:, :, None], *(x.expand(3, -1, -1, -1) for x in (k, v)))[:, :, 0]
    assert relative_error(out, want) < 1e-5


@pytest.mark.gpu
def test_streamed_attention_reads_a_layer_when_it_is_there_and_not_after_it_is_gone():
    shape = (2, 2, 8192, 64)  # copies take longer than the attention before them
    layers = [
        tuple(torch.randn(shape, dtype=torch.bfloat16).pin_memory() for _ in range(2)) for _ in range(3)
    ]  # an odd number: layers change buffers from round to round
    streamed = StreamedAttention(layers, full_attention_ways()["flash, packed"])
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16, device="cuda")
    outs = [streamed.attend(layer_idx, q) for _ in range(4) for layer_idx in range(3)]
    for i, out in enumerate(outs):
        k, v = (t.cuda() for t in layers[i % 3])
        assert relative_error(out, reference_attention(q, k, v)) < 0.02
    streamed.finish()
    assert relative_error(streamed.attend(0, q), outs[0]) == 0


def test_a_kernel_that_starts_early_counts_from_the_end_of_the_one_before_on_its_stream() -> None:
    spans = [Span("match", 1, 0, 5), Span("score", 1, 2, 15), Span("other", 2, 3, 9), Span("match", 1, 20, 24)]
    assert own_times(spans) == {"match": 9, "score": 10, "other": 6}
