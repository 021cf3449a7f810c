"""The indexes of the loaded contexts in device memory, found by kernels through a table of addresses."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.index import ListIndex
from csattn.sketch import SketchIndex
from csattn.sketch.index import min_top_k_for_marks

PIECE_KEYS = 4  # of which one word each makes 16 bytes


@dataclass(frozen=True, slots=True)
class DeviceLists:
    """One layer's lists, as a search on the device reads them. See `ListIndex` and `ListTable` for the layouts."""

    codebooks: Tensor  # [num_index_heads, num_subspaces, num_centroids, subspace_dim] float32
    scores: Tensor  # [num_index_heads, num_subspaces, num_centroids, list_len padded to whole units] float16
    listed: Tensor  # [num_index_heads, num_subspaces, num_centroids, num_chunks, CHUNK_KEYS / 32] int32
    starts: Tensor  # [num_index_heads, num_subspaces, num_centroids, num_chunks] int32

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors in the order of their addresses in the table: struct ListIndex of list_index.cuh."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def length(self) -> int:
        """The number after the addresses in the table: list_len with padding."""
        return int(self.scores.shape[3])


@dataclass(frozen=True, slots=True)
class DeviceSketch:
    """One layer's `SketchIndex` on the device, as the search and attention to the rest read it."""

    codes: Tensor  # [num_kv_heads, num_blocks, num_fine + num_coarse, BLOCK_KEYS] int32: see `place_codes`
    segment_starts: Tensor  # [num_segments] int32
    key_mean: Tensor  # [num_kv_heads, num_segments, head_dim] float32
    query_transform: Tensor  # [num_kv_heads, num_segments, head_dim, num_coords] float16
    value_mean: Tensor  # [num_kv_heads, num_segments, head_dim] float32
    value_transform: Tensor  # [num_kv_heads, num_segments, num_coords, head_dim] float16
    marks: Tensor  # [num_kv_heads, num_blocks, 2] int32

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors in the order of their addresses in the table: struct Sketch of codes.cuh."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def length(self) -> int:
        """The number after the addresses in the table: num_segments."""
        return len(self.segment_starts)


DeviceLayerIndex = DeviceLists | DeviceSketch


def place_codes(codes: Tensor) -> Tensor:
    """Permute a `SketchIndex`'s codes into a `DeviceSketch`'s layout, or back; int32, the shape stays.

    In word w of a block, piece p, of four keys, moves to place p ^ 2 * (w % 4). Blocks are copied to shared memory as
    they are; a warp's lanes, which read different words of the same keys, then read different banks.
    """
    num_words = codes.shape[2]
    pieces = codes.view(*codes.shape[:3], -1, PIECE_KEYS)
    places = torch.arange(pieces.shape[3], device=codes.device)
    words = torch.arange(num_words, device=codes.device)[:, None]
    placed: Tensor = pieces[:, :, words, places ^ 2 * (words % 4)]
    return placed.flatten(3)


def to_device(index: ListIndex | SketchIndex, device: torch.device) -> DeviceLayerIndex:
    """Copy one layer's index to the device."""

    def copy(part: NDArray[Any]) -> Tensor:
        whole = np.require(part, requirements=["C", "W"])
        return torch.from_numpy(whole.view(np.int32) if whole.dtype == np.uint32 else whole).to(device)

    if isinstance(index, SketchIndex):
        parts = {field.name: copy(getattr(index, field.name)) for field in fields(DeviceSketch)}
        return DeviceSketch(**parts | {"codes": place_codes(parts["codes"])})
    table = index.table
    return DeviceLists(copy(index.codebooks), copy(table.scores), copy(table.listed), copy(table.starts))


class DeviceIndexes:
    """Owns the indexes of up to `num_contexts` contexts, which have the same shape except for their length.

    Contexts come and go between steps; the tensors that a captured CUDA graph reads stay in place.
    """

    def __init__(
        self,
        num_layers: int,
        num_contexts: int,
        config: SearchConfig,
        device: torch.device,
        max_segments: int = 0,  # of a sketch
    ) -> None:
        self.config, self.max_segments = config, max_segments
        num_addresses = 7 if max_segments else 4  # followed by a length
        self.tables = torch.zeros(num_layers, num_contexts, num_addresses + 1, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(num_contexts, dtype=torch.int32, device=device)
        self.top_ks = torch.zeros(num_contexts, dtype=torch.int32, device=device)
        self.min_top_ks_for_marks = torch.zeros(num_contexts, dtype=torch.int32, device=device)
        self._loaded: dict[int, list[DeviceLayerIndex]] = {}

    def load(self, context_id: int, context_len: int, layers: list[DeviceLayerIndex]) -> None:
        """Load a context into place `context_id`. No step that reads this place may be in flight."""
        assert len(layers) == len(self.tables), f"got {len(layers)} layers, wanted {len(self.tables)}"
        for layer in layers:
            if isinstance(layer, DeviceSketch) and layer.length > self.max_segments:
                raise ConfigError(
                    f"the context's sketch has {layer.length} segments, the search was planned for "
                    f"{self.max_segments}; rebuild it with longer segments, or start with a larger max_context_len"
                )
            for part in layer.parts:
                assert part.is_contiguous(), "a part of the index is not contiguous"
                assert part.data_ptr() % 16 == 0, "a part of the index is not aligned to 16 bytes"
        entries = [[*(part.data_ptr() for part in layer.parts), layer.length] for layer in layers]
        self.tables[:, context_id] = torch.tensor(entries, dtype=torch.int64)
        self.context_lens[context_id] = context_len
        self.top_ks[context_id] = self.config.top_k(context_len)
        if isinstance(layers[0], DeviceSketch):  # all layers have the same segment_starts
            self.min_top_ks_for_marks[context_id] = min_top_k_for_marks(context_len, layers[0].segment_starts.tolist())
        self._loaded[context_id] = layers

    def unload(self, context_id: int) -> None:
        """Release a context, if it is loaded. No step that reads it may be in flight."""
        self._loaded.pop(context_id, None)
        self.context_lens[context_id] = 0
        self.top_ks[context_id] = 0
