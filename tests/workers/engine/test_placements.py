"""Steps of every placement equal the definition, wherever rows are stored. Without a device, kernels run on the CPU."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.attention import device as attention
from csattn.attention import every_row
from csattn.config import SearchConfig, preset
from csattn.rest import moments_of
from csattn.rest.device import moment_table
from csattn.search import SearchPool
from csattn.search.device import compiling, to_device
from csattn.selectors import resolve_rest
from index_build.pipeline import build_artifact
from offload import gather, slot_cache, step_mail
from offload.codecs.codec import KvCodec
from offload.codecs.formats import KvFormat
from offload.host_memory import copy_rows
from offload.host_store import distinct
from offload.pinned import PinnedRows
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.offload.soundness import check
from tests.search.shapes import shape_of
from tests.tiny import loaded, token_ids
from tests.workers.engine.definition import defined_logits
from tests.workers.model.decoding import advance, prefill
from tests.workers.searchers.searching import Threads
from workers.engine.gpu.attend_chosen import ResidentRows
from workers.engine.gpu.far_rows import CachedRows, DeviceRows, context_layers
from workers.engine.gpu.on_device import SearchOnDevice
from workers.engine.gpu.on_host import SearchOnHost, StepSearcher
from workers.engine.gpu.shape import EngineShape
from workers.model import ModelRunner, take_weights
from workers.searchers.step_searches import StepSearches
from workers.searchers.worker_searcher import WorkerSearcher

CONTEXT_LEN = 300
QUESTION = token_ids(5, seed=1)
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, attention, every_row, gather, slot_cache, step_mail)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    path = build_artifact(loaded(), token_ids(CONTEXT_LEN), preset("default"), tmp_path_factory.mktemp("s")).path
    with open_artifact(path) as opened:
        yield opened


def make_shape(config: SearchConfig, **others: object) -> EngineShape:
    geometry = loaded().geometry
    shape = EngineShape(
        num_layers=geometry.num_layers,
        num_q_heads=geometry.num_q_heads,
        num_kv_heads=geometry.num_kv_heads,
        num_index_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=torch.float32,
        softmax_scale=geometry.head_dim**-0.5,
        search=config,
        max_context_len=CONTEXT_LEN,
        batch_sizes=(1, 5),
        tail_capacity=32,
        rest=resolve_rest(config, "csattn", "sketch"),
        max_segments=1,
    )
    return replace(shape, **others)


def test_moments_use_the_planned_bytes_and_equal_those_of_the_loaded_context() -> None:
    shape = make_shape(SearchConfig(rest="moments", sink_len=4, window_len=16))
    resident = ResidentRows(shape, DEVICE)
    held = [resident.moments(layer_idx) for layer_idx in range(shape.num_layers)]
    assert sum(moments.table.nbytes for moments in held if moments is not None) == shape.moments_bytes
    for context_len in (21, 300, 20, 3):
        kv = [torch.randn(shape.num_kv_heads, context_len, 2, shape.head_dim) for _ in held]
        resident.load(0, kv)
        for moments, rows in zip(held, kv, strict=True):
            assert moments is not None and moments.num_rows.tolist() == [max(0, context_len - 20)]
            if context_len > 20:
                want = moment_table(moments_of([rows[:, 4:-16]]), shape.softmax_scale, shape.dtype)
                torch.testing.assert_close(moments.table[0].cpu(), want, rtol=1e-5, atol=1e-6)
    without = make_shape(SearchConfig(rest="none"))
    assert without.moments_bytes == 0 and ResidentRows(without, DEVICE).moments(0) is None


def context_kv(artifact: Artifact, shape: EngineShape) -> list[torch.Tensor]:
    """Copy the KV to pages of its own: pinning takes whole pages, and copies from partly pinned memory are refused."""
    return copy_rows(list(context_layers(shape, built_kv(artifact))))


def test_coded_rows_that_layers_share_take_the_planned_bytes() -> None:
    shape = make_shape(SearchConfig(), kv_format=KvFormat.parse("fp8"), kv_sources=(0, 1, 0))
    kv = [torch.randn(shape.num_kv_heads, CONTEXT_LEN, 2, shape.head_dim) for _ in range(2)]
    layers = list(context_layers(shape, [*kv, kv[0]]))
    assert sum(layer.nbytes for layer in distinct(layers)) == shape.kv_bytes(CONTEXT_LEN)
    assert [layer.data_ptr() == layers[0].data_ptr() for layer in layers] == [True, False, True]


def built_kv(artifact: Artifact) -> list[torch.Tensor]:
    return [artifact.layer_kv(layer_idx) for layer_idx in range(artifact.spec.model.num_layers)]


def cached_rows(shape: EngineShape, kv: list[torch.Tensor], num_cache_slots: int) -> CachedRows:
    rows = CachedRows(shape, num_cache_slots, DEVICE)
    rows.load(0, PinnedRows(kv) if DEVICE.type == "cuda" else PinnedRows(kv, register=ignore, unregister=ignore))
    return rows


def make_attention(
    artifact: Artifact,
    config: SearchConfig,
    num_cache_slots: int | None,  # size of the slot cache over host memory; None: the context's KV is on the device
    kv: list[torch.Tensor] | None = None,  # default: the artifact's
    **others: object,
) -> SearchOnDevice:
    shape = make_shape(config, **others)
    kv = kv or context_kv(artifact, shape)
    if num_cache_slots is None:
        rows = DeviceRows(shape, DEVICE)
        rows.load(0, kv)
    else:
        rows = cached_rows(shape, kv, num_cache_slots)
    made = SearchOnDevice(shape, shape_of(artifact.layer_index(0), shape.num_q_heads), rows, DEVICE)
    indexes = [to_device(artifact.layer_index(layer_idx), DEVICE) for layer_idx in range(shape.num_layers)]
    made.load(0, kv, indexes, built_kv(artifact))
    return made


def make_host_attention(
    artifact: Artifact, config: SearchConfig, searcher: StepSearcher, **others: object
) -> SearchOnHost:
    shape = make_shape(config, **others)
    kv = context_kv(artifact, shape)
    indexes = [artifact.layer_index(layer_idx) for layer_idx in range(shape.num_layers)]
    sizes = shape_of(indexes[0], shape.num_q_heads)
    made = SearchOnHost(shape, sizes, cached_rows(shape, kv, 60), searcher, DEVICE)
    searcher.load(0, artifact)
    made.load(0, kv, [to_device(index, DEVICE) for index in indexes], built_kv(artifact))
    return made


def ignore(*_: object, **__: object) -> None:
    """Register nothing: if the device is the CPU, it can read all host memory."""


def decode(
    attention: SearchOnDevice | SearchOnHost, next_query: torch.Tensor | None = None
) -> tuple[list[int], torch.Tensor]:
    """Return the greedy continuation of the question, and each step's logits."""
    runner = ModelRunner(take_weights(loaded().model, DEVICE), attention, attention.shape.batch_sizes, next_query)
    output = prefill(runner, QUESTION.tolist(), 0, CONTEXT_LEN, 0)
    tokens, logits = [int(output.next_ids[0])], [output.logits[0].clone()]
    runner.fill(1, tokens, [CONTEXT_LEN + len(QUESTION)], [0], [0], [len(QUESTION) + 1])
    for _ in range(NUM_STEPS - 1):
        output = runner.step(1)
        tokens.append(int(output.next_ids[0]))
        logits.append(output.logits[0].clone())
        advance(runner, 1, output.next_ids)
    return tokens, torch.stack(logits).cpu()


def defined(artifact: Artifact, config: SearchConfig, tokens: Sequence[int] = ()) -> torch.Tensor:
    """Return the defined logits after the question, and after each of these tokens except the last."""
    ids = [*QUESTION.tolist(), *tokens[:-1]]
    logits = defined_logits(loaded(), artifact, config, "csattn", ids)
    return torch.from_numpy(logits[len(QUESTION) - 1 :])


def test_decoding_with_keep_1_generates_what_transformers_does(artifact) -> None:
    tokens, _ = decode(make_attention(artifact, SearchConfig(keep=1.0, window_len=16), None))
    whole = torch.from_numpy(np.concatenate([artifact.token_ids, QUESTION])).long()[None]
    want = loaded().model.generate(
        whole, attention_mask=torch.ones_like(whole), max_new_tokens=NUM_STEPS, do_sample=False
    )
    assert tokens == want[0, whole.shape[1] :].tolist()


@pytest.mark.parametrize(("num_cache_slots", "rest"), [(7, "none"), (60, "moments"), (60, "sketch")])
def test_rows_on_the_device_and_in_the_slot_cache_give_the_same_bits(artifact, num_cache_slots, rest) -> None:
    """Seven slots are too few for a step: it reads most rows straight from host memory."""
    config = SearchConfig(keep=0.1, window_len=16, rest=rest)
    tokens, logits = decode(make_attention(artifact, config, None))
    cached = make_attention(artifact, config, num_cache_slots)
    cached_tokens, cached_logits = decode(cached)
    assert cached_tokens == tokens
    assert torch.equal(cached_logits, logits)
    assert isinstance(cached.far, CachedRows)
    check(cached.far.cache)
    seen = cached.far.cache.statistics()[1]
    assert seen.num_spilled > 0 if num_cache_slots == 7 else seen.num_found > 0


@pytest.mark.parametrize(
    ("where", "rest"), [("device", "none"), ("hybrid", "moments"), ("hybrid", "sketch"), ("host", "none")]
)
def test_attention_to_coded_rows_equals_attention_to_the_decoded_rows(artifact, where, rest) -> None:
    """In every placement. The rest is still estimated from the rows as they were built, not from decoded ones."""
    config, form = SearchConfig(keep=0.1, window_len=16, rest=rest), KvFormat.parse("k=fp8,v=float16")
    codec = KvCodec(form, loaded().geometry.head_dim)
    decoded = [torch.from_numpy(codec.decode(codec.encode(kv.numpy()))) for kv in built_kv(artifact)]
    want_tokens, want = decode(make_attention(artifact, config, None, kv=decoded))
    with ExitStack() as stack:
        if where == "host":
            searcher = stack.enter_context(closing(StepSearches(SearchPool(2))))
            attention = make_host_attention(artifact, config, searcher, kv_format=form)
        else:
            attention = make_attention(artifact, config, None if where == "device" else 13, kv_format=form)
        tokens, logits = decode(attention)
    assert tokens == want_tokens
    assert torch.equal(logits, want)
    if where != "device":
        assert attention.far.cache.rows.shape[-1] == attention.shape.context_row_bytes == 64  # 20 + 32, padded
        assert attention.far.cache.statistics()[1].num_spilled > 0 or where == "host"


@pytest.mark.parametrize("rest", ["moments", "sketch"])
@pytest.mark.parametrize("keep", [0.1, 1.0])
def test_attention_to_the_rest_equals_the_definition(artifact, keep, rest) -> None:
    """With `keep` 1, the rest is empty and changes nothing."""
    config = SearchConfig(keep=keep, window_len=16, rest=rest)
    _, logits = decode(make_attention(artifact, config, None))
    torch.testing.assert_close(logits[0], defined(artifact, config)[-1], rtol=2e-3, atol=2e-3)
    _, without = decode(make_attention(artifact, replace(config, rest="none"), None))
    assert torch.allclose(logits, without, rtol=1e-4, atol=1e-4) == (keep == 1.0)


@pytest.mark.parametrize(("where", "rest"), [("device", "sketch"), ("hybrid", "moments"), ("host", "none")])
def test_rows_between_searches_reuse_the_last_choice(artifact, rest, where) -> None:
    config = SearchConfig(keep=0.1, window_len=16, rest=rest, search_period=3)
    with ExitStack() as stack:
        if where == "host":
            searcher = stack.enter_context(closing(StepSearches(SearchPool(2))))
            attention = make_host_attention(artifact, config, searcher)
        else:
            attention = make_attention(artifact, config, None if where == "device" else 60)
        tokens, logits = decode(attention)
    want = defined(artifact, config, tokens)
    assert tokens == want.argmax(-1).tolist()
    torch.testing.assert_close(logits, want, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("lookahead", "rest", "num_workers"),
    [(0, "none", 0), (0, "sketch", 2), (1, "moments", 0), (1, "sketch", 3)],
)
def test_search_on_the_host_chooses_the_same_rows_as_on_the_device(artifact, lookahead, rest, num_workers) -> None:
    config = SearchConfig(keep=0.1, window_len=16, lookahead=lookahead, rest=rest)
    maps = [artifact.layer_index(layer_idx).next_query for layer_idx in range(artifact.spec.model.num_layers - 1)]
    next_query = torch.from_numpy(np.stack([*maps, maps[0]]))[None] if lookahead else None
    searcher: StepSearcher = StepSearches(SearchPool(2))
    if num_workers:
        searcher = WorkerSearcher(num_workers, launch=Threads())
    with closing(searcher):
        tokens, logits = decode(make_host_attention(artifact, config, searcher), next_query)
    if lookahead:  # not compared with the device, where lookahead needs streams of its own
        torch.testing.assert_close(logits[0], defined(artifact, config)[-1], rtol=2e-3, atol=2e-3)
        return
    want_tokens, want = decode(make_attention(artifact, config, None))
    assert tokens == want_tokens
    assert torch.equal(logits, want)
