"""The indexes of the loaded contexts in device memory, found by kernels through a table of addresses."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import SearchConfig
from csattn.index import LayerIndex
from csattn.table.rows import RowTable

ADDRESSES = 4  # of query_basis, codebooks, scores and extra: struct LayerTable of common.cu
TILE_BYTES = 512  # of rows.cu


@dataclass(frozen=True, slots=True)
class DeviceLayerIndex:
    """What a search on the device reads of one layer's index. See `LayerIndex` and the tables for the layouts."""

    query_basis: Tensor  # [num_index_heads, head_dim, head_dim] float32
    codebooks: Tensor  # [num_index_heads, num_subspaces, num_centroids, subspace_dim] float32
    # rows: codes in tiles, [num_index_heads, num_tiles, num_subspaces, num_centroids, TILE_BYTES] uint8
    # lists: scores [num_index_heads, num_subspaces, num_centroids, list_len] float16
    scores: Tensor
    # rows: scales [num_index_heads, num_subspaces, num_centroids] float32; lists: indices, like scores, int32
    extra: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """In the order of their addresses in the table."""
        return self.query_basis, self.codebooks, self.scores, self.extra


def to_device(index: LayerIndex, device: torch.device) -> DeviceLayerIndex:
    """Copy one layer's index."""

    def copy(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(device)

    basis, codebooks, table = copy(index.query_basis), copy(index.codebooks), index.table
    if isinstance(table, RowTable):
        return DeviceLayerIndex(basis, codebooks, into_tiles(copy(table.codes)), copy(table.scales))
    return DeviceLayerIndex(basis, codebooks, copy(table.scores), copy(table.indices))


def into_tiles(codes: Tensor) -> Tensor:
    """Rows [num_index_heads, num_subspaces, num_centroids, row_bytes], cut where `rows.cu` wants them cut.

    What is missing in the last tile is filled up with zeros: no kernel uses it.
    """
    *rows, row_bytes = codes.shape
    num_tiles = -(-row_bytes // TILE_BYTES)
    tiles = codes.new_zeros(rows[0], num_tiles, *rows[1:], TILE_BYTES, dtype=torch.uint8)
    whole = row_bytes // TILE_BYTES
    raw = codes.view(torch.uint8)
    tiles[:, :whole] = raw[..., : whole * TILE_BYTES].reshape(*rows, whole, TILE_BYTES).permute(0, 3, 1, 2, 4)
    if whole < num_tiles:
        tiles[:, whole, ..., : row_bytes - whole * TILE_BYTES] = raw[..., whole * TILE_BYTES :]
    return tiles


class DeviceIndexes:
    """Owns the indexes of up to `num_contexts` contexts, all of one shape but for their length.

    Contexts come and go between steps; the tensors that a captured graph reads stay where they are.
    """

    def __init__(self, num_layers: int, num_contexts: int, config: SearchConfig, device: torch.device) -> None:
        self.config = config
        self.tables = torch.zeros(num_layers, num_contexts, ADDRESSES, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(num_contexts, dtype=torch.int32, device=device)
        self.top_ks = torch.zeros(num_contexts, dtype=torch.int32, device=device)
        self.list_lens = torch.zeros(num_contexts, dtype=torch.int32, device=device)  # 0 for tables of rows
        self._loaded: dict[int, list[DeviceLayerIndex]] = {}

    def __repr__(self) -> str:
        return f"<DeviceIndexes of {len(self._loaded)} contexts, {self.num_bytes / 2**20:.0f} MiB>"

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layers in self._loaded.values() for layer in layers)

    def load(self, context_id: int, context_len: int, layers: list[DeviceLayerIndex]) -> None:
        """Put a context in place `context_id`. No step that reads the place may be in flight."""
        assert len(layers) == len(self.tables), f"got {len(layers)} layers, wanted {len(self.tables)}"
        for layer in layers:
            for part in layer.parts:
                assert part.is_contiguous(), "a part of the index is not contiguous"
                assert part.data_ptr() % 16 == 0, "a part of the index is not aligned to 16 bytes"
        addresses = [[part.data_ptr() for part in layer.parts] for layer in layers]
        self.tables[:, context_id] = torch.tensor(addresses, dtype=torch.int64)
        self.context_lens[context_id] = context_len
        self.top_ks[context_id] = self.config.top_k(context_len)
        is_lists = layers[0].scores.dtype == torch.float16
        self.list_lens[context_id] = layers[0].scores.shape[-1] if is_lists else 0
        self._loaded[context_id] = layers

    def unload(self, context_id: int) -> None:
        """Let go of a context. No step that reads it may be in flight."""
        del self._loaded[context_id]
        self.context_lens[context_id] = 0
        self.top_ks[context_id] = 0
