"""Sparse MLA attention of many heads of many queries on Hopper: launches `hopper.cu`."""

from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel, has_warpgroup_products
from csattn.lightning.mla.reference import LOG2_E
from csattn.lightning.mla.rows import SelectedRows

SOURCE = Path(__file__).with_name("hopper.cu")
LATENT_DIM, ROPE_DIMS = 512, (0, 64)
HEADS = 64  # of a thread block; fewer waste part of its work
MIN_BLOCKS = 64
THREADS = 384
SHARED_BYTES = 229_976  # of a thread block: `Shared` of the source
ALIGNMENT = 16  # bytes, which are copied at a time
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def supports(rows: SelectedRows) -> bool:
    """Whether the kernel supports this device, shape and layout, and its blocks, without split-K, fill the device."""
    num_queries, num_heads, latent_dim = rows.q_nope.shape
    many = num_heads > HEADS // 2 and num_queries * -(-num_heads // HEADS) >= MIN_BLOCKS
    fits = rows.q_nope.dtype in DTYPES and latent_dim == LATENT_DIM and rows.rope_dim in ROPE_DIMS
    *arrays, _ = rows.arrays
    of_rows = [array.stride(0) * array.itemsize for array in arrays[2:]]
    aligned = all(number % ALIGNMENT == 0 for number in (*(array.data_ptr() for array in arrays), *of_rows))
    return many and fits and aligned and has_warpgroup_products(rows.q_nope.device)


def attend_many(rows: SelectedRows, out: Tensor, lse: Tensor) -> None:
    """Enqueue attention to supported rows on torch's current stream. Writes `out`, `lse` of `attend.sparse_mla`."""
    num_queries, num_heads, _ = rows.q_nope.shape
    _, _, ckv, kpe, _ = rows.arrays
    defines = {
        "THREADS": THREADS,
        "ROPE_DIM": rows.rope_dim,
        "HALF": DTYPES[rows.q_nope.dtype],
        "HAS_SINK": int(rows.attn_sink is not None),
    }
    kernel = cuda_kernel(SOURCE, "attend_prefill", defines, SHARED_BYTES, architecture="sm_90a")
    kernel.launch(
        (num_queries * -(-num_heads // HEADS), 1, 1),
        THREADS,
        *(*rows.arrays, lse if rows.attn_sink is None else rows.attn_sink, out, lse),
        *(ckv.stride(0) * ckv.itemsize, kpe.stride(0) * kpe.itemsize),
        *(len(ckv), num_heads, rows.indices.shape[1], rows.softmax_scale * LOG2_E),
    )
