"""Attention with its log-sum-exp, by torch's fused kernels where they return one."""

import torch
from torch import Tensor

from csattn.attention import reference
from csattn.attention.merge import join_sinks, merge_state


def attend(
    q: Tensor,  # [batch_size, num_kv_heads, q_len, head_dim]; the heads of a group follow each other in q_len
    k: Tensor,  # [batch_size, num_kv_heads, kv_len, head_dim]; last axis contiguous
    v: Tensor,
    softmax_scale: float,
    mask: Tensor | None = None,  # [q_len, kv_len] or broadcastable, bool: True where a query sees a row
    log_weights: Tensor | None = None,  # like mask, float32, finite: added to the logits
    logit_cap: float | None = None,  # logits are cap * tanh(logit / cap), before weights are added
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention over the given rows.

    Returns out, like q, and lse [batch_size, num_kv_heads, q_len] float32 (natural log of the sum of the weights).
    Without rows, out is zero and lse is -inf. Definition: `reference.attend`.
    """
    if k.shape[-2] == 0:  # torch's kernel divides by the number of rows
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    if logit_cap is not None or (q.device.type != "cpu" and q.shape[-1] % 8):
        return reference.attend(q, k, v, softmax_scale, mask, log_weights, logit_cap)
    bias = None if mask is None and log_weights is None else _bias(mask, log_weights, q, k)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=softmax_scale
        )
    elif bias is None and q.dtype != torch.float32:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=softmax_scale)[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=softmax_scale)[:2]
        lse = lse[..., : q.shape[-2]]  # the kernel pads it
    if mask is not None and not (sees := mask.any(-1)).all():  # the kernel leaves queries that see no row undefined
        out = out.masked_fill(~sees[..., None], 0.0)
        lse = lse.masked_fill(~sees, -torch.inf)
    return out, lse


def _bias(mask: Tensor | None, log_weights: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """The bias of the logits, -inf where a query does not see a row: [batch_size, num_kv_heads, q_len, kv_len]."""
    kv_len = k.shape[-2]
    bias = q.new_zeros(kv_len) if log_weights is None else log_weights.to(q.dtype)
    if mask is not None:
        bias = torch.where(mask, bias, -torch.inf)
    padded = torch.nn.functional.pad(bias, (0, -kv_len % 8))  # the GPU kernel needs rows aligned to 16 bytes
    return padded[..., :kv_len].expand(*q.shape[:-1], kv_len)


def attend_chunk(
    q: Tensor,  # [num_q_heads, chunk_len, head_dim]
    k: Tensor,  # [num_kv_heads, kv_len, head_dim]; the chunk's own rows are the last chunk_len
    v: Tensor,
    softmax_scale: float,
    first_seen: Tensor | None = None,  # [chunk_len] int: the first of these rows that each token sees; None: all
    logit_cap: float | None = None,
    sinks: Tensor | None = None,  # [num_q_heads] float32: the sink logit of each head, which has no row
) -> Tensor:
    """Causal attention of a chunk of queries, each to all rows up to its own: [num_q_heads, chunk_len, head_dim].

    Only the square on the diagonal needs a mask; the rows before the chunk need none if all of them are seen. On a CPU
    the kernel itself skips what is above the diagonal.
    """
    num_q_heads, chunk_len, head_dim = q.shape
    num_kv_heads, kv_len = k.shape[:2]
    if chunk_len == 0:  # torch's kernel divides by the number of rows
        return torch.zeros_like(q)
    past = kv_len - chunk_len
    packed = q.reshape(1, num_kv_heads, -1, head_dim)  # the group's heads share their KV head's rows
    unseen = 0 if first_seen is None else min(int(first_seen.min()), past)

    def attend_to(rows: slice, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if first_seen is not None:
            seen = torch.arange(rows.start, rows.stop, device=q.device) >= first_seen[:, None]
            mask = seen if mask is None else mask & seen
        mask = None if mask is None else mask.repeat(num_q_heads // num_kv_heads, 1)
        return attend(packed, k[None, :, rows], v[None, :, rows], softmax_scale, mask, logit_cap=logit_cap)

    if q.device.type == "cpu" and first_seen is None and logit_cap is None:
        own_k, own_v = (x[:, past:].repeat_interleave(num_q_heads // num_kv_heads, dim=0)[None] for x in (k, v))
        by_head = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], own_k, own_v, 0.0, True, scale=softmax_scale
        )
        out: Tensor = by_head[0].reshape(packed.shape)
        lse: Tensor = by_head[1].reshape(packed.shape[:-1])
    else:
        causal = torch.ones(chunk_len, chunk_len, dtype=torch.bool, device=q.device).tril()
        out, lse = attend_to(slice(past, kv_len), causal)
    if past > unseen:
        out, lse = merge_state(out, lse, *attend_to(slice(unseen, past), None))
    if sinks is not None:
        out = join_sinks(out, lse, sinks.view(num_kv_heads, -1, 1).expand(-1, -1, chunk_len).flatten(1))
    return out.reshape(num_q_heads, chunk_len, head_dim)
