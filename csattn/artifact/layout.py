"""The files of an artifact, the arrays in them, and the checks that make a layer's index safe to search."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.artifact.manifest import ArtifactSpec, KvDtype
from csattn.artifact.tensor_file import FileLayout, TensorSpec, plan_file
from csattn.bits import unpack_bits
from csattn.config import SEGMENT_STEP, IndexConfig, SketchConfig
from csattn.index import ListIndex, NoIndex
from csattn.sketch import SketchIndex
from csattn.sketch.codes import BLOCK_KEYS, num_blocks, num_coords, unpack_marks
from csattn.sketch.index import BY_HEAD, num_marked
from csattn.sketch.reference import LARGEST_NUMBER
from csattn.table.lists import CHUNK_KEYS, ListTable, list_shapes, ordinals

MANIFEST_FILE = "manifest.json"
MANIFEST_HASH_FILE = "manifest.sha256"
TOKENS_FILE = "tokens.safetensors"
MAX_LAYERS = 1000  # file names have three digits

LIST_DTYPES = {"listed": "U32", "starts": "I32", "scores": "F16", "least": "F16"}  # the arrays of a `ListTable`
KV_DTYPES: dict[KvDtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_BITS_OF_BYTES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


def kv_file(layer_idx: int) -> str:
    return f"layer-{layer_idx:03d}.kv.safetensors"


def index_file(layer_idx: int) -> str:
    return f"layer-{layer_idx:03d}.index.safetensors"


def state_file(layer_idx: int) -> str:
    return f"layer-{layer_idx:03d}.state.safetensors"


def file_names(spec: ArtifactSpec) -> Iterator[str]:
    """Yield the names of the files that a manifest lists, in the order of writing."""
    yield TOKENS_FILE
    for layer_idx in range(spec.model.num_layers):
        yield from layer_files(spec, layer_idx)


def layer_files(spec: ArtifactSpec, layer_idx: int) -> Iterator[str]:
    """Yield a layer's files: KV rows or state, then the index file, if it has an index or predicts the next queries."""
    yield state_file(layer_idx) if spec.model.has_state(layer_idx) else kv_file(layer_idx)
    if layer_idx in spec.model.indexed_layers or spec.model.is_predicted(layer_idx + 1):
        yield index_file(layer_idx)


def file_layout(spec: ArtifactSpec, name: str) -> FileLayout:
    """Return the layout of one file. Its header names artifact and file: files of equal shapes cannot be confused."""
    if name == TOKENS_FILE:
        tensors = [TensorSpec("token_ids", "I32", (spec.context_len,))]
    elif name.endswith(".kv.safetensors"):
        tensors = [kv_tensor(spec, _layer_of(name))]
    elif name.endswith(".state.safetensors"):
        tensors = state_tensors(spec, _layer_of(name))
    else:
        tensors, layer_idx = [], _layer_of(name)
        if layer_idx in spec.model.indexed_layers:
            tensors += index_tensors(spec)
        if spec.model.is_predicted(layer_idx + 1):
            tensors += next_query_tensors(spec)
    return plan_file(tensors, {"artifact_id": spec.artifact_id, "file": name})


def artifact_bytes(spec: ArtifactSpec) -> int:
    """Return how many bytes all tensor files together take on disk."""
    return sum(file_layout(spec, name).size_bytes for name in file_names(spec))


def _layer_of(name: str) -> int:
    """Return the layer of a file name."""
    return int(name.removeprefix("layer-")[:3])


def kv_tensor(spec: ArtifactSpec, layer_idx: int) -> TensorSpec:
    """The layer's KV rows: K at [..., 0, :] and V at [..., 1, :], so that a row is contiguous and takes one read."""
    num_rows = spec.model.num_stored(layer_idx, spec.context_len)
    num_kv_heads, head_dim = spec.model.row_sizes(layer_idx)
    return TensorSpec("kv", KV_DTYPES[spec.kv_dtype], (num_kv_heads, num_rows, 2, head_dim))


def state_tensors(spec: ArtifactSpec, layer_idx: int) -> list[TensorSpec]:
    """The state that a layer keeps of the context instead of KV rows: one of fixed size, or compressed rows."""
    of = spec.model.layer(layer_idx)
    if of.keeps == "state":
        return [TensorSpec("conv", "F32", of.conv), TensorSpec("memory", "F32", of.memory)]
    sizes = spec.model.compressed_sizes(layer_idx, spec.context_len)
    kv_dtype = KV_DTYPES[spec.kv_dtype]
    return [TensorSpec(name, "F32" if name == "pending" else kv_dtype, shape) for name, shape in sizes.items()]


def index_tensors(spec: ArtifactSpec) -> list[TensorSpec]:
    """The arrays of a layer's index: a sketch, or lists."""
    config, head_dim, num_heads = spec.index_config, spec.model.head_dim, spec.num_index_heads
    if isinstance(config, SketchConfig):
        words, segments = config.words(head_dim), (num_heads, len(config.segment_starts(spec.context_len)))
        width = num_coords(*words)
        return [
            TensorSpec("codes", "U32", (num_heads, num_blocks(spec.context_len), sum(words), BLOCK_KEYS)),
            TensorSpec("marks", "U32", (num_heads, num_blocks(spec.context_len), BLOCK_KEYS // 32)),
            TensorSpec("key_mean", "F32", (*segments, head_dim)),
            TensorSpec("query_transform", "F16", (*segments, head_dim, width)),
            TensorSpec("value_mean", "F32", (*segments, head_dim)),
            TensorSpec("value_transform", "F16", (*segments, width, head_dim)),
            TensorSpec("segment_starts", "I32", segments[1:]),
        ]
    lists = (num_heads, config.num_subspaces, config.num_centroids)
    of_list = list_shapes(config.list_entries(spec.context_len), spec.context_len)
    return [
        *(TensorSpec(name, LIST_DTYPES[name], (*lists, *shape)) for name, shape in of_list.items()),
        TensorSpec("codebooks", "F32", (*lists, head_dim // config.num_subspaces)),
        TensorSpec("key_mean", "F32", (num_heads, head_dim)),
    ]


def next_query_tensors(spec: ArtifactSpec) -> list[TensorSpec]:
    """`next_query` in 8 bits with a scale for each row: the rounding error is far below the prediction's error."""
    rows = (spec.model.num_q_heads, spec.model.head_dim + 1)
    return [TensorSpec("next_query", "I8", (*rows, spec.model.head_dim)), TensorSpec("next_query_scale", "F32", rows)]


def next_query_arrays(next_query: NDArray[np.float32] | None) -> dict[str, NDArray[Any]]:
    """Quantize `next_query` into the arrays of `next_query_tensors`; empty for None."""
    if next_query is None:
        return {}
    scale = np.abs(next_query).max(axis=-1) / np.float32(127)
    codes = np.rint(next_query / np.where(scale > 0, scale, np.float32(1))[..., None]).astype(np.int8)
    return {"next_query": codes, "next_query_scale": scale}


def take_next_query(arrays: dict[str, NDArray[Any]]) -> NDArray[np.float32] | None:
    """Remove the arrays of `next_query_arrays` and decode them; None if absent. The inverse up to rounding."""
    if "next_query" not in arrays:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # `index_fault` refuses what is not finite
        rows: NDArray[np.float32] = arrays.pop("next_query") * arrays.pop("next_query_scale")[..., None]
    return rows


def arrays_from_index(index: ListIndex | SketchIndex | NoIndex) -> dict[str, NDArray[Any]]:
    """Return the arrays of a layer's index by their names in the file, without those of `next_query`."""
    if isinstance(index, NoIndex):
        return {}
    if isinstance(index, SketchIndex):
        return {name: getattr(index, name) for name in (*BY_HEAD, "segment_starts")}
    return {**index.table.arrays, "codebooks": index.codebooks, "key_mean": index.key_mean}


def index_from_arrays(
    config: IndexConfig,
    context_len: int,
    arrays: Mapping[str, NDArray[Any]],
    next_query: NDArray[np.float32] | None = None,
) -> ListIndex | SketchIndex | NoIndex:
    """Invert `arrays_from_index`."""
    if not arrays:
        return NoIndex(next_query)
    if isinstance(config, SketchConfig):
        num_fine, _ = config.words(arrays["key_mean"].shape[-1])
        return SketchIndex(**arrays, num_fine=num_fine, context_len=context_len, next_query=next_query)
    return ListIndex(
        codebooks=arrays["codebooks"],
        key_mean=arrays["key_mean"],
        table=ListTable(
            **{name: arrays[name] for name in LIST_DTYPES},
            list_len=config.list_entries(context_len),
            context_len=context_len,
        ),
        weigh_by_norm=config.weigh_by_norm,
        next_query=next_query,
    )


def index_fault(index: ListIndex | SketchIndex | NoIndex) -> str | None:
    """Return why a search over this index could read out of bounds or compute NaN; None if it cannot.

    Kernels check no bounds: this is their only protection from a forged table.
    """
    lookahead = {} if index.next_query is None else {"next_query": index.next_query}
    for name, array in {**arrays_from_index(index), **lookahead}.items():
        limit = float(np.finfo(np.float32).max) if name == "next_query" else LARGEST_NUMBER
        if array.dtype.kind == "f" and not all(_greatest(x) <= limit for x in array):
            return f"{name} holds NaN, infinity or a number beyond {limit:.1e}"
    if isinstance(index, NoIndex):
        return None
    return _sketch_fault(index) if isinstance(index, SketchIndex) else _lists_fault(index)


def _greatest(array: NDArray[np.floating[Any]]) -> float:
    """Return the greatest magnitude; NaN if there is one. By its bits: float16 itself takes a hundred times as long."""
    without_sign = np.iinfo(f"i{array.itemsize}").max
    return float((array.view(f"u{array.itemsize}") & without_sign).max().view(array.dtype))


def _sketch_fault(index: SketchIndex) -> str | None:
    starts = index.segment_starts.astype(np.int64)
    if starts[0] != 0 or (starts % SEGMENT_STEP).any() or (np.diff(starts, append=index.context_len) <= 0).any():
        return f"segment_starts are not multiples of {SEGMENT_STEP} that ascend from 0 to below {index.context_len}"
    wanted = num_marked(index.context_len, starts.tolist())
    marked = unpack_marks(index.marks, num_blocks(index.context_len) * BLOCK_KEYS)
    if marked[:, index.context_len :].any() or (marked.sum(axis=1) != wanted).any():
        return f"marks are not at {wanted} of each head's {index.context_len} rows"
    return None


def _lists_fault(index: ListIndex) -> str | None:
    table = index.table
    in_last_chunk = (table.context_len - 1) % CHUNK_KEYS + 1
    for listed, starts, scores, least in zip(table.listed, table.starts, table.scores, table.least, strict=True):
        counts = _BITS_OF_BYTES[listed.view(np.uint8)].sum(axis=-1, dtype=np.int64)  # of each chunk
        past_end = unpack_bits(listed[..., -1, :])[..., in_last_chunk:]
        if (counts.sum(axis=-1) != table.list_len).any() or past_end.any():
            return f"listed does not have {table.list_len} of the context's {table.context_len} rows in each list"
        if (np.cumsum(counts, axis=-1) - counts != starts).any():
            return "starts are not where the scores of listed rows begin"
        if (scores.view(np.uint16) == 0x8000).any():
            return "scores hold -0.0, which a search takes for an absent key"
        lowest = ordinals(scores[..., : table.list_len].view(np.int16)).min(axis=-1)
        if (lowest != ordinals(least.view(np.int16))).any():
            return "least are not the least scores of the lists"
    return None
