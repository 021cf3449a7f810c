"""Which files an artifact has, which arrays are in them, and what a layer's index must satisfy to be searched."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.artifact.manifest import ArtifactSpec, KvDtype
from csattn.artifact.tensor_file import FileLayout, TensorSpec, plan_file
from csattn.index import LayerIndex
from csattn.table.lists import ListTable
from csattn.table.rows import RowTable, row_bytes

MANIFEST_FILE = "manifest.json"
MANIFEST_HASH_FILE = "manifest.sha256"
TOKENS_FILE = "tokens.safetensors"
MAX_LAYERS = 1000  # file names have three digits

_KV_DTYPES: dict[KvDtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def kv_file(layer_idx: int) -> str:
    return f"layer-{layer_idx:03d}.kv.safetensors"


def index_file(layer_idx: int) -> str:
    return f"layer-{layer_idx:03d}.index.safetensors"


def file_names(spec: ArtifactSpec) -> Iterator[str]:
    """The files that a manifest lists, in the order of writing."""
    yield TOKENS_FILE
    for layer_idx in range(spec.model.num_layers):
        yield kv_file(layer_idx)
        yield index_file(layer_idx)


def plan(spec: ArtifactSpec, name: str) -> FileLayout:
    """The layout of one file. Its header names the artifact, so that equal shapes are not confused."""
    if name == TOKENS_FILE:
        tensors = [TensorSpec("token_ids", "I32", (spec.context_len,))]
    elif name.endswith(".kv.safetensors"):
        tensors = [kv_tensor(spec)]
    else:
        tensors = index_tensors(spec, spec.num_index_heads)
        if name != index_file(spec.model.num_layers - 1):
            tensors.append(next_query_tensor(spec))
    return plan_file(tensors, {"artifact_id": spec.artifact_id, "file": name})


def artifact_bytes(spec: ArtifactSpec) -> int:
    """What all tensor files together will take on disk."""
    return sum(plan(spec, name).size_bytes for name in file_names(spec))


def kv_tensor(spec: ArtifactSpec) -> TensorSpec:
    """K at [..., 0, :] and V at [..., 1, :], so that one row of the file is one read."""
    shape = (spec.model.num_kv_heads, spec.context_len, 2, spec.model.head_dim)
    return TensorSpec("kv", _KV_DTYPES[spec.kv_dtype], shape)


def index_tensors(spec: ArtifactSpec, num_heads: int) -> list[TensorSpec]:
    """The arrays of that many heads' index, without `next_query`."""
    config, head_dim = spec.index_config, spec.model.head_dim
    lists = (num_heads, config.num_subspaces, config.num_centroids)
    if config.layout == "rows":
        width = row_bytes(spec.context_len, config.score_bits)
        table = [
            TensorSpec("codes", "I8" if config.score_bits == 8 else "U8", (*lists, width)),
            TensorSpec("scales", "F32", lists),
        ]
    else:
        list_len = config.list_entries(spec.context_len)
        table = [TensorSpec("indices", "I32", (*lists, list_len)), TensorSpec("scores", "F16", (*lists, list_len))]
    return [
        *table,
        TensorSpec("query_basis", "F32", (num_heads, head_dim, head_dim)),
        TensorSpec("key_basis", "F32", (num_heads, head_dim, head_dim)),
        TensorSpec("codebooks", "F32", (*lists, head_dim // config.num_subspaces)),
        TensorSpec("key_mean", "F32", (num_heads, head_dim)),
    ]


def next_query_tensor(spec: ArtifactSpec) -> TensorSpec:
    head_dim = spec.model.head_dim
    return TensorSpec("next_query", "F32", (spec.model.num_q_heads, head_dim + 1, head_dim))


def index_arrays(index: LayerIndex) -> dict[str, NDArray[Any]]:
    """The arrays of a layer's index by their name in the file."""
    table: dict[str, NDArray[Any]]
    if isinstance(index.table, RowTable):
        table = {"codes": index.table.codes, "scales": index.table.scales}
    else:
        table = {"indices": index.table.indices, "scores": index.table.scores}
    lookahead = {} if index.next_query is None else {"next_query": index.next_query}
    return {
        **table,
        **lookahead,
        "query_basis": index.query_basis,
        "key_basis": index.key_basis,
        "codebooks": index.codebooks,
        "key_mean": index.key_mean,
    }


def index_from_arrays(spec: ArtifactSpec, arrays: Mapping[str, NDArray[Any]]) -> LayerIndex:
    """The inverse of `index_arrays`."""
    table: RowTable | ListTable
    if spec.index_config.layout == "rows":
        table = RowTable(arrays["codes"], arrays["scales"], spec.context_len)
    else:
        table = ListTable(arrays["indices"], arrays["scores"], spec.context_len)
    return LayerIndex(
        query_basis=arrays["query_basis"],
        codebooks=arrays["codebooks"],
        key_basis=arrays["key_basis"],
        key_mean=arrays["key_mean"],
        table=table,
        weigh_by_norm=spec.index_config.weigh_by_norm,
        pool_group=spec.index_config.pool_group,
        next_query=arrays.get("next_query"),
    )


def fault_of_index(index: LayerIndex) -> str | None:
    """Why a search over this index could read out of bounds or compute NaN, or None.

    Kernels check no bounds: this is the only place that stands between them and a forged table.
    """
    for name, array in index_arrays(index).items():
        if array.dtype.kind == "f" and not all(np.isfinite(head).all() for head in array):
            return f"{name} holds NaN or infinity"
    if isinstance(index.table, ListTable):
        for head in index.table.indices:
            if head.min() < 0 or head.max() >= index.context_len:
                return f"indices point outside the context's {index.context_len} rows"
        if any((head.view(np.uint16) == 0x8000).any() for head in index.table.scores):
            return "scores hold -0.0, which a search takes for an absent key"
    return None
