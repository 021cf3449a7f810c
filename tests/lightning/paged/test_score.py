"""Scores of paged keys are the definition's, with the kernel and without, and no other pages are read."""

import pytest
import torch
from torch import Tensor

from csattn.cuda import has_warpgroup_products
from csattn.errors import ArrayError
from csattn.lightning import (
    FP8,
    KeyPages,
    Operands,
    make_key_cache,
    quantise_fp8,
    read_keys,
    score_keys,
    score_pages,
    write_keys,
)
from csattn.lightning.paged import hopper as paged_hopper
from csattn.lightning.paged import triton_kernels
from csattn.lightning.paged.cache import page_views
from csattn.lightning.paged.triton_kernels import score_on_device
from csattn.lightning.topk.grouped import GroupMaxima
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.lightning.topk.test_grouped import group_maxima_by_definition

HEADS = 16


def make_queries(num_queries: int, num_heads: int = HEADS) -> tuple[Tensor, Tensor]:
    """Return q [num_queries, num_heads, 128] e4m3, and weights of either sign."""
    q, scale = quantise_fp8(torch.randn(num_queries, num_heads, 128))
    return q, torch.randn(num_queries, num_heads) * scale[..., 0]


def make_cache(kv_lens: list[int], max_pages: int) -> tuple[Tensor, Tensor]:
    """Return a cache whose unused rows are NaN, and block tables whose unused entries are out of range."""
    cache = make_key_cache(2 + len(kv_lens) * max_pages)
    values, scales = page_views(cache)
    values.view(torch.uint8).fill_(0x7F)
    scales.fill_(torch.nan)
    order = torch.randperm(len(cache)).to(torch.int32)
    block_tables = torch.full((len(kv_lens), max_pages), 2**30, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens):
        num_pages = -(-kv_len // 64)
        block_tables[row, :num_pages], order = order[:num_pages], order[num_pages:]
        token = torch.arange(kv_len)
        write_keys(cache, torch.randn(kv_len, 128), block_tables[row, token // 64].long() * 64 + token % 64)
    return cache, block_tables


def score_by(how: str, q: Tensor, weights: Tensor, keys: KeyPages, pages: Tensor, lens: Tensor, longer: int) -> Tensor:
    out = torch.full((len(q), pages.shape[1] * keys.page_size), 7.0, device=DEVICE)
    arrays = [x.to(DEVICE) for x in (q, weights, keys.values, keys.scales, pages, lens)]
    if how == "kernel":
        score_on_device(*arrays, longer, out)  # type: ignore[call-arg]
    else:
        q, weights, values, scales, pages, lens = arrays
        score_pages(q, weights, KeyPages(values, scales), pages, lens, longer_than=longer, out=out)
    return out.cpu()


@pytest.mark.parametrize("how", ["kernel", "public"])
def test_scores_of_a_paged_cache_equal_the_definition(how: str) -> None:
    kv_lens = [300, 0, 64, 1, 129, 100]
    cache, tables = make_cache(kv_lens, max_pages=5)
    q, weights = make_queries(len(kv_lens))
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    got = score_by(how, q, weights, KeyPages.of_cache(cache), tables, lens, 100)
    for row, kv_len in enumerate(kv_lens):
        if kv_len <= 100:
            assert (got[row] == 7).all(), "a query of few keys is not scored"
            continue
        own_k, own_scale = read_keys(cache, tables[row], kv_len)
        want = score_keys(Operands(q[row : row + 1], own_k, weights[row : row + 1], own_scale))[0]
        torch.testing.assert_close(got[row, :kv_len], want, rtol=1e-3, atol=1e-2)
        assert (got[row, kv_len:] == 7).all(), "what is behind the keys is not written"


@pytest.mark.parametrize("how", ["kernel", "public"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_keys", [1, 130, 512])
def test_scores_of_contiguous_keys_as_pages_equal_the_definition(how: str, dtype: torch.dtype, num_keys: int) -> None:
    q, k, weights = torch.randn(3, HEADS, 32).to(dtype), torch.randn(num_keys, 32).to(dtype), torch.randn(3, HEADS)
    operands = Operands(q, k, weights, torch.rand(num_keys))
    keys = KeyPages.of_keys(operands, 128)
    num_pages = len(keys.values)
    pages = torch.stack([torch.randperm(num_pages) for _ in range(3)]).to(torch.int32)
    got = score_by(how, q, weights, keys, pages, torch.full((3,), num_pages * 128, dtype=torch.int32), 0)
    want = torch.zeros(3, num_pages * 128)
    want[:, :num_keys] = score_keys(operands)
    in_order = want.view(3, num_pages, 128).gather(1, pages.long()[..., None].expand(-1, -1, 128)).flatten(1)
    torch.testing.assert_close(got, in_order, rtol=2e-3, atol=2e-3)


@pytest.fixture
def on_hopper(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda" and not has_warpgroup_products(DEVICE):
        pytest.skip("this device has no products of warpgroups")
    emulator.stand_in(monkeypatch, paged_hopper, multiprocessors=4)


def make_group_maxima(rows: int, max_pages: int, group_keys: int = 16) -> GroupMaxima:
    """Return maxima that are all 7."""
    sevens = torch.full((rows, 8 * max_pages), 7, dtype=torch.int32, device=DEVICE)
    return GroupMaxima(sevens, group_keys, torch.full((rows, 20), 7, device=DEVICE))


@pytest.mark.usefixtures("on_hopper")
def test_scores_of_a_paged_cache_on_hopper_equal_the_definition() -> None:
    kv_lens = [300, 0, 64, 1, 129, 100, 1100]  # the last one's pages span several thread blocks
    cache, tables = make_cache(kv_lens, max_pages=18)
    tables[6, 3] = -1
    q, weights = make_queries(len(kv_lens), paged_hopper.HEADS)
    q[4, :, ::3] = q[4, :, ::3].to(torch.float32).neg().to(FP8)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    out = torch.full((len(q), 18 * 64), 7.0, device=DEVICE)
    keys = KeyPages.of_cache(cache.to(DEVICE))
    arrays = [x.to(DEVICE) for x in (q, weights)], [x.to(DEVICE) for x in (tables, lens)]
    paged_hopper.score_on_hopper(*arrays[0], keys.values, *arrays[1], 100, out, make_group_maxima(len(q), 18))
    got = out.cpu()
    for row, kv_len in enumerate(kv_lens):
        if kv_len <= 100:
            assert (got[row] == 7).all(), "a query of few keys is not scored"
            continue
        own_k, own_scale = read_keys(cache, tables[row].clamp(min=0), kv_len)
        want = score_keys(Operands(q[row : row + 1], own_k, weights[row : row + 1], own_scale))[0]
        if row == 6:
            want[3 * 64 : 4 * 64] = -torch.inf
        torch.testing.assert_close(got[row, :kv_len], want, rtol=2e-3, atol=4e-2)  # tensor cores sum FP8 in fewer bits
        assert (got[row, kv_len:] == 7).all(), "what is behind the keys is not written"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("group_keys", [8, 16, 32])
def test_group_maxima_on_hopper_equal_those_of_the_scores(group_keys: int) -> None:
    kv_lens = [64 * 17 + 3, 64 * 18, 130, 100]
    cache, tables = make_cache(kv_lens, max_pages=18)
    tables[0, 4:9] = -1
    q, weights = make_queries(len(kv_lens), paged_hopper.HEADS)
    weights[1] = torch.nan
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    group_maxima = make_group_maxima(4, 18, group_keys)
    out = torch.full((len(q), 18 * 64), 7.0, device=DEVICE)
    keys = KeyPages.of_cache(cache.to(DEVICE))
    arrays = [x.to(DEVICE) for x in (q, weights)], [x.to(DEVICE) for x in (tables, lens)]
    paged_hopper.score_on_hopper(*arrays[0], keys.values, *arrays[1], 100, out, group_maxima)
    want, got = group_maxima_by_definition(out.cpu(), lens, group_keys).keys, group_maxima.keys.cpu()
    assert (group_maxima.slots == 0).all()
    assert (got[3] == 7).all(), "a query of few keys is not scored"
    for row, kv_len in enumerate(kv_lens[:3]):
        span = max(64, 4 * group_keys)
        end = -(-kv_len // span) * span // group_keys
        assert torch.equal(got[row, :end], want[row, :end])
        assert (got[row, end:] == 7).all()


@pytest.mark.gpu
def test_the_hopper_kernel_supports_only_the_cache_layout() -> None:
    cache, _ = make_cache([64], max_pages=1)
    q = make_queries(1, paged_hopper.HEADS)[0].to(DEVICE)
    keys, pages = KeyPages.of_cache(cache.to(DEVICE)), torch.zeros(1, 512, dtype=torch.int32, device=DEVICE)
    assert paged_hopper.supports(q, keys.values, keys.scales, pages) == has_warpgroup_products(DEVICE)
    assert not paged_hopper.supports(q, keys.values, keys.scales, pages[:, 1:])
    assert not paged_hopper.supports(q[:, :32], keys.values, keys.scales, pages)
    assert not paged_hopper.supports(q, keys.values, keys.scales.clone(), pages)


def test_scores_do_not_depend_on_the_number_of_tiles_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tables = make_cache([700, 500], max_pages=11)
    q, weights = make_queries(2)
    arrays = q, weights, KeyPages.of_cache(cache), tables, torch.tensor([700, 500], dtype=torch.int32), 0
    each = score_by("kernel", *arrays)
    monkeypatch.setattr(triton_kernels, "ENOUGH_PROGRAMS", 4)
    assert torch.equal(score_by("kernel", *arrays), each)


def test_queries_are_split_into_launches_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tables = make_cache([70, 3, 64, 1, 130], max_pages=3)
    q, weights = make_queries(5)
    arrays = q, weights, KeyPages.of_cache(cache), tables, torch.tensor([70, 3, 64, 1, 130], dtype=torch.int32), 0
    at_once, grids, kernel = score_by("kernel", *arrays), list[tuple[int, ...]](), triton_kernels._score_kernel
    watched = type("Watched", (), {"__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})()
    monkeypatch.setattr(triton_kernels, "_score_kernel", watched)
    monkeypatch.setattr(triton_kernels, "MOST_QUERIES", 2)
    assert torch.equal(score_by("kernel", *arrays), at_once)
    assert [grid[1] for grid in grids] == [2, 2, 1]


@pytest.mark.parametrize("how", ["kernel", "public"])
def test_keys_of_pages_that_do_not_exist_score_minus_infinity(how: str) -> None:
    q, weights = make_queries(1)
    cache, tables = make_cache([128], max_pages=2)
    tables[0, 0] = -1
    got = score_by(how, q, weights, KeyPages.of_cache(cache), tables, torch.tensor([128], dtype=torch.int32), 0)
    assert (got[0, :64] == -torch.inf).all()
    assert got[0, 64:].isfinite().all()


def test_invalid_arguments_of_score_pages_are_refused_with_the_reason() -> None:
    q, weights = make_queries(2)
    cache, tables = make_cache([64, 64], max_pages=1)
    keys, lens = KeyPages.of_cache(cache), torch.tensor([64, 64], dtype=torch.int32)
    with pytest.raises(ArrayError, match="q is float32; wanted float8_e4m3fn"):
        score_pages(q.float(), weights, keys, tables, lens)
    with pytest.raises(ArrayError, match=r"pages has shape \[1, 1\]; wanted \[2, max_pages\]"):
        score_pages(q, weights, keys, tables[:1], lens)
    with pytest.raises(ArrayError, match="kv_lens is int64"):
        score_pages(q, weights, keys, tables, lens.long())
    with pytest.raises(ArrayError, match=r"out has shape \[2, 3\]"):
        score_pages(q, weights, keys, tables, lens, out=torch.zeros(2, 3))
    with pytest.raises(ArrayError, match="power of two"):
        score_pages(q, weights, KeyPages(torch.zeros(1, 3, 128).to(FP8), torch.zeros(1, 3)), tables, lens)
    with pytest.raises(ArrayError, match="scales of keys"):
        score_pages(q, weights, KeyPages(keys.values, keys.scales[:, :5]), tables, lens)
    with pytest.raises(ArrayError, match="scales of keys are on meta, values on cpu"):
        score_pages(q, weights, KeyPages(keys.values, keys.scales.to("meta")), tables, lens)
    with pytest.raises(ArrayError, match="values of keys"):
        score_pages(q, weights, KeyPages(keys.values.int(), keys.scales), tables, lens)
    with pytest.raises(ArrayError, match="at least one page"):
        score_pages(q, weights, KeyPages(keys.values[:0], keys.scales[:0]), tables, lens)
    with pytest.raises(ArrayError, match="k holds no keys; wanted at least one"):
        KeyPages.of_keys(Operands(torch.zeros(1, 1, 8), torch.zeros(0, 8), torch.zeros(1, 1)), 64)
