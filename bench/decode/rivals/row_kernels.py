"""Attention of a step to rows that are on the device for good, and to its tail; with what each kept row receives.

Programs of `attend_parts` take a range of rows each, those of `finish` merge the ranges. Definition:
`csattn.attention.device_reference`, and `csattn.selectors.h2o` for what rows receive.
"""

# ruff: noqa: N803
import triton
import triton.language as tl

NO_ROW = tl.constexpr(-1e30)  # the largest logit where there is none


@triton.jit
def attend_parts(  # type: ignore[no-untyped-def]
    q_ptr,  # [batch_size, num_q_heads, HEAD_DIM]
    kept_ptr,  # [num_contexts, num_kv_heads, num_kept, 2, HEAD_DIM]
    tails_ptr,  # [num_tails, num_kv_heads, tail_capacity, 2, HEAD_DIM]
    context_ids_ptr,
    tail_ids_ptr,
    tail_lens_ptr,
    parts_ptr,  # [batch_size, num_q_heads, num_parts, HEAD_DIM + 2] float32: sums of values, largest logit, sum
    logits_ptr,  # [batch_size, num_q_heads, num_kept] float32
    softmax_scale,
    num_kept,
    tail_capacity,
    num_parts,
    kept_parts,  # the first of the parts; the others are the tail's
    num_kv_heads,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
):
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_id = tl.maximum(tl.load(context_ids_ptr + row), 0)
    dims, members = tl.arange(0, HEAD_DIM), tl.arange(0, PADDED_GROUP)
    q_heads = row * num_kv_heads * GROUP + head * GROUP + members
    is_member = members < GROUP
    q = tl.load(q_ptr + q_heads[:, None] * HEAD_DIM + dims[None, :], mask=is_member[:, None], other=0.0)
    in_tail = part >= kept_parts
    kept_base = (context_id * num_kv_heads + head).to(tl.int64) * num_kept * 2 * HEAD_DIM
    tail_base = (tl.load(tail_ids_ptr + row) * num_kv_heads + head).to(tl.int64) * tail_capacity * 2 * HEAD_DIM
    if in_tail:
        base, num_rows = tails_ptr + tail_base, tl.load(tail_lens_ptr + row)
        first = (part - kept_parts) * PART_ROWS
    else:
        base, num_rows = kept_ptr + kept_base, num_kept
        first = part * PART_ROWS
    top = tl.full([PADDED_GROUP], NO_ROW, tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    mixed = tl.zeros([PADDED_GROUP, HEAD_DIM], tl.float32)
    for start in range(0, PART_ROWS, BLOCK):
        places = first + start + tl.arange(0, BLOCK)
        is_there = places < num_rows
        address = base + places[:, None].to(tl.int64) * 2 * HEAD_DIM + dims[None, :]
        k = tl.load(address, mask=is_there[:, None], other=0.0)
        v = tl.load(address + HEAD_DIM, mask=is_there[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(k), out_dtype=tl.float32) * softmax_scale
        logits = tl.where(is_there[None, :], logits, NO_ROW)
        if KEEP_LOGITS:
            at = q_heads[:, None].to(tl.int64) * num_kept + places[None, :]
            is_kept = places < tl.where(in_tail, 0, num_rows)
            tl.store(logits_ptr + at, logits, mask=is_member[:, None] & is_kept[None, :])
        higher = tl.maximum(top, tl.max(logits, axis=1))
        powers = tl.where(is_there[None, :], tl.exp(logits - higher[:, None]), 0.0)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(powers, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(powers.to(v.dtype), v, out_dtype=tl.float32)
        top = higher
    to = parts_ptr + (q_heads.to(tl.int64) * num_parts + part) * (HEAD_DIM + 2)
    tl.store(to[:, None] + dims[None, :], mixed, mask=is_member[:, None])
    tl.store(to + HEAD_DIM, top, mask=is_member)
    tl.store(to + HEAD_DIM + 1, total, mask=is_member)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    parts_ptr,  # of `attend_parts`
    far_ptr,  # [batch_size, num_q_heads, HEAD_DIM + 2] float32: one more part; read where HAS_FAR
    logits_ptr,
    received_ptr,  # [num_contexts, num_kv_heads, num_kept] float32: changed where KEEP_LOGITS
    context_ids_ptr,
    out_ptr,  # [batch_size, num_q_heads, HEAD_DIM]
    num_kept,
    num_parts,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,  # kept rows whose book a program keeps
    HAS_FAR: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
):
    number, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_id = tl.load(context_ids_ptr + row)
    parts, dims = tl.arange(0, PADDED_PARTS), tl.arange(0, HEAD_DIM)
    is_part = parts < num_parts
    places = number * BLOCK + tl.arange(0, BLOCK)
    share = tl.zeros([BLOCK], tl.float32)
    for member in range(GROUP):
        q_head = (row * num_kv_heads + head) * GROUP + member
        ends = parts_ptr + (q_head * num_parts + parts).to(tl.int64) * (HEAD_DIM + 2)
        tops = tl.load(ends + HEAD_DIM, mask=is_part, other=NO_ROW)
        totals = tl.load(ends + HEAD_DIM + 1, mask=is_part, other=0.0)
        top = tl.max(tops, axis=0)
        if HAS_FAR:
            far = far_ptr + q_head * (HEAD_DIM + 2)
            far_top = tl.load(far + HEAD_DIM)
            top = tl.maximum(top, far_top)
        factors = tl.exp(tops - top)
        total = tl.sum(totals * factors, axis=0)
        if HAS_FAR:
            far_factor = tl.exp(far_top - top)
            total += tl.load(far + HEAD_DIM + 1) * far_factor
        if number == member:
            mixed = tl.load(ends[:, None] + dims[None, :], mask=is_part[:, None], other=0.0)
            result = tl.sum(mixed * factors[:, None], axis=0)
            if HAS_FAR:
                result += tl.load(far + dims) * far_factor
            result = result / tl.where(total > 0, total, 1.0)
            tl.store(out_ptr + q_head * HEAD_DIM + dims, result.to(out_ptr.dtype.element_ty))
        if KEEP_LOGITS:
            at = q_head.to(tl.int64) * num_kept + places
            logits = tl.load(logits_ptr + at, mask=places < num_kept, other=NO_ROW)
            share += tl.exp(logits - top) / tl.where(total > 0, total, 1.0)
    if KEEP_LOGITS:
        book = received_ptr + (tl.maximum(context_id, 0) * num_kv_heads + head).to(tl.int64) * num_kept + places
        writes = places < tl.where(context_id >= 0, num_kept, 0)
        tl.store(book, tl.load(book, mask=writes, other=0.0) + share, mask=writes)
