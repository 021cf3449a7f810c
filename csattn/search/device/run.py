"""Plan once, search at every step: memory is set aside here, launches allocate nothing and never wait."""

from functools import cached_property

import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.cuda import CudaKernel
from csattn.search.device.compiling import THREADS, blocks_of_slot, compiled
from csattn.search.device.indexes import DeviceIndexes
from csattn.search.device.lists_pass import ListsPass
from csattn.search.device.shapes import IndexShape, SketchShape
from csattn.search.device.sketch_pass import SketchPass

CHOICE_BYTES = 4 * (4096 + 3 + 256 + 2 * 512 + 1)  # of struct Choice


class DeviceSearch:
    """Chooses rows for a whole batch. Definition: `csattn.search.reference.search`, without a tail.

    A selection does not depend on the batch it is made in. Scores are the definition's; shares are float32.
    """

    def __init__(
        self,
        shape: IndexShape,
        *,
        batch_size: int,
        max_context_len: int,
        softmax_scale: float,
        query_dtype: torch.dtype,
        device: torch.device,
        max_segments: int = 0,  # of a sketch
        sums_rest: bool = False,  # of a sketch: `scores.attend_rest` may follow
    ) -> None:
        self.shape, self.batch_size, self.max_context_len = shape, batch_size, max_context_len
        self.scores: SketchPass | ListsPass
        if isinstance(shape, SketchShape):
            self.scores = SketchPass(
                shape,
                batch_size=batch_size,
                max_context_len=max_context_len,
                max_segments=max_segments,
                softmax_scale=softmax_scale,
                query_dtype=query_dtype,
                device=device,
                keeps_scores=True,
                sums_rest=sums_rest,
            )
        else:
            self.scores = ListsPass(
                shape,
                batch_size=batch_size,
                max_context_len=max_context_len,
                softmax_scale=softmax_scale,
                query_dtype=query_dtype,
                device=device,
            )
        slots = batch_size * shape.num_index_heads
        self._blocks = blocks_of_slot(device, slots, self.scores.max_keys, 2)
        self._worths = torch.zeros(slots, self.scores.max_keys, dtype=torch.int32, device=device)
        self._marks = torch.zeros(slots, self.scores.max_keys // 32, dtype=torch.int32, device=device)
        self._choices = torch.zeros(slots, CHOICE_BYTES, dtype=torch.uint8, device=device)

    def __repr__(self) -> str:
        return f"<DeviceSearch for {self.batch_size} rows of {self.max_context_len} keys>"

    @property
    def workspace_bytes(self) -> int:
        """Device memory of its own."""
        return self.scores.workspace_bytes + self._worths.nbytes + self._marks.nbytes + self._choices.nbytes

    def search(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
        out: DeviceSelection,  # written
    ) -> None:
        """Enqueue the search of one layer on torch's current stream."""
        expected = self.batch_size, self.shape.num_index_heads
        assert out.kv_indices.shape[:2] == expected, f"out has shape {tuple(out.kv_indices.shape)}"
        config, max_keys = indexes.config, self.scores.max_keys
        places = indexes.context_lens, indexes.top_ks, context_ids, config.sink_len, config.window_len
        grid = self._blocks, self.shape.num_index_heads, self.batch_size
        self.scores.run(q, indexes, layer_idx, context_ids, self._choices)
        self.scores.combine(places, self._worths, self._choices)
        chosen = out.kv_indices, out.kv_indices.shape[2]
        self._find.launch(grid, THREADS, *places, self._worths, max_keys, self._marks, self._choices, *chosen)
        written = self._choices, out.kv_indices, out.valid_len, out.kv_indices.shape[2]
        self._write.launch(grid, THREADS, *places, self._marks, max_keys, *written)

    @cached_property
    def _find(self) -> CudaKernel:
        return compiled("find_keys", ("choice", "boundary", "find"), self.shape)

    @cached_property
    def _write(self) -> CudaKernel:
        return compiled("write_keys", ("choice", "write"), self.shape)
