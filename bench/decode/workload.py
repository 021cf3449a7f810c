"""Contexts of any length on the device, for a batch of requests: one context each, or one for all."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.decode.recording import Recording
from bench.decode.widened import NUM_WIDE_LAYERS, Heads, Which, tile_rows, wide_context_queries, wide_queries, wide_rows
from csattn.artifact.layout import index_from_arrays
from csattn.batch import StepRows, make_step_rows
from csattn.config import IndexConfig, SketchConfig
from csattn.cpus import available_cpus
from csattn.index import ListIndex, NoIndex
from csattn.search.device import DeviceLayerIndex, DeviceLists, DeviceSketch, place_codes
from csattn.sketch import SketchIndex
from index_build.layer import index_arrays
from offload.host_memory import copy_rows

DTYPE = torch.bfloat16
STEPS_BETWEEN_REQUESTS = 37  # offset in the recorded steps between neighbouring requests of a batch


@dataclass(frozen=True, slots=True)
class Workload:
    """Makes the rows, indexes and queries that a benchmark decodes with. Every call returns new memory."""

    recording: Recording
    heads: Heads  # of each searched layer
    context_len: int
    batch_size: int
    device: torch.device
    is_shared: bool = False  # one context for all requests

    @property
    def num_contexts(self) -> int:
        return 1 if self.is_shared else self.batch_size

    @property
    def data(self) -> str:
        """A description of the rows, for the results."""
        recorded_len = self.recording.context_len
        if self.context_len <= recorded_len:
            return f"the last {self.context_len} of {recorded_len} recorded rows"
        return f"{recorded_len} recorded rows behind copies of them with noise"

    def rows(self, layer_idx: int) -> Tensor:
        """Return one context's K and V side by side: [num_kv_heads, context_len, 2, head_dim].

        Layers made from the same wide layer have equal rows.
        """
        wide_idx = layer_idx % NUM_WIDE_LAYERS
        rows = wide_rows(self.recording, wide_idx, self.heads).to(self.device)
        return tile_rows(rows, self.context_len, DTYPE, seed=wide_idx)

    def keys(self, layer_idx: int) -> Tensor:
        """[num_kv_heads, context_len, head_dim]."""
        return self.rows(layer_idx)[:, :, 0].contiguous()

    def values(self, layer_idx: int) -> Tensor:
        return self.rows(layer_idx)[:, :, 1].contiguous()

    def separate_kv(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return k and v of all contexts: [num_contexts, num_kv_heads, context_len, head_dim] each."""
        k, v = (t[None].expand(self.num_contexts, -1, -1, -1) for t in self.rows(layer_idx).unbind(2))
        return k.contiguous(), v.contiguous()

    def index(self, layer_idx: int, config: IndexConfig) -> DeviceLayerIndex:
        """Build one context's index in one layer, as searches on the device read it."""
        arrays = self._index_arrays(layer_idx, config)
        if isinstance(config, SketchConfig):
            return DeviceSketch(
                codes=place_codes(arrays["codes"].view(torch.int32)),
                segment_starts=arrays["segment_starts"],
                key_mean=arrays["key_mean"],
                query_transform=arrays["query_transform"],
                value_mean=arrays["value_mean"],
                value_transform=arrays["value_transform"],
                marks=arrays["marks"].view(torch.int32),
            )
        return DeviceLists(arrays["codebooks"], arrays["scores"], arrays["listed"].view(torch.int32), arrays["starts"])

    def host_indexes(self, num_layers: int, config: IndexConfig) -> list[ListIndex | SketchIndex]:
        """Build one context's index in host memory, without layers that have none.

        Every layer has addresses of its own, so no two searches read the same memory.
        """
        num_distinct = min(NUM_WIDE_LAYERS, num_layers)
        distinct = [
            {name: array.cpu() for name, array in self._index_arrays(layer_idx, config).items()}
            for layer_idx in range(num_distinct)
        ]
        layers = [distinct[layer_idx % num_distinct] for layer_idx in range(num_layers)]
        own = [[array.numpy() for array in copy_rows(list(layer.values()))] for layer in layers]
        made = [index_from_arrays(config, self.context_len, dict(zip(layers[0], one, strict=True))) for one in own]
        return [index for index in made if not isinstance(index, NoIndex)]

    def _index_arrays(self, layer_idx: int, config: IndexConfig) -> dict[str, Tensor]:
        """Build a layer's index arrays from its rows and the recorded context's queries, as `index_build` does."""
        q = wide_context_queries(self.recording, layer_idx % NUM_WIDE_LAYERS, self.heads).to(self.device)
        with ThreadPoolExecutor(available_cpus()) as threads:
            return index_arrays(q, self.rows(layer_idx), config, threads)

    def queries(self, layer_idx: int, which: Which = "own") -> Tensor:
        """Return the batch's queries at each recorded step: [num_steps, batch_size, num_q_heads, head_dim]."""
        q = wide_queries(self.recording, layer_idx % NUM_WIDE_LAYERS, self.heads, which).to(self.device, DTYPE)
        requests = range(self.batch_size)
        return torch.stack([q.roll(-STEPS_BETWEEN_REQUESTS * request, dims=0) for request in requests], dim=1)

    def step_rows(self, tail_len: int) -> StepRows:
        """Return the rows of a step of all requests, each with `tail_len` rows in its tail."""
        rows = make_step_rows(self.batch_size, self.device)
        requests = torch.arange(self.batch_size, dtype=torch.int32, device=self.device)
        rows.context_ids.copy_(requests % self.num_contexts)
        rows.tail_ids.copy_(requests)
        rows.tail_lens.fill_(tail_len)
        return rows


def clone_index(index: DeviceLayerIndex) -> DeviceLayerIndex:
    """Copy an index to other addresses, so that the caches see another request's index."""
    parts = (part.clone() for part in index.parts)
    return DeviceSketch(*parts) if isinstance(index, DeviceSketch) else DeviceLists(*parts)
