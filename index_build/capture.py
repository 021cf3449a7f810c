"""Layer-major prefill: capture each layer's queries, keys and values after RoPE, one layer in memory, on a GPU two.

The hidden states of the whole context pass through layer 0, then through layer 1, and so on, in chunks of rows.
So the memory of q, k and v does not depend on the model's depth, and a build can resume at any layer from the hidden
states that enter it. All arrays are on the model's device; layers in host memory are copied to it one by one.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from math import inf, isfinite, prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from csattn.attention import attend_chunk, merge_state
from csattn.cuda import free_device_bytes
from csattn.errors import CaptureError
from csattn.models.attending_cache import CACHE
from csattn.models.attention_hook import attention_implementation
from csattn.models.description import describe, layer_type
from csattn.models.families import FAMILIES
from csattn.models.layer_offload import layer_on_device
from csattn.models.query import embed, layer_inputs
from csattn.models.recurrent_spec import ConvSpec, RecurrentSpec, ScanSpec
from csattn.models.rope import position_embeddings
from csattn.models.spec import AttentionSpec, ModelSpec
from csattn.sketch.reference import LARGEST_NUMBER
from index_build.compressed_capture import CompressedLayer
from index_build.latent_capture import LatentLayer

CHUNK_LEN = 1024
CHUNK_LEN_ON_GPU = 8192
_WIDEST_FUSED = 256  # the largest head_dim that torch's fused attention kernels take


@dataclass(slots=True)
class LayerCapture:
    """What is captured of the context in one layer. Later layers reuse the arrays q and kv."""

    layer_idx: int
    q: Tensor  # [num_q_heads, context_len, head_dim]; without rows if no layer has an index, as with latents
    kv: Tensor  # [num_kv_heads, context_len, 2, head_dim]: K and V of one key are adjacent
    hidden_in: Tensor  # [context_len, hidden_size], the layer's input
    is_single_buffered: bool  # whether the next layer overwrites q and kv; else the one after it (double buffering)
    # Of a layer without rows, the state after the context, empty for an MLP alone: see `Artifact.states`. q and kv then
    # belong to another layer.
    state: dict[str, Tensor] | None = None


class _CapturingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """A cache layer of transformers that stands for its keys and values: stores them, and computes attention."""

    def __init__(self, capture: LayerCapture, spec: AttentionSpec, sinks: Tensor | None):
        super().__init__()
        self._capture, self._spec = capture, spec
        self._sinks = None if sinks is None else sinks.float()
        self._num_rows = 0

    def to(self, device: torch.device) -> Self:
        """Return itself: some versions of transformers call `to` in layers that attend to another layer's rows."""
        return self

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Self, Self]:
        chunk = slice(self._num_rows, self._num_rows + k.shape[2])
        self._capture.kv[:, chunk, 0] = k[0]
        self._capture.kv[:, chunk, 1] = v[0]
        self._num_rows = chunk.stop
        return self, self

    def get_seq_length(self) -> int:
        return self._num_rows

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        if self._spec.rows_of is not None:  # another layer's rows, which are all stored already
            self._num_rows += q.shape[2]
        rows, tokens = self._capture.kv[:, : self._num_rows], range(self._num_rows - q.shape[2], self._num_rows)
        self._capture.q[:, tokens.start : tokens.stop] = q[0]
        kv = rows[:, :, 0], rows[:, :, 1]
        reach = self._spec.reach
        if q.is_cuda and reach is None and self._spec.logit_cap is None and self._sinks is None:
            return attend_chunk_on_gpu(q[0], *kv, softmax_scale)[None]
        first_seen = None
        if reach is not None:
            first_seen = torch.tensor([reach.first_seen(token) for token in tokens], device=q.device)
        return attend_chunk(q[0], *kv, softmax_scale, first_seen, self._spec.logit_cap, self._sinks)[None]


class _TransformersLayer:
    """Runs a decoder layer of `transformers` over a context, chunk by chunk. Only its attention is computed here."""

    def __init__(
        self, model: Any, layer: Any, spec: ModelSpec, capture: LayerCapture, rope: Any, token_ids: Tensor
    ) -> None:
        """rope: see `position_embeddings`."""
        self._model, self._layer, self._layer_idx = model, layer, capture.layer_idx
        self._rope, self._token_ids, self._has_inputs = rope, token_ids, bool(spec.layer_input_width)
        self._spec = spec.layers[capture.layer_idx]
        self._kept: Any = LinearAttentionLayer()
        self._more: dict[str, Any] = {}
        if self._spec.recurrent is None and not self._spec.mlp_only:
            sinks = getattr(FAMILIES[model.config.model_type].part(layer, "self_attn"), "sinks", None)
            self._kept = _CapturingLayer(capture, self._spec.attention, sinks)
            if "shared_kv_states" in signature(layer.forward).parameters:
                kind = layer_type(model.config, capture.layer_idx)
                self._more["shared_kv_states"] = {kind: (self._kept, self._kept)}
        self._more[CACHE] = Cache(layers=[self._kept] * (capture.layer_idx + 1))  # this layer's cache, at any layer_idx

    def __call__(self, hidden: Tensor, rows: slice) -> Tensor:
        """Return the layer's output for these tokens, like hidden [num_tokens, hidden_size]."""
        rope = tuple(x[:, rows] for x in self._rope) if isinstance(self._rope, tuple) else self._rope
        if isinstance(rope, Tensor):
            rope = rope[:, rows]
        if self._has_inputs:
            self._more["per_layer_input"] = layer_inputs(self._model, self._token_ids[rows], self._layer_idx)[None]
        hidden_out: Tensor = self._layer(
            hidden[None],
            attention_mask=None,
            position_ids=torch.arange(rows.start, rows.stop, device=hidden.device)[None],
            use_cache=True,
            position_embeddings=rope,
            **self._more,
        )[0]
        return hidden_out

    def state(self) -> dict[str, Tensor] | None:
        """Return `LayerCapture.state` after all tokens."""
        if self._spec.recurrent is not None:
            return _state_arrays(self._kept, self._spec.recurrent)
        return {} if self._spec.mlp_only else None


@torch.inference_mode()
def prefill(
    model: Any,  # transformers causal LM of a supported family
    token_ids: Tensor,  # [context_len] int64
    *,
    # the layer to start at, and the hidden states [context_len, hidden_size] that enter it, streams concatenated
    resume: tuple[int, Tensor] | None = None,
    chunk_len: int | None = None,
    on_chunk: Callable[[int, int], None] = lambda layer_idx, num_rows: None,
) -> Generator[tuple[LayerCapture, Tensor]]:
    """Yield each layer's capture, and its output hidden states.

    Raises CaptureError if a layer produces NaN, infinity or numbers that are too large for an index.
    """
    body, context_len, spec = model.model, len(token_ids), describe(model.config)
    first_layer, hidden = resume or (0, _embedded(model, token_ids.to(model.device), spec))
    hidden = hidden.to(model.device)
    plain = all((x.reach, x.sinks, x.logit_cap) == (None, False, None) for x in (y.attention for y in spec.layers))
    plain = plain and all(layer.latent is None and layer.compressed is None for layer in spec.layers)
    chunk_len = chunk_len or (CHUNK_LEN_ON_GPU if hidden.is_cuda and plain else CHUNK_LEN)
    positions = torch.arange(context_len, device=hidden.device)[None]
    embeddings: list[Any] = [None] * spec.num_layers  # None: the layer computes its own RoPE
    if spec.streams is None:
        embeddings = position_embeddings(body, hidden[None], positions)
    token_ids, arrays = token_ids.to(hidden.device), _Arrays(spec, context_len, hidden)
    top_k = next((x.latent.top_k for x in spec.layers if x.latent is not None), None)
    chosen = None if top_k is None else torch.empty(context_len, top_k, dtype=torch.int32, device=hidden.device)
    with attention_implementation(model):
        for layer_idx in range(first_layer, len(body.layers)):
            q, kv = arrays.of(layer_idx)
            capture = LayerCapture(layer_idx, q, kv, hidden, arrays.is_single_buffered)
            hidden_out, of_layer, rope = torch.empty_like(hidden), spec.layers[layer_idx], embeddings[layer_idx]
            with layer_on_device(model, layer_idx) as layer:
                run: CompressedLayer | LatentLayer | _TransformersLayer
                if of_layer.compressed is not None:
                    run = CompressedLayer(layer, body.rotary_emb, model.config.hidden_size, token_ids)
                elif of_layer.latent is not None:
                    latents = kv.view(context_len, -1)
                    run = LatentLayer(layer, of_layer.latent, spec.softmax_scale, spec.ropes[0], rope, latents, chosen)
                else:
                    run = _TransformersLayer(model, layer, spec, capture, rope, token_ids)
                for rows in _chunks(context_len, chunk_len):
                    hidden_out[rows] = run(hidden[rows], rows)
                    on_chunk(layer_idx, rows.stop - rows.start)
            capture.state = run.state()
            _require_in_range(capture)
            yield capture, hidden_out
            hidden = hidden_out


def _chunks(context_len: int, chunk_len: int) -> list[slice]:
    """Divide a context into chunks. A last token on its own belongs to the chunk before it.

    transformers would take it for a decode step, in which state spaces ignore their least step.
    """
    starts = list(range(0, context_len, chunk_len))
    if len(starts) > 1 and starts[-1] == context_len - 1:
        starts.pop()
    return [slice(start, stop) for start, stop in pairwise([*starts, context_len])]


def _embedded(model: Any, token_ids: Tensor, spec: ModelSpec) -> Tensor:
    """Return the input of the first layer: [context_len, hidden_size], streams concatenated."""
    hidden = embed(model, token_ids)
    return hidden.clone() if spec.streams is None else hidden.repeat(1, spec.streams.num)


class _Arrays:
    """Memory for q and kv that layers take turns with, except the rows that later layers attend to, which are kept."""

    def __init__(self, spec: ModelSpec, context_len: int, like: Tensor) -> None:
        self._spec, self._context_len, self._like = spec, context_len, like
        self._num_queries = context_len if spec.indexed_layers else 0
        heads = [spec.heads_of(layer_idx) for layer_idx in range(spec.num_layers)]
        widths = self._num_queries * max(of.q_width for of in heads), 2 * context_len * max(of.kv_width for of in heads)
        self._room = [tuple(like.new_empty(width) for width in widths)]
        if _has_room_for_another(self._room[0]):
            self._room.append(tuple(like.new_empty(width) for width in widths))
        self._shared_kv: dict[int, Tensor] = {}

    @property
    def is_single_buffered(self) -> bool:
        return len(self._room) == 1

    def of(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the layer's q and kv, as in `LayerCapture`."""
        heads, (q, kv) = self._spec.heads_of(layer_idx), self._room[layer_idx % len(self._room)]
        q_sizes = heads.num_q_heads, self._num_queries, heads.head_dim
        kv_sizes = heads.num_kv_heads, self._context_len, 2, heads.head_dim
        q, kv = (numbers[: prod(sizes)].view(sizes) for numbers, sizes in ((q, q_sizes), (kv, kv_sizes)))
        if layer_idx in self._spec.kv_sources:
            kv = self._shared_kv[layer_idx] = self._like.new_empty(kv_sizes)
        kv_source = self._spec.layers[layer_idx].attention.rows_of
        return q, kv if kv_source is None else self._shared_kv[kv_source]


def _has_room_for_another(arrays: tuple[Tensor, ...]) -> bool:
    """Whether a GPU has room for a second pair of arrays, besides a layer's activations and the making of its index."""
    if not arrays[0].is_cuda:
        return False
    return 4 * sum(array.nbytes for array in arrays) <= free_device_bytes(arrays[0].device)


def can_start_at(model: Any, layer_idx: int) -> bool:
    """Return whether a prefill can resume at that layer.

    It cannot at a layer that reuses the rows chosen by an earlier one, or after a layer whose rows others attend to.
    """
    spec = describe(model.config)
    latent = spec.layers[layer_idx].latent
    chooses = latent is None or latent.indexer is not None or latent.top_k is None
    return chooses and not any(kv_source < layer_idx for kv_source in spec.kv_sources)


def attend_chunk_on_gpu(
    q: Tensor,  # [num_q_heads, chunk_len, head_dim]
    k: Tensor,  # [num_kv_heads, kv_len, head_dim]; the chunk's own rows are the last chunk_len
    v: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Compute `attend_chunk` with torch's fused kernels for GPUs: [num_q_heads, chunk_len, head_dim].

    For heads that are too wide for these, logits are materialised for one KV head at a time.
    """
    if q.shape[2] > _WIDEST_FUSED:
        by_head = zip(*(rows.chunk(len(k)) for rows in (q, k, v)), strict=True)
        return torch.cat([attend_chunk(own_q, own_k, own_v, softmax_scale) for own_q, own_k, own_v in by_head])
    if _cudnn_is_faster(q, k, v):
        before = k.shape[1] - q.shape[1]  # rows that the whole chunk sees; cuDNN's causal mask is aligned top left
        own = _attend_by_cudnn(q, k[:, before:], v[:, before:], softmax_scale, is_causal=True)
        if before == 0:
            return own[0]
        return merge_state(*own, *_attend_by_cudnn(q, k[:, :before], v[:, :before], softmax_scale, is_causal=False))[0]
    grouped = q.dtype != torch.float32
    if not grouped:  # the float32 kernel has no GQA
        k, v = (rows.repeat_interleave(len(q) // len(rows), dim=0) for rows in (k, v))
    mask = causal_lower_right(q.shape[1], k.shape[1])
    return scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=softmax_scale, enable_gqa=grouped
    )[0]


def _cudnn_is_faster(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether to use cuDNN: on Hopper or later (on an H100 it is almost twice as fast), if torch says it can."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    return can_use_cudnn_attention(SDPAParams(q[None], k[None], v[None], None, 0.0, False, True))


def _attend_by_cudnn(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return out [num_q_heads, num_tokens, head_dim] and its log-sum-exp [num_q_heads, num_tokens]."""
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, is_causal, scale=softmax_scale
    )[:2]
    return out[0], lse.view(q.shape[:2])


def _state_arrays(state: LinearAttentionLayer, spec: RecurrentSpec) -> dict[str, Tensor]:
    """Return conv and memory, float32, in the sizes of the spec's `parts`."""
    conv = state.conv_states[0][0, :, 1:]
    memory = conv.new_empty(spec.parts[1]) if isinstance(spec, ConvSpec) else state.recurrent_states[0][0]
    if isinstance(spec, ScanSpec):  # transformers has the head's dimensions first
        memory = memory.mT
    return {"conv": conv.float().contiguous(), "memory": memory.float().contiguous()}


def _require_in_range(capture: LayerCapture) -> None:
    if capture.kv.is_cuda:  # first: waiting in `float(...)` below would lock the indexing thread out of the driver
        torch.cuda.current_stream(capture.kv.device).synchronize()
    made = {"queries": capture.q, "keys and values": capture.kv} if capture.state is None else capture.state
    limit = LARGEST_NUMBER if capture.state is None else inf  # a state is not indexed
    for name, array in made.items():
        fault = _fault_of(array, limit)
        if fault is not None:
            raise CaptureError(
                f"layer {capture.layer_idx} produced {fault} in its {name}; the model may be damaged or "
                "overflow in its dtype: check its weights, or build with --dtype float32"
            )


def _fault_of(array: Tensor, limit: float) -> str | None:
    if not array.numel():
        return None
    least, most = torch.aminmax(array)  # both are NaN if any element is
    largest = float(torch.maximum(-least, most))
    if not isfinite(largest):
        return "NaN or infinity"
    return None if largest <= limit else f"numbers up to {largest:.1e}, above the {limit:.1e} that an index takes,"
