"""The arithmetic of `bench.decode`, and its steps with the CUDA kernels compiled for the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, Qwen3_5TextConfig

from bench.decode import other_methods, other_steps, placements, workload
from bench.decode.baselines import full_attention_ways, reference_attention, relative_error
from bench.decode.end_to_end import make_runner
from bench.decode.kernel_times import Span, own_times
from bench.decode.options import Options
from bench.decode.other_layers import other_bytes, with_other_layers
from bench.decode.recording import Recording, load_recording, save_recording
from bench.decode.roofline import full_bytes, index_bytes, layer_bytes, row_bytes, weight_bytes
from bench.decode.sparse_op import SparseOp
from bench.decode.steps import STEPS_BETWEEN_LAYERS, RecordedQueries, merge_requests, split_requests
from bench.decode.variants import INDEXES, of_variant, require_known
from bench.decode.widened import (
    NUM_WIDE_LAYERS,
    Heads,
    recorded_heads,
    tile_rows,
    wide_context_queries,
    wide_queries,
    wide_rows,
)
from bench.decode.workload import STEPS_BETWEEN_REQUESTS, Workload, clone_index
from bench.random_weights import random_weights
from bench.shapes import shape_named
from bench.timing import GateError
from csattn.attention import device as attention
from csattn.attention import every_row
from csattn.batch import StepRows, make_step_rows
from csattn.config import IndexConfig, SearchConfig, SketchConfig
from csattn.errors import ConfigError
from csattn.index import ListIndex
from csattn.models.description import describe
from csattn.search.device import compiling, index_shape, to_device
from csattn.sketch import SketchIndex
from offload import gather, slot_cache, step_mail
from offload.codecs.formats import KvFormat
from offload.pinned import PinnedRows
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.search.shapes import shape_of

NUM_LAYERS, NUM_RECORDED_HEADS, GROUP, CONTEXT_LEN, NUM_STEPS, DIM = 4, 3, 3, 96, 10, 64
SHAPE = shape_named("llama-3.1-8b")
HEADS = Heads.of(SHAPE)
NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = HEADS.num_kv_heads, HEADS.group_size, HEADS.head_dim
# for tests that run kernels or make lists, in time proportional to heads: fewer heads of the same width and group size
FEW = replace(SHAPE, num_q_heads=2 * GROUP_SIZE, num_kv_heads=2)
FEW_HEADS = Heads.of(FEW)


@pytest.fixture(scope="module")
def recording() -> Recording:
    rng = np.random.default_rng(20_240_607)
    steps, rows = (NUM_LAYERS, NUM_RECORDED_HEADS * GROUP), (NUM_LAYERS, NUM_RECORDED_HEADS)
    return Recording(
        keys=rng.integers(-127, 128, (*rows, CONTEXT_LEN, DIM), dtype=np.int8),
        key_steps=rng.uniform(0.01, 0.02, (*rows, 1, DIM)).astype(np.float32),
        values=rng.integers(-127, 128, (*rows, CONTEXT_LEN, DIM), dtype=np.int8),
        value_steps=rng.uniform(0.01, 0.02, (*rows, 1, DIM)).astype(np.float32),
        context_q=rng.standard_normal((*steps, 24, DIM)).astype(np.float16),
        own=rng.standard_normal((*steps, NUM_STEPS, DIM)).astype(np.float16),
        predicted=rng.standard_normal((*steps, NUM_STEPS, DIM)).astype(np.float16),
        layer_ids=np.arange(NUM_LAYERS),
        stretch=1.0,
        text_sha256="",
    )


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    """Build an index of the same rows once for all tests: k-means takes longer than the tests themselves."""
    build, built = Workload._index_arrays, {}

    def arrays(work: Workload, layer_idx: int, config: IndexConfig) -> dict[str, torch.Tensor]:
        key = work.context_len, workload.DTYPE, layer_idx % NUM_WIDE_LAYERS, config
        if key not in built:
            built[key] = build(work, layer_idx, config)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workload, "_index_arrays", arrays)
        yield


@pytest.mark.parametrize("wide_idx", [0, 1, 3])
def test_wide_heads_give_the_scores_of_the_recorded_heads(recording, wide_idx):
    rows, q = wide_rows(recording, wide_idx, HEADS), wide_queries(recording, wide_idx, HEADS, "own")
    assert rows.shape == (NUM_KV_HEADS, CONTEXT_LEN, 2, HEAD_DIM)
    assert q.shape == (NUM_STEPS, NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM)
    for head, (layer, kv_head) in enumerate(recorded_heads(wide_idx, HEADS, NUM_LAYERS, NUM_RECORDED_HEADS)):
        k = torch.from_numpy(recording.keys[layer, kv_head] * recording.key_steps[layer, kv_head])
        recorded_q = torch.from_numpy(recording.own[layer, kv_head * GROUP : (kv_head + 1) * GROUP]).float()
        want = torch.einsum("gsd,nd->sgn", recorded_q, k) * DIM**-0.5
        want = torch.cat([want, want[:, :1].roll(NUM_STEPS // 2, dims=0)], dim=1)
        group = q[:, head * GROUP_SIZE : (head + 1) * GROUP_SIZE]
        got = torch.einsum("sgd,nd->sgn", group, rows[head, :, 0]) * HEAD_DIM**-0.5
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_distances_between_wide_values_are_proportional_to_the_recorded_ones(recording):
    wide, recorded = wide_rows(recording, 0, HEADS)[0, :, 1], recording.rows(0)[0, :, 1]
    ratio = torch.cdist(wide, wide)[0, 1:] / torch.cdist(recorded, recorded)[0, 1:]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_a_recording_is_loaded_as_saved_and_an_incomplete_one_refused(recording, tmp_path):
    path = tmp_path / "rows.npz"
    save_recording(recording, path)
    found = load_recording(path)
    assert np.array_equal(found.values, recording.values) and found.describe()["context_len"] == CONTEXT_LEN
    np.savez(path, keys=recording.keys)
    with pytest.raises(GateError, match="has no key_steps, values"):
        load_recording(path)


def test_heads_of_a_wide_layer_come_from_different_recorded_heads():
    for wide_idx in range(8):
        assert len(set(recorded_heads(wide_idx, HEADS, NUM_LAYERS, NUM_RECORDED_HEADS))) == NUM_KV_HEADS


@pytest.mark.parametrize("context_len", [1, 95, 96, 97, 500])
def test_a_context_is_noisy_copies_followed_by_the_recorded_rows(recording, context_len):
    rows = wide_rows(recording, 0, HEADS)
    tiled = tile_rows(rows, context_len, torch.float32, seed=1)
    assert tiled.shape == (NUM_KV_HEADS, context_len, 2, HEAD_DIM)
    torch.testing.assert_close(tiled[:, -96:], rows[:, -context_len:], rtol=0, atol=0)
    off = tiled - rows[:, torch.arange(-context_len, 0) % CONTEXT_LEN]
    if context_len > 200:
        for part in (0, 1):
            assert 0.08 < off[:, :-96, part].std() / rows[:, :, part].std() < 0.12
    assert torch.equal(tiled, tile_rows(rows, context_len, torch.float32, seed=1))


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_on_the_device_equals_the_built_one(recording, name):
    work = Workload(recording, FEW_HEADS, 192, batch_size=1, device=torch.device("cpu"))
    config = INDEXES[name]
    got, (built,) = work.index(0, config), work.host_indexes(1, config)
    want = to_device(built, work.device)
    assert type(got) is type(want) and len(got.parts) == len(want.parts)
    for part, wanted in zip(got.parts, want.parts, strict=True):
        assert torch.equal(part, wanted) and part.is_contiguous()
    assert [part.shape for part in clone_index(got).parts] == [part.shape for part in got.parts]
    heads = FEW.num_q_heads, FEW.num_kv_heads
    assert index_shape(config, *heads, FEW.head_dim) == shape_of(built, FEW.num_q_heads)
    if isinstance(built, SketchIndex):
        read = built.num_bytes
    else:
        assert isinstance(built, ListIndex)
        read = sum(part.nbytes for part in got.parts[1:])  # without centroids
    assert index_bytes(FEW, config, 192) == read


def test_host_indexes_of_different_layers_share_no_memory(recording):
    work = Workload(recording, HEADS, 192, batch_size=1, device=torch.device("cpu"))
    layers = work.host_indexes(NUM_WIDE_LAYERS + 1, INDEXES["default"])
    assert len({layer.codes.ctypes.data for layer in layers}) == NUM_WIDE_LAYERS + 1
    np.testing.assert_array_equal(layers[0].codes, layers[-1].codes)
    assert not np.array_equal(layers[0].codes, layers[1].codes)


def test_a_workload_describes_its_rows(recording):
    device = torch.device("cpu")
    assert Workload(recording, HEADS, 96, 1, device).data == "the last 96 of 96 recorded rows"
    assert Workload(recording, HEADS, 97, 1, device).data == "96 recorded rows behind copies of them with noise"


def test_context_queries_have_the_shape_of_the_wide_heads(recording):
    assert wide_context_queries(recording, 1, HEADS).shape == (NUM_KV_HEADS * GROUP_SIZE, 24, HEAD_DIM)


def test_the_roofline_of_an_8b_model_has_the_known_figures():
    config = INDEXES["default"]
    assert weight_bytes(SHAPE) == pytest.approx(16.06e9, rel=1e-3)
    assert full_bytes(SHAPE, 1) * SHAPE.num_layers == 131_072
    codes, marks, transforms = 131_072 * 8 * 32, 131_072 * 8 // 8, 16 * 8 * 128 * (8 + 4 * 96)
    assert index_bytes(SHAPE, config, 131_072) == codes + marks + transforms


def test_requests_that_share_a_context_read_its_sketch_once_and_rows_separately():
    def parts(variant: str, num_contexts: int, lookahead: int = 0) -> dict[str, int]:
        config, search = of_variant(variant, SearchConfig(lookahead=lookahead))
        return layer_bytes(SHAPE, config, search, 8192, 324, batch_size=4, num_contexts=num_contexts)

    sketch = index_bytes(SHAPE, INDEXES["default"], 8192)
    assert parts("default", 4) == {"index": 4 * sketch, "rows": 4 * row_bytes(SHAPE) * (164 + 324)}
    assert parts("default", 1)["index"] == sketch and parts("default", 1)["rows"] == parts("default", 4)["rows"]
    assert parts("default", 1, lookahead=1)["index"] == 2 * sketch  # read to choose, and for the rest
    assert parts("default+none", 1, lookahead=1)["index"] == sketch
    assert parts("lists", 1)["index"] == parts("lists", 4)["index"] == 4 * 32 * 8 * (8 * (1024 // 8 + 4) + 2048 * 2)
    assert parts("lists+moments", 4)["rows"] - parts("lists", 4)["rows"] == 4 * 8 * 130 * 2 * 128 * 2
    assert parts("paper", 4)["rows"] == 4 * row_bytes(SHAPE) * (4 * 164 + 324)


class Listening:
    """An attention that records its calls."""

    lookahead, in_graph = True, True

    def __init__(self) -> None:
        self.tails = torch.zeros(9, 1, 1, 1, 2, HEAD_DIM)
        self.calls: list[tuple[str, int, torch.Tensor]] = []

    def begin_step(self, rows: StepRows) -> None:
        self.calls.clear()

    def look_ahead(self, layer_idx: int, q: torch.Tensor, rows: StepRows) -> None:
        self.calls.append(("ahead", layer_idx, q.clone()))

    def attend(self, layer_idx: int, q: torch.Tensor, rows: StepRows, out: torch.Tensor) -> None:
        self.calls.append(("own", layer_idx, q.clone()))

    def end_step(self, rows: StepRows) -> None: ...


def test_recorded_queries_replace_the_models_at_each_step(recording):
    work = Workload(recording, HEADS, 128, batch_size=2, device=torch.device("cpu"))
    listening = Listening()
    attention = RecordedQueries(listening, work)
    rows = make_step_rows(2, work.device)
    wrong = torch.full((2, NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM), torch.nan)
    for step in range(NUM_STEPS + 2):  # recorded steps are used cyclically
        attention.begin_step(rows)
        for layer_idx in range(9):
            if layer_idx < 8:
                attention.look_ahead(layer_idx + 1, wrong, rows)
            attention.attend(layer_idx, wrong, rows, wrong)
        attention.end_step(rows)
        calls = [(which, q) for which, layer_idx, q in listening.calls if layer_idx == 8]
        for (which, q), name in zip(calls, ("predicted", "own"), strict=True):
            assert which == {"predicted": "ahead", "own": "own"}[name]
            recorded = wide_queries(
                recording, 0, HEADS, name
            ).bfloat16()  # layer 8 is the third copy of wide layer 0, at another step
            assert torch.equal(q[0], recorded[(step + 2 * STEPS_BETWEEN_LAYERS) % NUM_STEPS])
            assert torch.equal(q[1], recorded[(step + 2 * STEPS_BETWEEN_LAYERS + STEPS_BETWEEN_REQUESTS) % NUM_STEPS])


def make_op(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, variant: str = "default", is_shared: bool = False
) -> SparseOp:
    monkeypatch.setattr("bench.decode.sparse_op.MOST_SETS", 2)
    monkeypatch.setattr(placements, "require_memory", ignore)
    options = Options(shape=FEW, search=SearchConfig(keep=0.05, window_len=32), ceilings={}, seconds=0.0)
    return SparseOp(Workload(recording, FEW_HEADS, 300, 2, DEVICE, is_shared), options, variant)


@pytest.fixture
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, attention, every_row, gather, slot_cache, step_mail, other_methods)
    if DEVICE.type == "cpu":  # the emulation has no tensor cores
        for module in (workload, placements, other_steps):
            monkeypatch.setattr(module, "DTYPE", torch.float32)


@pytest.mark.parametrize("variant", ["default", "default+none", "lists", "lists+moments", "paper"])
def test_steps_of_every_variant_attend_as_defined(kernels, recording, monkeypatch, variant):
    op = make_op(recording, monkeypatch, variant)
    assert op.num_sets == 2 and len(op.calls) == 8
    op.check()
    op.calls[1]()
    assert torch.isfinite(op.out).all()


def test_requests_may_share_a_context(kernels, recording, monkeypatch):
    op = make_op(recording, monkeypatch, is_shared=True)
    assert op.stored_bytes == make_op(recording, monkeypatch).stored_bytes // 2
    op.check()


def test_a_step_with_a_wrong_result_is_refused(kernels, recording, monkeypatch):
    op = make_op(recording, monkeypatch)
    op.kv = op.kv + 0.2  # the reference reads other values than the steps
    with pytest.raises(GateError, match="off by"):
        op.check()


def whole_step_options(monkeypatch: pytest.MonkeyPatch, codec: str | None) -> Options:
    unlocked = partial(PinnedRows, register=ignore, unregister=ignore)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(placements, "PinnedRows", unlocked)
    for module in (placements, other_steps):
        monkeypatch.setattr(module, "require_memory", ignore)
    form = None if codec is None else KvFormat.parse(codec)
    shape = replace(FEW, layers=FEW.layers[:2])
    return Options(shape=shape, search=SearchConfig(), ceilings={}, seconds=0.0, kv_format=form)


def test_streamed_steps_attend_to_all_rows(kernels, recording, monkeypatch):
    work, options = Workload(recording, FEW_HEADS, 300, 2, DEVICE), whole_step_options(monkeypatch, None)
    prepared = placements.streamed(work, options)
    rows, q, kv = work.step_rows(1), work.queries(1)[0].contiguous(), work.separate_kv(1)
    prepared.attention.tails.zero_()
    k, v = (torch.cat([of_context, torch.zeros_like(of_context[:, :, :1])], dim=2) for of_context in kv)
    out = torch.zeros_like(q)
    prepared.attention.begin_step(rows)
    for layer_idx in range(2):
        prepared.attention.attend(layer_idx, q, rows, out)
    assert relative_error(out, reference_attention(q[:, :, None], k, v)[:, :, 0]) < 0.02
    assert prepared.facts(1)["link_bytes"] == 2 * sum(of_context.nbytes for of_context in kv)
    prepared.close()


@pytest.mark.parametrize(("variant", "codec"), [("default", None), ("lists", None), ("default", "q8_0")])
def test_all_placements_give_the_same_output(kernels, recording, monkeypatch, variant, codec):
    work, options = Workload(recording, FEW_HEADS, 300, 2, DEVICE), whole_step_options(monkeypatch, codec)
    outs = []
    for placement in ("device", "hybrid", "host"):
        prepared = placements.placed(work, options, variant, placement, SearchConfig(keep=0.05, window_len=32))
        attended, rows = RecordedQueries(prepared.attention, work), work.step_rows(64)
        out = torch.zeros(2, 2, FEW.num_q_heads, FEW.head_dim, dtype=workload.DTYPE, device=DEVICE)
        prepared.start_counting()
        attended.begin_step(rows)
        for layer_idx in range(2):
            attended.attend(layer_idx, out[0], rows, out[layer_idx])
        attended.end_step(rows)
        assert prepared.step_bytes > 0 and prepared.facts(1).keys() >= ({"link_bytes"} if outs else set())
        prepared.close()
        outs.append(out)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])
    assert outs[0].abs().min() > 0


def ignore(*_: object, **__: object) -> None:
    """Stand in for locking memory, and for checking that it suffices."""


def test_a_step_that_omits_the_requested_rest_is_refused(kernels, recording, monkeypatch):
    op = make_op(recording, monkeypatch, "default+none")
    op.search = replace(op.search, rest="sketch")
    with pytest.raises(GateError, match="off by"):
        op.check()


def test_a_variant_names_an_index_and_a_kind_of_rest():
    search = SearchConfig(keep=0.1)
    assert of_variant("default", search) == (SketchConfig(), replace(search, rest="sketch"))
    assert of_variant("default+none", search)[1].rest == "none" and of_variant("lists", search)[1].rest == "none"
    assert of_variant("lists+moments", search) == (INDEXES["lists"], replace(search, rest="moments"))
    with pytest.raises(ConfigError, match="needs an index that is a sketch"):
        of_variant("lists+sketch", search)


def test_an_unknown_variant_is_refused_with_the_known_ones():
    search = SearchConfig()
    require_known(["full", "default+none", "lists"], ["full", "window"], search)
    with pytest.raises(GateError, match=r"variants are full, window, default, lists, paper, .*'ful' is none of them"):
        require_known(["full", "ful"], ["full", "window"], search)
    with pytest.raises(ConfigError, match="sketches"):
        require_known(["default+sketches"], [], search)


@pytest.mark.parametrize("num_contexts", [3, 1])
def test_full_attention_reads_a_shared_context_once_for_all_requests(num_contexts):
    q = torch.randn(3, 8, 16)
    k, v = (torch.randn(num_contexts, 2, 33, 16) for _ in range(2))
    out = split_requests(full_attention_ways()["math, packed"](merge_requests(q, k), k, v), 3, k)
    want = reference_attention(q[:, :, None], *(x.expand(3, -1, -1, -1) for x in (k, v)))[:, :, 0]
    assert relative_error(out, want) < 1e-5


def test_overlapping_kernels_of_a_stream_count_from_the_previous_ones_end() -> None:
    spans = [Span("match", 1, 0, 5), Span("score", 1, 2, 15), Span("other", 2, 3, 9), Span("match", 1, 20, 24)]
    assert own_times(spans) == {"match": 9, "score": 10, "other": 6}


OTHER_KINDS = {
    "windows, sinks, experts": GptOssConfig(
        num_hidden_layers=4, hidden_size=48, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, sliding_window=16, vocab_size=200,
    ),
    "states, gates": Qwen3_5TextConfig(
        num_hidden_layers=4, hidden_size=48, intermediate_size=32, num_attention_heads=6, num_key_value_heads=2,
        head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, vocab_size=200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_placements_agree_for_models_with_other_kinds_of_layers(kernels, recording, monkeypatch, kind):
    options = replace(whole_step_options(monkeypatch, None), shape=describe(OTHER_KINDS[kind]))
    work = Workload(recording, options.heads, 300, 2, DEVICE)
    weights = random_weights(OTHER_KINDS[kind], DEVICE, workload.DTYPE)
    logits = []
    for placement in ("device", "hybrid"):
        prepared = placements.placed(work, options, "default", placement, SearchConfig(keep=0.05, window_len=32))
        attention = RecordedQueries(prepared.attention, work)
        runner = make_runner(work, weights, with_other_layers(work, options, attention))
        logits.append(runner.step_by_calls(2).logits.clone())
        prepared.close()
    assert torch.isfinite(logits[0]).all() and logits[0].std() > 0
    torch.testing.assert_close(logits[1], logits[0])
    assert SparseOp(work, options, "default").shape.indexed_layers
    assert options.num_layers < options.shape.num_layers and other_bytes(work, weights) > 0
    assert other_bytes(Workload(recording, options.heads, 300, 4, DEVICE), weights) > other_bytes(work, weights)
