"""Attention of many heads over selected rows on Hopper: `hopper.cu`, for what it was written for."""

from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel, has_warpgroup_products
from csattn.lightning.mla.reference import LOG2_E

SOURCE = Path(__file__).with_name("hopper.cu")
LATENT_DIM, ROPE_DIMS = 512, (0, 64)
HEADS = 64  # of a block; fewer waste what they leave out
MIN_BLOCKS = 64
THREADS = 384
SHARED_BYTES = 229_976  # of a block: `Shared` of the source
ALIGNMENT = 16  # bytes: of what is copied at a time
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def takes(q_nope: Tensor, q_pe: Tensor | None, ckv: Tensor, kpe: Tensor | None) -> bool:
    """Whether the kernel is for this device, shape and layout, and its blocks, which are not split, fill the device."""
    rope_dim = 0 if q_pe is None else q_pe.shape[2]
    num_queries, num_heads, latent_dim = q_nope.shape
    many = num_heads > HEADS // 2 and num_queries * -(-num_heads // HEADS) >= MIN_BLOCKS
    fits = q_nope.dtype in DTYPES and latent_dim == LATENT_DIM and rope_dim in ROPE_DIMS
    arrays = [array for array in (q_nope, q_pe, ckv, kpe) if array is not None]
    aligned = all(array.data_ptr() % ALIGNMENT == 0 for array in arrays) and all(
        rows.stride(0) * rows.itemsize % ALIGNMENT == 0 for rows in (ckv, kpe) if rows is not None
    )
    return many and fits and aligned and has_warpgroup_products(q_nope.device)


def attend_many(
    q_nope: Tensor,
    q_pe: Tensor | None,
    ckv: Tensor,
    kpe: Tensor | None,
    indices: Tensor,
    softmax_scale: float,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Enqueue on torch's current stream. Meaning of the arguments: `attend.sparse_mla`, where `takes` says so."""
    num_queries, num_heads, _ = q_nope.shape
    defines = {
        "THREADS": THREADS,
        "ROPE_DIM": 0 if q_pe is None else q_pe.shape[2],
        "HALF": DTYPES[q_nope.dtype],
        "HAS_SINK": int(attn_sink is not None),
    }
    kernel = cuda_kernel(SOURCE, "attend_prefill", defines, SHARED_BYTES, architecture="sm_90a")
    kernel.launch(
        (num_queries * -(-num_heads // HEADS), 1, 1),
        THREADS,
        q_nope,
        q_nope if q_pe is None else q_pe,
        ckv,
        ckv if kpe is None else kpe,
        indices,
        lse if attn_sink is None else attn_sink,
        out,
        lse,
        ckv.stride(0) * ckv.itemsize,
        0 if kpe is None else kpe.stride(0) * kpe.itemsize,
        len(ckv),
        num_heads,
        indices.shape[1],
        softmax_scale * LOG2_E,
    )
