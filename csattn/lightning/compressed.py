"""A whole layer of DeepSeek-V4's compressed attention: from hidden states to what it adds to the residual stream.

A token attends to the rows of a sliding window that ends with its own, and to compressed rows, each pooled from several
earlier tokens: to all of these or, where the layer has an indexer, to those with the best keys. One row is the key and
the value of all heads. RoPE rotates a row's last channels by its position, so outputs are rotated back by the query's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from csattn.errors import ConfigError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.mla.attend import sparse_mla
from csattn.lightning.operands.compressor import Compressor, CompressorWeights
from csattn.lightning.operands.indexer import Operands, causal_lens
from csattn.lightning.operands.rotations import rope_last
from csattn.lightning.prefill.stream import choose_keys

TOKENS = 4096  # processed at a time: this bounds memory, and is enough to fill a GPU


@dataclass(frozen=True, slots=True)
class RowProjections:
    """Projections and compressor that pool several tokens into one row, or into one index key."""

    kv: Tensor  # [width, hidden_size], width: that of the compressor's `position_bias`
    gate: Tensor  # [width, hidden_size]
    compressor: CompressorWeights


@dataclass(frozen=True, slots=True)
class CompressedIndexer:
    """The indexer, which chooses compressed rows for a token by one key per row."""

    keys: RowProjections
    q_b: Tensor  # [num_heads * key_dim, q_rank]
    head_weights: Tensor  # [num_heads, hidden_size]
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedWeights:
    """Weights of one layer. All matrices have one dtype; the other arrays are float32."""

    q_a: Tensor  # [q_rank, hidden_size]
    q_norm: Tensor  # [q_rank]
    q_b: Tensor  # [num_heads * head_dim, q_rank]
    kv: Tensor  # [head_dim, hidden_size]
    kv_norm: Tensor  # [head_dim]
    out_a: Tensor  # [num_groups, out_rank, num_heads * head_dim / num_groups]
    out_b: Tensor  # [hidden_size, num_groups * out_rank]
    sinks: Tensor  # [num_heads]
    window: int  # rows of the sliding window, the token's own included
    inv_freq: Tensor  # [rope_dim // 2] of RoPE
    norm_eps: float
    rows: RowProjections | None = None  # None: a token attends to its window only
    indexer: CompressedIndexer | None = None  # None: a token attends to all compressed rows that it may see

    @classmethod
    def of(cls, attention: Any, rotary: Any) -> "CompressedWeights":
        """Take the weights of transformers' `DeepseekV4Attention`, matrices uncopied. rotary: its model's `rotary_emb`.

        Raises ConfigError for RoPE that scales rows (an attention_factor other than 1), which no published model has.
        """
        compressor, rope_type = attention.compressor, attention.rope_layer_type
        if (scaling := getattr(rotary, f"{rope_type}_attention_scaling")) != 1:
            raise ConfigError(f"RoPE multiplies this layer's rows by {scaling}; wanted 1, its attention_factor")
        indexer = getattr(compressor, "indexer", None)
        return cls(
            q_a=attention.q_a_proj.weight.detach(),
            q_norm=attention.q_a_norm.weight.detach().float(),
            q_b=attention.q_b_proj.weight.detach(),
            kv=attention.kv_proj.weight.detach(),
            kv_norm=attention.kv_norm.weight.detach().float(),
            out_a=attention.o_a_proj.weight.detach().unflatten(0, (attention.config.o_groups, -1)),
            out_b=attention.o_b_proj.weight.detach(),
            sinks=attention.sinks.detach().float(),
            window=attention.sliding_window,
            inv_freq=getattr(rotary, f"{rope_type}_inv_freq").float(),
            norm_eps=attention.kv_norm.variance_epsilon,
            rows=compressor and _projections_of(compressor, rotary),
            indexer=indexer
            and CompressedIndexer(
                keys=_projections_of(indexer, rotary),
                q_b=indexer.q_b_proj.weight.detach(),
                head_weights=indexer.scorer.weights_proj.weight.detach(),
                top_k=indexer.index_topk,
            ),
        )

    @property
    def num_heads(self) -> int:
        return len(self.sinks)

    def check(self) -> None:
        """Raise ArrayError or ConfigError unless the weights fit together."""
        dtype, like = self.kv.dtype, self.kv
        require_array("kv", self.kv, ("head_dim", "hidden_size"), torch.bfloat16, torch.float16, torch.float32)
        require_array("sinks", self.sinks, ("num_heads",), torch.float32, like=like)
        (head_dim, hidden_size), q_width = self.kv.shape, self.num_heads * len(self.kv)
        require_array("kv_norm", self.kv_norm, (head_dim,), torch.float32, like=like)
        require_array("q_norm", self.q_norm, ("q_rank",), torch.float32, like=like)
        require_array("q_a", self.q_a, (len(self.q_norm), hidden_size), dtype, like=like)
        require_array("q_b", self.q_b, (q_width, len(self.q_norm)), dtype, like=like)
        require_array("out_a", self.out_a, ("num_groups", "out_rank", "width"), dtype, like=like)
        num_groups, out_rank, width = self.out_a.shape
        if num_groups * width != q_width:
            raise ConfigError(f"out_a takes {num_groups} groups of {width} channels; wanted {q_width} channels in all")
        require_array("out_b", self.out_b, (hidden_size, num_groups * out_rank), dtype, like=like)
        require_at_least("window", self.window, 1)
        require_array("inv_freq", self.inv_freq, ("num_pairs",), torch.float32, like=like)
        if self.rows is None:
            if self.indexer is not None:
                raise ConfigError("there is an indexer, but there are no compressed rows to choose from; leave it out")
            return
        self._check_rows("rows", self.rows)
        require_at_least("head_dim", head_dim, self.rows.compressor.head_dim, self.rows.compressor.head_dim)
        if (of := self.indexer) is None:
            return
        self._check_rows("indexer.keys", of.keys)
        key_dim, ratio = of.keys.compressor.head_dim, self.rows.compressor.ratio
        require_at_least("the keys' ratio", of.keys.compressor.ratio, ratio, ratio)
        if of.keys.compressor.overlap != self.rows.compressor.overlap:
            raise ConfigError("only one of rows and indexer.keys overlaps; both pool the block before, or neither does")
        require_array("indexer.head_weights", of.head_weights, ("num_heads", hidden_size), dtype, like=like)
        require_array("indexer.q_b", of.q_b, (len(of.head_weights) * key_dim, len(self.q_norm)), dtype, like=like)
        require_at_least("top_k", of.top_k, 1)

    def _check_rows(self, name: str, rows: RowProjections) -> None:
        of = rows.compressor
        of.check()
        for array in (of.position_bias, of.norm_weight, of.inv_freq):
            require_array(f"{name}.compressor's array", array, tuple(array.shape), like=self.kv)
        shape = of.position_bias.shape[1], self.kv.shape[1]
        require_array(f"{name}.kv", rows.kv, shape, self.kv.dtype, like=self.kv)
        require_array(f"{name}.gate", rows.gate, shape, self.kv.dtype, like=self.kv)


@dataclass(frozen=True, slots=True)
class CompressedState:
    """What a layer keeps of a sequence's tokens for later ones."""

    window: Tensor  # [min(window - 1, num_tokens), head_dim], the last rows of tokens
    rows: Tensor  # [num_rows, head_dim], the compressed rows
    keys: Tensor  # [num_rows, key_dim]; without an indexer [0, 0]
    # [num_pending, 2 * width of rows + 2 * width of keys] float32: `Compressor.unfinished` of rows, then of keys
    pending: Tensor


class CompressedAttention:
    """The layer over one sequence, with its state. Tokens may be appended all at once, in pieces, or one by one."""

    def __init__(self, weights: CompressedWeights) -> None:
        weights.check()
        self._weights = weights
        self._num_tokens, self._is_whole = 0, True
        # ahead of the compressed rows: the window's earlier rows, then those of up to TOKENS tokens being appended
        self._rows = _GrowingRows(weights.rows, weights.kv, front=weights.window - 1 + TOKENS)
        self._keys = None if weights.indexer is None else _GrowingRows(weights.indexer.keys, weights.kv)

    def __repr__(self) -> str:
        return f"<CompressedAttention after {self._num_tokens} tokens, {self._rows.num_rows} compressed rows>"

    @property
    def state(self) -> CompressedState:
        """The state so far. `pending` is a copy, the others are views; the next `append` overwrites `window`."""
        before, made = self._weights.window - 1, [self._rows] if self._keys is None else [self._rows, self._keys]
        return CompressedState(
            window=self._rows.all[before - min(before, self._num_tokens) : before],
            rows=self._rows.all[self._rows.front :],
            keys=self._rows.all[:0, :0] if self._keys is None else self._keys.all,
            pending=torch.cat([part for of in made for part in of.unfinished], dim=1),
        )

    @torch.no_grad()
    def append(self, hidden: Tensor) -> Tensor:
        """Return what the layer adds to the residual stream for the next tokens: [num_tokens, hidden_size].

        hidden: [num_tokens, hidden_size], after the layer's norm. Raises ArrayError unless width, dtype and device are
        those of the weights, and ConfigError after a call that failed midway, for example for lack of memory.
        """
        weights = self._weights
        require_array("hidden", hidden, ("num_tokens", weights.kv.shape[1]), weights.kv.dtype, like=weights.kv)
        if not self._is_whole:
            raise ConfigError("an earlier append failed, so that rows are missing; begin the sequence again")
        self._is_whole = False
        out = torch.cat([self._append(some) for some in torch.split(hidden, TOKENS)])
        self._is_whole = True
        return out

    def _append(self, hidden: Tensor) -> Tensor:
        weights, num_tokens, before = self._weights, len(hidden), self._weights.window - 1
        positions = torch.arange(self._num_tokens, self._num_tokens + num_tokens, device=hidden.device)
        latents = self._normed(linear(hidden, weights.q_a), weights.q_norm)
        q = self._normed(torch.unflatten(linear(latents, weights.q_b), 1, (weights.num_heads, -1)))
        own = self._rotated(self._normed(linear(hidden, weights.kv), weights.kv_norm), positions)
        self._rows.append(hidden)
        rows = self._rows.all
        rows[before : before + num_tokens] = own
        seen = torch.cat((self._seen_of_window(num_tokens), self._seen_compressed(hidden, latents, positions)), dim=1)
        scale = len(weights.kv) ** -0.5
        out, _ = sparse_mla(self._rotated(q, positions), None, rows, None, seen, scale, attn_sink=weights.sinks)
        rows[:before] = rows[num_tokens : num_tokens + before].clone()
        self._num_tokens += num_tokens
        num_groups, _, width = weights.out_a.shape
        groups = self._rotated(out, -positions).reshape(num_tokens, num_groups, width)
        return linear(torch.einsum("tgi,gri->tgr", groups, weights.out_a).flatten(1), weights.out_b)

    def _seen_of_window(self, num_tokens: int) -> Tensor:
        """Return the indices of the window's rows that each token sees: [num_tokens, window] int32, -1: none."""
        window, device = self._weights.window, self._weights.kv.device
        at = torch.arange(num_tokens, device=device)[:, None] + torch.arange(window, device=device)
        return torch.where(at + self._num_tokens >= window - 1, at, -1).to(torch.int32)

    def _seen_compressed(self, hidden: Tensor, latents: Tensor, positions: Tensor) -> Tensor:
        """Return the indices of the compressed rows that each token attends to: [num_tokens, n] int32, -1: none."""
        num_rows, indexer, first = self._rows.num_rows, self._weights.indexer, self._num_tokens
        if self._weights.rows is None:
            return torch.empty(len(hidden), 0, dtype=torch.int32, device=hidden.device)
        ratio = self._weights.rows.compressor.ratio
        legal = causal_lens(len(hidden), num_rows, ratio=ratio, first_position=first)
        if indexer is None or self._keys is None:
            rows = torch.arange(num_rows, dtype=torch.int32, device=hidden.device).expand(len(hidden), -1)
            return torch.where(rows < legal[:, None].to(hidden.device), rows + self._rows.front, -1)
        self._keys.append(hidden)
        q = torch.unflatten(linear(latents, indexer.q_b), 1, (len(indexer.head_weights), -1))
        scale = (q.shape[1] * q.shape[2]) ** -0.5
        head_weights = linear(hidden, indexer.head_weights).float() * scale
        operands = Operands(self._rotated(q, positions), self._keys.all, head_weights)
        chosen = choose_keys(operands, min(indexer.top_k, max(1, num_rows)), legal)
        return torch.where(chosen >= 0, chosen + self._rows.front, -1)

    def _normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        wide = x.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + self._weights.norm_eps).rsqrt()
        return (normed if weight is None else weight * normed).to(x.dtype)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x with its last channels rotated by RoPE."""
        return rope_last(x, positions, self._weights.inv_freq, interleaved=True)


class _GrowingRows:
    """A growing array of compressed rows, after `front` rows that the caller fills."""

    def __init__(self, of: RowProjections | None, like: Tensor, front: int = 0) -> None:
        """of: None: no compressed rows come; rows have len(like) channels. like: an array of the dtype and device."""
        self._of, self.front, self.num_rows = of, front, 0
        self._compressor = None if of is None else Compressor(of.compressor)
        self._storage = like.new_zeros(front, len(like) if of is None else of.compressor.head_dim)

    @property
    def all(self) -> Tensor:
        """All rows, those of the caller first: [front + num_rows, head_dim], of the dtype of `like`."""
        return self._storage[: self.front + self.num_rows]

    @property
    def unfinished(self) -> tuple[Tensor, Tensor]:
        """As of `Compressor`; empty where no compressed rows come."""
        nothing = self._storage[:0, :0].float()
        return (nothing, nothing) if self._compressor is None else self._compressor.unfinished

    def append(self, hidden: Tensor) -> None:
        """Append the rows that these tokens complete, with the earlier ones that had not filled a row."""
        if self._of is None or self._compressor is None:
            return
        projected = [linear(hidden, weight).float() for weight in (self._of.kv, self._of.gate)]
        new, end = self._compressor.append(*projected), self.front + self.num_rows
        if end + len(new) > len(self._storage):
            larger = self._storage.new_empty(max(2 * len(self._storage), end + len(new)), self._storage.shape[1])
            larger[:end] = self._storage[:end]
            self._storage = larger
        self._storage[end : end + len(new)] = new
        self.num_rows += len(new)


def _projections_of(module: Any, rotary: Any) -> RowProjections:
    """Take the projections of transformers' `DeepseekV4CSACompressor`, its indexer, or a `DeepseekV4HCACompressor`."""
    weights = CompressorWeights(
        position_bias=module.position_bias.detach().float(),
        norm_weight=module.kv_norm.weight.detach().float(),
        inv_freq=rotary.compress_inv_freq.float(),
        norm_eps=module.kv_norm.variance_epsilon,
    )
    return RowProjections(module.kv_proj.weight.detach(), module.gate_proj.weight.detach(), weights)
