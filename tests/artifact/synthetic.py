"""Small artifacts with made-up contents."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact import ArtifactSpec, ArtifactWriter, KvDtype, ModelGeometry, hash_token_ids
from csattn.artifact.layout import kv_file
from csattn.config import IndexConfig, ListConfig, SketchConfig
from csattn.index import ListIndex
from csattn.sketch import SketchIndex
from csattn.sketch.codes import num_coords, pack_marks
from csattn.sketch.index import num_marked
from csattn.table.lists import lists_of

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
VERSIONS = {"csattn": "0.1.0"}
NOTES = {"source": "made up", "chat": {"prefix_len": 3}}


def make_config(layout: str = "sketch", **options: Any) -> IndexConfig:
    if layout == "sketch":
        return SketchConfig(**options)
    return ListConfig(**({"num_subspaces": 2, "num_centroids": 3} | options))


def make_token_ids(context_len: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50, context_len, dtype=np.int32)


def make_spec(
    context_len: int = 70,
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    layout: str = "sketch",
    kv_dtype: KvDtype = "float32",
    seed: int = 0,
    fingerprint: str = "model-a",
    **options: Any,
) -> ArtifactSpec:
    return ArtifactSpec(
        model_name="Made-Up-1M",
        model_fingerprint=fingerprint,
        model=ModelGeometry(
            num_layers=num_layers,
            num_q_heads=2 * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=8,
            vocab_size=50,
            max_positions=4096,
        ),
        tokenizer_hash="tokenizer-a",
        token_ids_sha256=hash_token_ids(make_token_ids(context_len, seed)),
        context_len=context_len,
        index_config=make_config(layout, **options),
        kv_dtype=kv_dtype,
    )


def make_layer(spec: ArtifactSpec, layer_idx: int) -> tuple[torch.Tensor, ListIndex | SketchIndex]:
    """Return a layer's KV rows and index: different for each layer, the same on every call."""
    digest = hashlib.sha256(f"{spec.artifact_id} {layer_idx}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    model = spec.model
    kv = torch.from_numpy(rng.standard_normal((model.num_kv_heads, spec.context_len, 2, model.head_dim), np.float32))
    next_query = None
    if layer_idx + 1 < model.num_layers:
        next_query = rng.standard_normal((model.num_q_heads, model.head_dim + 1, model.head_dim), np.float32)
    make = make_sketch if isinstance(spec.index_config, SketchConfig) else make_lists
    return kv.to(TORCH_DTYPES[spec.kv_dtype]), make(spec, rng, next_query)


def make_sketch(spec: ArtifactSpec, rng: np.random.Generator, next_query: NDArray[np.float32] | None) -> SketchIndex:
    config, head_dim = spec.index_config, spec.model.head_dim
    assert isinstance(config, SketchConfig)
    words, starts = config.words(head_dim), config.segment_starts(spec.context_len)
    segments, width = (spec.model.num_kv_heads, len(starts)), num_coords(*words)
    codes = rng.integers(
        0, 2**32, (spec.model.num_kv_heads, -(-spec.context_len // 64), sum(words), 64), dtype=np.uint32
    )
    marked = np.arange(spec.context_len) < num_marked(spec.context_len, starts)
    return SketchIndex(
        codes=codes,
        marks=pack_marks(rng.permuted(np.tile(marked, (len(codes), 1)), axis=1)),
        num_fine=words[0],
        segment_starts=np.array(starts, np.int32),
        key_mean=rng.standard_normal((*segments, head_dim), np.float32),
        query_transform=rng.standard_normal((*segments, head_dim, width), np.float32).astype(np.float16),
        value_mean=rng.standard_normal((*segments, head_dim), np.float32),
        value_transform=rng.standard_normal((*segments, width, head_dim), np.float32).astype(np.float16),
        context_len=spec.context_len,
        next_query=next_query,
    )


def make_lists(spec: ArtifactSpec, rng: np.random.Generator, next_query: NDArray[np.float32] | None) -> ListIndex:
    config, head_dim, num_heads = spec.index_config, spec.model.head_dim, spec.num_index_heads
    assert isinstance(config, ListConfig)
    lists = (num_heads, config.num_subspaces, config.num_centroids)
    scores = rng.standard_normal((*lists, spec.context_len), np.float32).astype(np.float16) + np.float16(0)
    listed = rng.permuted(np.broadcast_to(np.arange(spec.context_len), scores.shape), axis=-1)
    table = lists_of(listed < config.list_entries(spec.context_len), scores)
    return ListIndex(
        codebooks=rng.standard_normal((*lists, head_dim // config.num_subspaces), np.float32),
        key_mean=rng.standard_normal((num_heads, head_dim), np.float32),
        table=table,
        weigh_by_norm=config.weigh_by_norm,
        next_query=next_query,
    )


def hidden_state(spec: ArtifactSpec, layer_idx: int) -> torch.Tensor:
    """Return a stand-in for the output of the layers before this one."""
    return torch.full((spec.context_len, spec.model.hidden_size), float(layer_idx), dtype=TORCH_DTYPES[spec.kv_dtype])


def write_layer(writer: ArtifactWriter, layer_idx: int, kv: torch.Tensor, index: ListIndex | SketchIndex) -> None:
    """Write a layer's files, and record it as finished."""
    writer.work.finish_layer(layer_idx, writer.work.write_part(kv_file(layer_idx), {"kv": kv}), index)


def build(store: Path, spec: ArtifactSpec, seed: int = 0) -> Path:
    """Build the artifact as the pipeline does, from where an earlier build stopped."""
    with ArtifactWriter(store, spec, make_token_ids(spec.context_len, seed)) as writer:
        if writer.finished_path is not None:
            return writer.finished_path
        start, hidden = writer.work.load_checkpoint(writer.finished_layers) or (0, hidden_state(spec, 0))
        assert torch.equal(hidden, hidden_state(spec, start)), "a checkpoint came back altered"
        for layer_idx in range(start, spec.model.num_layers):
            write_layer(writer, layer_idx, *make_layer(spec, layer_idx))
            writer.work.save_checkpoint(layer_idx + 1, hidden_state(spec, layer_idx + 1))
        return writer.finish(VERSIONS, NOTES)
