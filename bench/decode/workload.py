"""Contexts on the device, of any length, for a batch of requests that continue one each, or all the same."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.decode.recorded import Recorded, WideIndex
from bench.decode.tables import make_table
from bench.decode.widened import HEAD_DIM, NUM_KV_HEADS, NUM_WIDE_LAYERS, Which, tile_keys, wide_keys, wide_queries
from csattn.search.device import DeviceLayerIndex
from csattn.search.device.indexes import into_tiles

DTYPE = torch.bfloat16
STEPS_BETWEEN_REQUESTS = 37  # requests of a batch are that far apart in the recorded steps


@dataclass(frozen=True, slots=True)
class Workload:
    """Makes what a benchmark decodes with. Every call returns memory of its own."""

    recorded: Recorded
    context_len: int
    batch_size: int
    device: torch.device
    is_shared: bool = False  # one context for all requests

    @property
    def num_contexts(self) -> int:
        return 1 if self.is_shared else self.batch_size

    def keys(self, layer_idx: int) -> Tensor:
        """[NUM_KV_HEADS, context_len, HEAD_DIM]; layers that come from the same wide layer are equal."""
        wide_idx = layer_idx % NUM_WIDE_LAYERS
        keys = wide_keys(self.recorded.recording, wide_idx).to(self.device)
        return tile_keys(keys, self.context_len, DTYPE, seed=wide_idx)

    def values(self, layer_idx: int) -> Tensor:
        """Random, like `keys`."""
        shape = NUM_KV_HEADS, self.context_len, HEAD_DIM
        generator = torch.Generator(self.device).manual_seed(layer_idx % NUM_WIDE_LAYERS)
        return torch.randn(shape, dtype=DTYPE, device=self.device, generator=generator)

    def separate_kv(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """All contexts' k and v, apart: [num_contexts, num_kv_heads, context_len, head_dim] each."""
        k, v = (t[None].expand(self.num_contexts, -1, -1, -1) for t in (self.keys(layer_idx), self.values(layer_idx)))
        return k.contiguous(), v.contiguous()

    def rows(self, layer_idx: int) -> Tensor:
        """One context's K and V side by side: [num_kv_heads, context_len, 2, head_dim]."""
        return torch.stack([self.keys(layer_idx), self.values(layer_idx)], dim=2)

    def table(self, layer_idx: int, name: str) -> tuple[Tensor, Tensor]:
        """One context's table in one layer: codes and scales of rows, or scores and indices of lists."""
        index, keys = self._indexed(layer_idx, name)
        return make_table(keys, index)

    def index(self, layer_idx: int, name: str) -> DeviceLayerIndex:
        """One context's index in one layer, as searches on the device read it."""
        index, keys = self._indexed(layer_idx, name)
        query_basis, codebooks = (torch.from_numpy(a).to(self.device) for a in (index.query_basis, index.codebooks))
        scores, extra = make_table(keys, index)
        if index.config.layout == "rows":
            scores = into_tiles(scores)
        return DeviceLayerIndex(query_basis, codebooks, scores, extra)

    def _indexed(self, layer_idx: int, name: str) -> tuple[WideIndex, Tensor]:
        """A layer's index without its table, and the keys that go into one."""
        layers = self.recorded.indexes[name]
        recorded_idx = layer_idx % NUM_WIDE_LAYERS % len(layers)
        return layers[recorded_idx], self.keys(recorded_idx)

    def queries(self, layer_idx: int, which: Which = "own") -> Tensor:
        """What the batch brings at each recorded step: [num_steps, batch_size, num_q_heads, head_dim]."""
        q = wide_queries(self.recorded.recording, layer_idx % NUM_WIDE_LAYERS, which).to(self.device, DTYPE)
        requests = range(self.batch_size)
        return torch.stack([q.roll(-STEPS_BETWEEN_REQUESTS * request, dims=0) for request in requests], dim=1)


def clone_index(index: DeviceLayerIndex) -> DeviceLayerIndex:
    """The same index at other addresses: another request's, as far as the memory can tell."""
    return DeviceLayerIndex(*(part.clone() for part in index.parts))
