"""Lightning scores of paged keys, in Triton. Meaning of the arguments: `page_score.score_pages`.

Keys lie along the rows of the product and heads along its columns, so that most of the sum over heads stays within a
thread. The heads' scores never leave the registers. Where an FP8 product is summed in fewer bits than float32 has
(Hopper), scores differ from the definition's by about 2^-13 of the largest product.
"""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from csattn.errors import ArrayError

ENOUGH_PROGRAMS = 4096  # more pages than that are shared out among as many programs
LEAST_PAGES = 2  # of a program, which reads its query first
NUM_WARPS = 4
# A page's number is loaded before the page, and each of the two loads is done two stages early: then one page is on its
# way while another is scored. With fewer stages nothing is.
NUM_STAGES = 5


def score_on_device(
    q: Tensor,
    weights: Tensor,
    values: Tensor,  # [num_pages, page_size, head_dim]
    scales: Tensor,  # [num_pages, page_size]
    pages: Tensor,
    kv_lens: Tensor,
    longer_than: int,
    out: Tensor,
) -> None:
    """Enqueue on torch's current stream."""
    num_queries, num_heads, head_dim = q.shape
    if num_heads < 16 or num_heads & (num_heads - 1) or head_dim < 32 or head_dim & (head_dim - 1):
        raise ArrayError(
            f"q has {num_heads} heads of {head_dim}; the kernel takes powers of two, of heads at least 16, of their "
            f"width at least 32"
        )
    if num_queries == 0 or out.shape[1] == 0:
        return
    max_pages = pages.shape[1]
    pages_each = min(max_pages, max(LEAST_PAGES, num_queries * max_pages // ENOUGH_PROGRAMS))
    _score_kernel[(-(-max_pages // pages_each), num_queries)](
        q,
        weights,
        values,
        scales,
        pages,
        kv_lens,
        out,
        values.stride(0),
        scales.stride(0),
        pages.stride(0),
        max_pages,
        len(values),
        longer_than,
        pages_each,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=values.shape[1],
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _score_kernel(
    q,  # [num_queries, NUM_HEADS, HEAD_DIM]
    weights,  # [num_queries, NUM_HEADS]
    values,  # [num_pages, PAGE_SIZE, HEAD_DIM], pages value_stride apart
    scales,  # [num_pages, PAGE_SIZE], pages scale_stride apart
    pages,  # [num_queries, max_pages], rows pages_stride apart
    kv_lens,  # [num_queries]
    scores,  # [num_queries, max_pages * PAGE_SIZE], written
    value_stride,
    scale_stride,
    pages_stride,
    max_pages,
    num_pages,
    longer_than,
    pages_each,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    query = tl.program_id(1).to(tl.int64)
    kv_len = tl.minimum(tl.load(kv_lens + query), max_pages * PAGE_SIZE)
    first = tl.program_id(0) * pages_each * PAGE_SIZE
    if kv_len <= longer_than or first >= kv_len:
        return
    head = tl.arange(0, NUM_HEADS)
    channel = tl.arange(0, HEAD_DIM)
    row = tl.arange(0, PAGE_SIZE)
    of_heads = tl.load(q + query * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + channel[None, :])
    of_heads = tl.trans(of_heads)  # before the loop: then they go to shared memory once, not for every page
    weight = tl.load(weights + query * NUM_HEADS + head)
    in_page = row[:, None] * HEAD_DIM + channel[None, :]
    pages += query * pages_stride
    scores += query * max_pages * PAGE_SIZE
    last = tl.cdiv(tl.minimum(kv_len, first + pages_each * PAGE_SIZE), PAGE_SIZE)
    for number in tl.range(first // PAGE_SIZE, last, num_stages=NUM_STAGES):
        page = tl.load(pages + number).to(tl.int64)
        rows_left = kv_len - number * PAGE_SIZE
        read = row < tl.where((page >= 0) & (page < num_pages), rows_left, 0)
        tile = tl.load(values + page * value_stride + in_page, mask=read[:, None], other=0.0)
        scale = tl.load(scales + page * scale_stride + row, mask=read, other=0.0)
        products = tl.dot(tile, of_heads, input_precision="ieee")
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = tl.sum(products * weight[None, :], axis=1) * scale
        tl.store(scores + number * PAGE_SIZE + row, tl.where(read, score, float("-inf")), mask=row < rows_left)
