"""Index keys in FP8, in pages of 64 tokens and 132 bytes a token.

A page holds the values of all of its tokens first, 64 x 128 bytes of e4m3, then their 64 float32 scales: 8448 bytes.
SGLang, DeepGEMM and FlashInfer show the same bytes as [num_pages, 64, 1, 132]; row i of that view is not token i.
"""

import torch
from torch import Tensor

from csattn.errors import ArrayError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.operands.quantise import FP8, quantise_fp8, take

PAGE_SIZE = 64
HEAD_DIM = 128
TOKEN_BYTES = HEAD_DIM + 4
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES


def make_key_cache(num_pages: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a cache of zeros: [num_pages, 64, 1, 132] uint8."""
    require_at_least("num_pages", num_pages, 1)
    return torch.zeros(num_pages, PAGE_SIZE, 1, TOKEN_BYTES, dtype=torch.uint8, device=device)


def page_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a cache: values [num_pages, 64, 128] float8_e4m3fn and scales [num_pages, 64] float32."""
    require_array("cache", cache, ("num_pages", PAGE_SIZE, 1, TOKEN_BYTES), torch.uint8, torch.int8)
    if behind := cache.data_ptr() % 4:
        raise ArrayError(
            f"cache begins {behind} bytes past a multiple of 4; its scales must be aligned to 4 bytes: call .clone() "
            "first"
        )
    pages = cache.view(torch.uint8).view(len(cache), PAGE_BYTES)
    values = pages[:, : PAGE_SIZE * HEAD_DIM].view(FP8).view(len(cache), PAGE_SIZE, HEAD_DIM)
    return values, pages[:, PAGE_SIZE * HEAD_DIM :].view(torch.float32)


def write_keys(
    cache: Tensor,  # [num_pages, 64, 1, 132] uint8, written
    keys: Tensor,  # [num_tokens, 128], after the Hadamard transform
    slot_mapping: Tensor,  # [num_tokens] int64, page * 64 + row; -1: not written
    *,
    power_of_two_scales: bool = False,
) -> None:
    """Quantise keys and write each to its slot.

    On a GPU, a CUDA graph can capture this. Slots that the cache does not have raise ArrayError, except during capture,
    when they cannot be checked: the kernel skips those tokens.
    """
    values, scales = page_views(cache)
    require_array("keys", keys, ("num_tokens", HEAD_DIM), like=cache)
    require_array("slot_mapping", slot_mapping, (len(keys),), torch.int64, like=cache)
    on_device = cache.device.type == "cuda"
    if not (on_device and torch.cuda.is_current_stream_capturing()):
        require_within("slot_mapping", slot_mapping, -1, len(cache) * PAGE_SIZE)
    if on_device:
        from csattn.lightning.paged.triton_kernels import write_on_device  # needs Triton: GPU only

        write_on_device(values, scales, keys, slot_mapping, power_of_two_scales)
        return
    written = slot_mapping >= 0
    page, row = slot_mapping[written] // PAGE_SIZE, slot_mapping[written] % PAGE_SIZE
    quantised, scale = quantise_fp8(keys[written], power_of_two_scales=power_of_two_scales)
    values.view(torch.uint8)[page, row] = quantised.view(torch.uint8)
    scales[page, row] = scale[:, 0]


def read_keys(
    cache: Tensor,  # [num_pages, 64, 1, 132] uint8
    block_table: Tensor,  # [num_blocks] integer, pages of one sequence
    kv_len: int,
) -> tuple[Tensor, Tensor]:
    """Return the first kv_len keys of a sequence: [kv_len, 128] float8_e4m3fn, and their scales [kv_len] float32."""
    values, scales = page_views(cache)
    require_array("block_table", block_table, ("num_blocks",), torch.int32, torch.int64, like=cache)
    require_at_least("kv_len", kv_len, 0, len(block_table) * PAGE_SIZE)
    pages = block_table[: -(-kv_len // PAGE_SIZE)].long()
    require_within("block_table", pages, 0, len(cache))
    return take(values, pages).flatten(0, 1)[:kv_len], scales[pages].flatten()[:kv_len]


def require_within(name: str, numbers: Tensor, least: int, end: int) -> None:
    """Raise ArrayError unless all numbers are in least..end-1."""
    if len(numbers) and not bool((numbers >= least).all() and (numbers < end).all()):
        low, high = int(numbers.min()), int(numbers.max())
        raise ArrayError(f"{name} holds numbers from {low} to {high}; wanted {least} to {end - 1} for this cache")
