"""Small artifacts with made-up contents."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact import ArtifactSpec, ArtifactWriter, KvDtype, ModelGeometry, hash_token_ids
from csattn.config import IndexConfig
from csattn.index import LayerIndex
from csattn.table.lists import ListTable
from csattn.table.rows import RowTable, row_bytes

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
VERSIONS = {"csattn": "0.1.0"}
NOTES = {"source": "made up", "chat": {"prefix_len": 3}}


def make_config(layout: str = "rows", **options: Any) -> IndexConfig:
    defaults: dict[str, Any] = {
        "layout": layout,
        "num_subspaces": 2,
        "num_centroids": 3,
        "basis": "plain",
        "center_keys": True,
        "weigh_by_norm": True,
        "share_group": True,
    }
    return IndexConfig(**(defaults | options))


def make_token_ids(context_len: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50, context_len, dtype=np.int32)


def make_spec(
    context_len: int = 70,
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 4,
    layout: str = "rows",
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


def make_layer(spec: ArtifactSpec, layer_idx: int) -> tuple[torch.Tensor, LayerIndex]:
    """A layer's KV rows and index: other ones for each layer, the same ones on every call."""
    digest = hashlib.sha256(f"{spec.artifact_id} {layer_idx}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    config, model, num_heads = spec.index_config, spec.model, spec.num_index_heads
    kv = torch.from_numpy(rng.standard_normal((model.num_kv_heads, spec.context_len, 2, model.head_dim), np.float32))
    lists = (num_heads, config.num_subspaces, config.num_centroids)
    table: RowTable | ListTable
    if config.layout == "rows":
        codes = rng.integers(0, 100, (*lists, row_bytes(spec.context_len, config.score_bits)), dtype=np.uint8)
        table = RowTable(
            codes.view(np.int8) if config.score_bits == 8 else codes,
            rng.standard_normal(lists, np.float32),
            spec.context_len,
        )
    else:
        list_len = config.list_entries(spec.context_len)
        table = ListTable(
            rng.integers(0, spec.context_len, (*lists, list_len), dtype=np.int32),
            rng.standard_normal((*lists, list_len), np.float32).astype(np.float16) + np.float16(0),
            spec.context_len,
        )
    index = LayerIndex(
        query_basis=rng.standard_normal((num_heads, model.head_dim, model.head_dim), np.float32),
        codebooks=rng.standard_normal((*lists, model.head_dim // config.num_subspaces), np.float32),
        key_basis=rng.standard_normal((num_heads, model.head_dim, model.head_dim), np.float32),
        key_mean=rng.standard_normal((num_heads, model.head_dim), np.float32),
        table=table,
        weigh_by_norm=config.weigh_by_norm,
        next_query=None
        if layer_idx + 1 == model.num_layers
        else rng.standard_normal((model.num_q_heads, model.head_dim + 1, model.head_dim), np.float32),
    )
    return kv.to(TORCH_DTYPES[spec.kv_dtype]), index


def hidden_state(layer_idx: int) -> torch.Tensor:
    """A stand-in for what the layers before this one have computed."""
    return torch.full((5, 8), float(layer_idx))


def build(store: Path, spec: ArtifactSpec, seed: int = 0) -> Path:
    """Build the artifact as a pipeline would, going on where an earlier build stopped."""
    with ArtifactWriter(store, spec, make_token_ids(spec.context_len, seed)) as writer:
        if writer.finished_path is not None:
            return writer.finished_path
        start, hidden = writer.load_checkpoint() or (0, hidden_state(0))
        assert torch.equal(hidden, hidden_state(start)), "a checkpoint came back altered"
        for layer_idx in range(start, spec.model.num_layers):
            writer.write_layer(layer_idx, *make_layer(spec, layer_idx))
            writer.save_checkpoint(layer_idx + 1, hidden_state(layer_idx + 1))
        return writer.finish(VERSIONS, NOTES)
