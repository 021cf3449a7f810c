"""Pages of the key cache have the byte layout that other systems expect."""

import struct

import pytest
import torch

from csattn.errors import ArrayError, ConfigError
from csattn.lightning import make_key_cache, quantise_fp8, read_keys, write_keys
from csattn.lightning.paged.cache import page_views
from csattn.lightning.paged.triton_kernels import write_on_device
from tests.cuda_on_cpu.emulated import DEVICE


def test_a_written_key_has_the_documented_bytes_in_its_page() -> None:
    """In its page, token 5 has its values from byte 5 * 128 on and its scale at byte 64 * 128 + 5 * 4."""
    cache, key = make_key_cache(3), torch.randn(1, 128)
    write_keys(cache, key, torch.tensor([2 * 64 + 5]))
    page = cache[2].reshape(-1)
    assert page.numel() == 8448
    values, scale = quantise_fp8(key)
    assert page[5 * 128 : 6 * 128].tolist() == values.view(torch.uint8)[0].tolist()
    assert bytes(page[8192 + 20 : 8192 + 24].tolist()) == struct.pack("<f", scale.item())
    page[5 * 128 : 6 * 128] = 0
    page[8192 + 20 : 8192 + 24] = 0
    assert not cache.any(), "something else was written"


@pytest.mark.parametrize("kv_len", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_written_keys_are_read_back_quantised(kv_len: int, dtype: torch.dtype) -> None:
    keys, block_table = torch.randn(kv_len, 128), torch.tensor([6, 0, 3, 1])
    cache = make_key_cache(7).view(dtype)
    cache.random_(0, 100)
    positions = torch.randperm(kv_len)
    slots = block_table[positions // 64] * 64 + positions % 64
    write_keys(cache, keys[positions], slots)
    got, scales = read_keys(cache, block_table, kv_len)
    want, want_scales = quantise_fp8(keys)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales, want_scales[:, 0])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_write_kernel_writes_the_bytes_of_the_definition(dtype: torch.dtype, power_of_two: bool) -> None:
    """Keys have all sizes; one is zero, and one has a power of two as scale. Keys without a slot are not written."""
    keys = (torch.randn(9, 128) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    keys[3] = 0
    keys[4] = torch.linspace(-448, 448, 128)
    keys[8, ::3] = -1e-3  # these round to zeros, some of them negative
    slots = torch.tensor([70, 3, -1, 128, 5, 6, 127, 0, 64])
    want, got = make_key_cache(2), make_key_cache(2).to(DEVICE)
    there = (slots >= 0) & (slots < 128)
    write_keys(want, keys[there], slots[there], power_of_two_scales=power_of_two)
    write_on_device(*page_views(got), keys.to(DEVICE), slots.to(DEVICE), power_of_two)
    assert torch.equal(got.cpu(), want)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # from Triton's interpreter (numpy)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_write_kernel_keeps_nan_and_infinity(power_of_two: bool) -> None:
    """NaN and infinity are kept: zeros would look like a key."""
    keys, slots = torch.randn(4, 128), torch.arange(4)
    keys[1, 5], keys[2, 7], keys[3] = torch.nan, torch.inf, torch.nan
    want, got = make_key_cache(1), make_key_cache(1).to(DEVICE)
    write_keys(want, keys, slots, power_of_two_scales=power_of_two)
    write_on_device(*page_views(got), keys.to(DEVICE), slots.to(DEVICE), power_of_two)
    (values, scales), (want_values, want_scales) = page_views(got.cpu()), page_views(want)
    torch.testing.assert_close(scales, want_scales, rtol=0, atol=0, equal_nan=True)
    if DEVICE.type == "cuda":  # the interpreter does not convert NaN to NaN in FP8
        torch.testing.assert_close(values.float(), want_values.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_captured_write_reads_its_inputs_anew_at_each_replay() -> None:
    cache, keys = make_key_cache(4, DEVICE), torch.randn(3, 128, device=DEVICE)
    slots = torch.tensor([1, 70, -1], device=DEVICE)
    write_keys(cache, keys, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_keys(cache, keys, slots)
    for written in ([200, 5, 6], [7, -1, 255]):
        keys.normal_()
        slots.copy_(torch.tensor(written))
        want = cache.clone()
        write_keys(want, keys, slots)
        graph.replay()
        assert torch.equal(cache, want)


def test_a_token_without_a_slot_is_not_written() -> None:
    cache = make_key_cache(1)
    write_keys(cache, torch.randn(3, 128), torch.tensor([-1, -1, -1]))
    assert not cache.any()


def test_page_views_share_the_caches_memory() -> None:
    cache = make_key_cache(2)
    values, scales = page_views(cache)
    scales[1, 63] = 1.0
    assert cache.reshape(-1)[-4:].tolist() == [0, 0, 128, 63]
    assert values.shape == (2, 64, 128)


def test_slots_pages_and_caches_out_of_range_are_refused_with_the_reason() -> None:
    cache = make_key_cache(2)
    with pytest.raises(ArrayError, match="slot_mapping holds numbers from 128 to 128; wanted -1 to 127"):
        write_keys(cache, torch.zeros(1, 128), torch.tensor([128]))
    with pytest.raises(ArrayError, match="block_table holds numbers from 2 to 2; wanted 0 to 1"):
        read_keys(cache, torch.tensor([2]), 5)
    with pytest.raises(ConfigError, match="kv_len is 65; wanted at most 64"):
        read_keys(cache, torch.tensor([1]), 65)
    with pytest.raises(ArrayError, match=r"cache has shape \[2, 8448\]; wanted \[num_pages, 64, 1, 132\]"):
        read_keys(cache.view(2, -1), torch.tensor([1]), 5)
    with pytest.raises(ArrayError, match="cache begins 1 bytes past a multiple of 4"):
        read_keys(torch.zeros(2 * 8448 + 1, dtype=torch.uint8)[1:].view_as(cache), torch.tensor([1]), 5)
