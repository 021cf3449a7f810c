"""Contexts prefilled by transformers for the decode loop, and transformers' own continuations of them."""

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from csattn.config import SearchConfig
from csattn.lightning.compressed import CompressedState
from csattn.models.attending_cache import CACHE
from csattn.models.description import describe, layer_type
from csattn.models.recurrent_spec import ScanSpec
from csattn.models.spec import ModelSpec
from index_build.capture import prefill
from tests.tiny import token_ids
from tests.workers.model.full_attention import FullAttention
from workers.engine.gpu.attend_compressed import AttendCompressed
from workers.engine.gpu.compressed_memory import CompressedMemory
from workers.engine.gpu.shape import EngineShape
from workers.model import ModelRunner, take_weights
from workers.model.ops import RecurrentState

CONTEXT_LENS = (37, 50)


@torch.no_grad()
def context_kv(model: Any, ids: Tensor) -> list[Tensor]:
    """Return each layer's rows [num_kv_heads, len(ids), 2, head_dim]: zeros for layers without rows."""
    layers, spec = cache_of(model, ids), describe(model.config)
    kinds = [layer.attention for layer in spec.layers]
    layers = [layers[i if kind.rows_of is None else kind.rows_of] for i, kind in enumerate(kinds)]
    if spec.layers[0].latent is not None:
        return [_latent_rows(layer, spec) for layer in layers]
    keeps = [not isinstance(x, LinearAttentionLayer) and x.keys is not None for x in layers]
    pairs = [torch.stack([x.keys[0], x.values[0]], 2) if has else None for x, has in zip(layers, keeps, strict=True)]
    zeros = torch.zeros_like(next(pair for pair in pairs if pair is not None))
    return [zeros if pair is None else pair for pair in pairs]


def _latent_rows(layer: Any, spec: ModelSpec) -> Tensor:
    """Return latent rows as csattn stores them: if the model's RoPE is interleaved, rotated pairs are neighbours."""
    index_keys, latent = getattr(layer, "indexer_keys", None), spec.layers[0].latent
    assert latent is not None
    rotated = _interleaved(layer.values[0, 0]) if spec.ropes[0].interleaved else layer.values[0, 0]
    parts = [layer.keys[0, 0], rotated]
    if index_keys is not None and latent.indexer is not None:
        of_pairs, others = index_keys[0].split([latent.rope_dim, latent.indexer.head_dim - latent.rope_dim], dim=-1)
        parts += [_interleaved(of_pairs) if latent.indexer.interleaved else of_pairs, others]
    rows = torch.cat(parts, dim=-1)
    return functional.pad(rows, (0, 2 * spec.head_dim - rows.shape[1])).view(1, len(rows), 2, -1)


def _interleaved(x: Tensor) -> Tensor:
    """Place dimensions i and i + half next to each other."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def cache_of(model: Any, ids: Tensor) -> list[Any]:
    """Return each layer's cache after ids, with all of its rows."""
    types = {layer_type(model.config, layer_idx) for layer_idx in range(model.config.num_hidden_layers)}
    if not {"linear_attention", "conv", "indexed_attention"} & types:
        return list(model(ids[None], **{CACHE: DynamicCache()})[CACHE].layers)
    return list(model(ids[None], use_cache=True)[CACHE].layers)


def contexts_of(model: Any) -> list[Tensor]:
    """The ids of two contexts of different length."""
    return [torch.from_numpy(token_ids(length, seed=length)).long().to(model.device) for length in CONTEXT_LENS]


def full_attention(model: Any, num_tails: int = 4, tail_capacity: int = 60, begun: int = 0) -> FullAttention:
    """Make full attention over both contexts, with states as after context `begun`. Padding is NaN in K, 0 in V."""
    by_context = [context_kv(model, ids) for ids in contexts_of(model)]
    layers = []
    for parts in zip(*by_context, strict=True):
        heads, _, _, head_dim = parts[0].shape
        kv = parts[0].new_zeros(len(parts), heads, max(CONTEXT_LENS), 2, head_dim)
        kv[:, :, :, 0] = torch.nan
        for context_id, part in enumerate(parts):
            kv[context_id, :, : part.shape[1]] = part
        layers.append(kv)
    spec = describe(model.config)
    sinks = [getattr(getattr(layer, "self_attn", None), "sinks", None) for layer in model.model.layers]
    kinds = [layer.attention for layer in spec.layers]
    attention = FullAttention(layers, CONTEXT_LENS, num_tails, tail_capacity, spec.softmax_scale, kinds, sinks)
    attention.latents = [layer.latent for layer in spec.layers]
    for layer_idx, layer in enumerate(spec.layers):
        if layer.recurrent is not None:
            attention.states[layer_idx] = _begun(model, layer_idx, num_tails, begun)
    for tail in attention.tails:
        tail.fill_(torch.nan)  # rows that are not written must not be read
    return attention


@torch.no_grad()
def _begun(model: Any, layer_idx: int, num_tails: int, context_id: int) -> RecurrentState:
    """Return the state after that context, repeated for all tails."""
    state = cache_of(model, contexts_of(model)[context_id])[layer_idx]
    conv = state.conv_states[0][0, :, 1:].float()
    memory = conv.new_zeros(0, 0, 0) if state.recurrent_states[0] is None else state.recurrent_states[0][0].float()
    if isinstance(describe(model.config).layers[layer_idx].recurrent, ScanSpec):
        memory = memory.mT
    places = [x.repeat(num_tails, 1, *x.dim() * [1]) for x in (conv, memory)]
    return RecurrentState(*places, torch.zeros(num_tails, dtype=torch.int64, device=model.device))


def make_runner(model: Any, batch_sizes: tuple[int, ...] = (1, 3), **options: Any) -> ModelRunner:
    weights = take_weights(model, model.device)
    compressed = [layer.compressed for layer in weights.layers if layer.compressed is not None]
    attention = _attend_compressed(model, compressed, batch_sizes) if compressed else full_attention(model)
    return ModelRunner(weights, attention, batch_sizes, **options)


def compressed_shape(spec: ModelSpec, context_lens: tuple[int, ...], **sizes: Any) -> EngineShape:
    """Return the shape of an engine with compressed attention over contexts of these lengths."""
    return EngineShape(
        num_layers=spec.num_layers,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        num_index_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        softmax_scale=spec.softmax_scale,
        search=SearchConfig(),
        max_context_len=max(context_lens),
        num_contexts=len(context_lens),
        attends_all=True,
        compressed=spec.compressed,
        **sizes,
    )


def _attend_compressed(model: Any, weights: list[Any], batch_sizes: tuple[int, ...], num_tails: int = 4) -> Any:
    """Make compressed attention over both contexts, with all tails begun after the first."""
    sizes = {"batch_sizes": batch_sizes, "num_tails": num_tails, "tail_capacity": 60}
    shape = compressed_shape(describe(model.config), CONTEXT_LENS, **sizes)
    memory = CompressedMemory(shape, model.device)
    for context_id, ids in enumerate(contexts_of(model)):
        states = [CompressedState(**capture.state) for capture, _ in prefill(model, ids)]
        memory.load(context_id, [CompressedState(*(x.cpu() for x in astuple(of))) for of in states], len(ids))
    for tail_id in range(num_tails):
        memory.begin_request(tail_id, 0)
    return AttendCompressed(shape, weights, memory, model.device)


@torch.no_grad()
def logits_after(model: Any, context_id: int, continuation: list[int]) -> Tensor:
    """Return transformers' logits at each token of a continuation [len(continuation), vocab_size] float32."""
    ids = torch.cat([contexts_of(model)[context_id], torch.tensor(continuation, device=model.device)])[None]
    logits: Tensor = model(ids).logits
    return logits[0, -len(continuation) :].float()


def assert_greedy(tokens: list[int], model: Any, context_id: int, question: list[int]) -> None:
    """Require the tokens that transformers generates greedily after context and question.

    Each is the likeliest one after those before it, all of which one pass over them finds.
    """
    assert tokens == logits_after(model, context_id, question + tokens[:-1])[-len(tokens) :].argmax(1).tolist()
