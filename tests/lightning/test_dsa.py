"""Decode steps of DSA choose and attend as the definitions do, in memory at fixed addresses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from csattn.errors import ArrayError, ConfigError
from csattn.lightning import (
    FP8,
    DsaDecoder,
    DsaShape,
    HisaConfig,
    KeyPages,
    Operands,
    dsa_sparse_attention,
    dsa_topk_indexer,
    make_key_cache,
    quantise_fp8,
    read_keys,
    score_keys,
    score_pages,
    sparse_mla_reference,
    top_k_reference,
    write_keys,
)
from csattn.lightning.paged.cache import page_views
from tests.cuda_on_cpu.emulated import DEVICE

HEADS, TOP_K = 16, 96
KV_LENS = [400, 96, 1, 97, 0]
SHAPE = DsaShape(
    batch_size=len(KV_LENS),
    max_len=512,
    num_heads=4,
    softmax_scale=0.2,
    dtype=torch.float32,
    latent_dim=32,
    rope_dim=16,
    num_index_heads=HEADS,
    top_k=TOP_K,
)


def make_caches(kv_lens: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return index keys, latent rows (two arrays) and block tables.

    Slots that no sequence uses are NaN. Table entries past a sequence's end are out of range.
    """
    cache = make_key_cache(30)
    values, scales = page_views(cache)
    values.view(torch.uint8).fill_(0x7F)
    scales.fill_(torch.nan)
    rows = torch.full((30, 64, 48), torch.nan)
    order = torch.randperm(30).to(torch.int32)
    tables = torch.full((len(kv_lens), 8), 2**30, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens):
        num_pages = -(-kv_len // 64)
        tables[row, :num_pages], order = order[:num_pages], order[num_pages:]
        token = torch.arange(kv_len)
        slots = tables[row, token // 64].long() * 64 + token % 64
        write_keys(cache, torch.randn(kv_len, 128), slots)
        rows.view(-1, 48)[slots] = torch.randn(kv_len, 48)
    return cache, rows[..., :32], rows[..., 32:], tables


def make_queries() -> tuple[Tensor, Tensor]:
    q, scale = quantise_fp8(torch.randn(len(KV_LENS), HEADS, 128))
    return q, torch.randn(len(KV_LENS), HEADS) * scale[..., 0]


def chosen_by_definition(q: Tensor, weights: Tensor, cache: Tensor, tables: Tensor, order: str) -> Tensor:
    want = torch.full((len(q), TOP_K), -1, dtype=torch.int32)
    for row, kv_len in enumerate(KV_LENS):
        k, scale = read_keys(cache, tables[row].clamp(max=29), kv_len)
        scores = score_keys(Operands(q[row : row + 1], k, weights[row : row + 1], scale))
        best = top_k_reference(scores, TOP_K, torch.tensor([kv_len]))[0]
        best = best[best >= 0].long()
        best = best.sort().values if order == "position" else best
        want[row, : len(best)] = (tables[row, best // 64] * 64 + best % 64).to(torch.int32)
    return want


@pytest.mark.parametrize("order", ["position", "score"])
def test_the_indexers_choice_equals_the_definitions(order: str) -> None:
    q, weights = make_queries()
    cache, _, _, tables = make_caches(KV_LENS)
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    got = dsa_topk_indexer(q, cache.view(torch.int8), weights, lens, tables, num_chosen=TOP_K, order=order)  # type: ignore[arg-type]
    assert torch.equal(got, chosen_by_definition(q, weights, cache, tables, order))


def test_attention_returns_its_log_sum_exp_in_base_2() -> None:
    _, ckv, kpe, tables = make_caches([64])
    ckv, kpe = ckv.contiguous(), kpe.contiguous()
    indices = (tables[:1, :1] * 64 + torch.arange(8)).to(torch.int32)
    q_nope, q_pe = torch.randn(1, 2, 32), torch.randn(1, 2, 16)
    out, lse = dsa_sparse_attention(q_nope, q_pe, ckv, kpe, indices, 0.5)
    want, want_lse = sparse_mla_reference(q_nope, q_pe, ckv.flatten(0, 1), kpe.flatten(0, 1), indices, 0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.exp2(lse), want_lse.exp())
    _, lse = dsa_sparse_attention(q_nope, q_pe, ckv, kpe, torch.full_like(indices, -1), 0.5)
    assert (lse == -torch.inf).all()


def fill(decoder: DsaDecoder, tables: Tensor) -> None:
    q, weights = make_queries()
    decoder.q_index.copy_(q)
    decoder.index_weights.copy_(weights)
    decoder.q_nope.normal_()
    decoder.q_pe.normal_()
    decoder.seq_lens.copy_(torch.tensor(KV_LENS))
    decoder.block_table.copy_(tables)


@pytest.mark.parametrize("hisa", [None, HisaConfig(num_blocks=4), HisaConfig(block_size=64, num_blocks=8)])
def test_steps_equal_their_definition_and_write_to_fixed_addresses(hisa: HisaConfig | None) -> None:
    """The blocks cover all keys here, so HISA chooses what DSA does."""
    decoder = DsaDecoder(replace(SHAPE, hisa=hisa), torch.device("cpu"))
    places = [x.data_ptr() for x in (decoder.indices, decoder.out, decoder.lse)]
    for _ in range(2):
        cache, ckv, kpe, tables = make_caches(KV_LENS)
        fill(decoder, tables)
        if decoder.block_keys is not None:
            for row, kv_len in enumerate(KV_LENS):
                decoder.block_keys.load(row, *read_keys(cache, tables[row].clamp(max=29), kv_len))
        decoder.step(cache, ckv, kpe)
        want = chosen_by_definition(decoder.q_index, decoder.index_weights, cache, tables, "position")
        assert torch.equal(decoder.indices, want)
        rows = ckv.flatten(0, 1), kpe.flatten(0, 1)
        out, lse = sparse_mla_reference(decoder.q_nope, decoder.q_pe, *rows, want, SHAPE.softmax_scale)
        torch.testing.assert_close(decoder.out, out)
        torch.testing.assert_close(decoder.lse, lse)
    assert places == [x.data_ptr() for x in (decoder.indices, decoder.out, decoder.lse)]


@pytest.mark.gpu
def test_a_captured_step_reads_its_inputs_anew_at_each_replay() -> None:
    decoder = DsaDecoder(SHAPE, DEVICE)
    caches = [x.to(DEVICE) for x in make_caches(KV_LENS)]
    fill(decoder, caches[3])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decoder.step(*caches[:3])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(*caches[:3])
    for _ in range(3):
        fill(decoder, caches[3])
        graph.replay()
        got = [x.clone() for x in (decoder.indices, decoder.out, decoder.lse)]
        decoder.step(*caches[:3])
        assert all(torch.equal(a, b) for a, b in zip(got, (decoder.indices, decoder.out, decoder.lse), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("max_len", "kv_lens"),
    [(131072, [131072]), (131072, [131011, 65600]), (131072, [2049, 2048]), (65536, [65000]), (32768, [32768, 20001])],
)
def test_captured_steps_over_long_contexts_choose_the_exact_top_k(max_len: int, kv_lens: list[int]) -> None:
    """The chosen keys are the definition's choice given the scores, with a step that is replayed from a CUDA graph."""
    rows = len(kv_lens)
    shape = replace(SHAPE, batch_size=rows, max_len=max_len, num_index_heads=64, top_k=2048, dtype=torch.bfloat16)
    decoder = DsaDecoder(shape, DEVICE)
    num_pages = rows * max_len // 64
    cache = make_key_cache(num_pages, DEVICE)
    write_keys(cache, torch.randn(num_pages * 64, 128, device=DEVICE), torch.arange(num_pages * 64, device=DEVICE))
    latent = torch.randn(num_pages, 64, 48, device=DEVICE, dtype=torch.bfloat16)
    decoder.block_table.copy_(torch.randperm(num_pages, device=DEVICE).view(rows, -1))
    decoder.seq_lens.copy_(torch.tensor(kv_lens))
    decoder.step(cache, latent[..., :32], latent[..., 32:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(cache, latent[..., :32], latent[..., 32:])
    for _ in range(5):
        q, scale = quantise_fp8(torch.randn(rows, 64, 128, device=DEVICE))
        decoder.q_index.copy_(q)
        decoder.index_weights.copy_(torch.randn(rows, 64, device=DEVICE) * scale[..., 0])
        graph.replay()
        scores = score_pages(
            decoder.q_index, decoder.index_weights, KeyPages.of_cache(cache), decoder.block_table, decoder.seq_lens
        )
        best = top_k_reference(scores, 2048, decoder.seq_lens)
        at = torch.where(best < 0, max_len, best).sort(dim=1).values.long()
        placed = decoder.block_table.gather(1, at.clamp(max=max_len - 1) // 64) * 64 + at % 64
        assert torch.equal(decoder.indices, torch.where(at == max_len, -1, placed).to(torch.int32))


def test_caches_of_wrong_shape_or_layout_are_refused_with_the_reason() -> None:
    decoder = DsaDecoder(SHAPE, torch.device("cpu"))
    cache, ckv, kpe, _ = make_caches(KV_LENS)
    with pytest.raises(ArrayError, match="key_cache has shape"):
        decoder.step(cache[:, :32], ckv, kpe)
    with pytest.raises(ArrayError, match="rows at equal distances"):
        decoder.step(cache, ckv.transpose(0, 1), kpe)
    with pytest.raises(ArrayError, match="kpe has shape"):
        decoder.step(cache, ckv, kpe[..., :8])
    for rows in ((ckv[:29], kpe), (ckv, kpe[:29])):
        with pytest.raises(ArrayError, match="cache has 29 pages; wanted as many as key_cache has, 30"):
            decoder.step(cache, *rows)
    halves = [x.unflatten(1, (2, 32)).flatten(0, 1) for x in (ckv, kpe)]
    with pytest.raises(ArrayError, match=r"ckv_cache has shape \[60, 32, 32\] .* wanted \[num_pages, 64, width\]"):
        decoder.step(cache, *halves)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_index_heads": 0}, "num_index_heads is 0; wanted at least 1"),
        ({"hisa": HisaConfig(num_blocks=4), "top_k": 513}, "top_k is 513; wanted at most 512"),
        ({"hisa": HisaConfig(block_size=32)}, "block_size is 32; wanted at least 64"),
    ],
)
def test_invalid_decoder_shapes_are_refused_at_construction(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DsaDecoder(replace(SHAPE, **change), torch.device("cpu"))


def test_pages_outside_the_cache_are_refused_by_hisa() -> None:
    decoder = DsaDecoder(replace(SHAPE, hisa=HisaConfig(num_blocks=4)), torch.device("cpu"))
    cache, ckv, kpe, tables = make_caches(KV_LENS)
    tables[0, 2] = 30
    fill(decoder, tables)
    with pytest.raises(ArrayError, match=r"pages holds numbers from .* to 30; wanted 0 to 29"):
        decoder.step(cache, ckv, kpe)


@pytest.mark.parametrize("page", [-1, 2])
@pytest.mark.parametrize("num_chosen", [4, 80])
def test_pages_outside_the_cache_are_refused_only_within_a_sequence(page: int, num_chosen: int) -> None:
    """Otherwise rows outside the cache would be chosen."""
    arrays = torch.zeros(1, 64, 128).to(FP8), make_key_cache(2), torch.ones(1, 64)
    table = torch.tensor([[1, page]], dtype=torch.int32)
    of_one_page = dsa_topk_indexer(*arrays, torch.tensor([64], dtype=torch.int32), table, num_chosen=num_chosen)
    assert of_one_page[0, :4].tolist() == [64, 65, 66, 67]
    with pytest.raises(ArrayError, match=f"block_table holds numbers from .*{page}.*; wanted 0 to 1"):
        dsa_topk_indexer(*arrays, torch.tensor([65], dtype=torch.int32), table, num_chosen=num_chosen)
