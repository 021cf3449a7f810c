"""Full attention of whole steps on a GPU, to all rows of their contexts: selector `full`, in every placement."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.attention.device import RowSource, row_sources
from csattn.attention.every_row import EveryRowAttention, supports_heads, workspace_bytes
from csattn.batch import StepRows, make_device_selection
from offload.pinned import PinnedRows
from workers.engine.gpu.attend_chosen import plan_attention
from workers.engine.gpu.far_rows import ContextRows, DeviceRows
from workers.engine.gpu.shape import EngineShape
from workers.model.attention import StepAttention

NUM_BUFFERS = 2  # double buffering: one layer is read on the device while the next is copied


class AttendAll(StepAttention):
    """Attends to all rows, without a search. Owns all tails, unless it is given them.

    Over contexts on the device, a step is one CUDA graph. Contexts in host memory are streamed: the host enqueues the
    copies between graphs. A context is read once for as many rows that continue it as a thread block takes; if its rows
    are coded, or no such kernel supports the heads, once for each row.
    """

    def __init__(
        self,
        shape: EngineShape,
        far: "DeviceRows | StreamedRows",
        device: torch.device,
        sinks: Tensor | None = None,  # [num_layers, num_q_heads] float32: sink logits, if the shape has them
        tails: Tensor | None = None,  # as from `make_tails`; None: makes its own
    ) -> None:
        assert shape.attends_all, "planned for steps that select"
        self.shape, self.far = shape, far
        self.in_graph = isinstance(far, DeviceRows)
        self.tails: Tensor = shape.make_tails(device) if tails is None else tails
        self._together = _plan(shape, device) if reads_once(shape) else None
        self._one_by_one = {} if self._together is not None else plan_attention(shape, device)
        self._sinks = sinks
        heads = shape.num_index_heads
        self._nothing = {
            size: make_device_selection(size, heads, shape.max_top_k, device) for size in shape.batch_sizes
        }

    def begin_step(self, rows: StepRows) -> None:
        if isinstance(self.far, StreamedRows):
            self.far.begin_step(rows.context_ids.tolist())

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        context = self.far.take(layer_idx) if isinstance(self.far, StreamedRows) else self.far.source(layer_idx)
        tails, sinks = self.tails[layer_idx], None if self._sinks is None else self._sinks[layer_idx]
        if self._together is not None:
            self._together.attend(q, context, tails, rows, out, sinks)
            return
        nothing, attention = self._nothing[rows.batch_size], self._one_by_one[rows.batch_size]
        attention.attend(q, context, tails, context, nothing, rows, out, sinks=sinks)


class StreamedRows(ContextRows):
    """Double buffer on the device: two layers of every context, whose KV lies in pinned host memory.

    While a layer is attended to and computed, the next one is copied, on a stream of its own.
    """

    on_host = True

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        row, dtype = shape.context_row
        rows_per_context = shape.num_kv_heads * shape.max_context_len
        self._buffers = torch.zeros(
            (NUM_BUFFERS, shape.num_contexts, rows_per_context, *row), dtype=dtype, device=device
        )
        self._lens = torch.zeros(shape.num_contexts, dtype=torch.int32, device=device)
        self._sources = row_sources(self._buffers, self._lens)  # by layer_idx % NUM_BUFFERS
        self._num_layers = shape.num_layers
        # None on an emulated device, where everything runs in order
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None  # recorded after the last copy
        self._kv: dict[int, PinnedRows] = {}
        self._in_step: list[int] = []  # contexts of the current step

    def load(self, context_id: int, kv: PinnedRows) -> None:
        """Register a context, whose KV stays on the host."""
        self._lens[context_id] = kv.layers[0].shape[1]
        self._kv[context_id] = kv

    def unload(self, context_id: int) -> None:
        """Forget a context; the owner of its memory unpins it. No step may be in flight."""
        del self._kv[context_id]

    def begin_step(self, context_ids: Sequence[int]) -> None:
        """Begin to copy the first layer of these contexts; -1: of an idle row."""
        self._in_step = sorted({context_id for context_id in context_ids if context_id >= 0})
        self._copy_layer(0)

    def take(self, layer_idx: int) -> RowSource:
        """Return a layer's rows, and begin to copy the next layer. Work enqueued later waits for this one.

        Take the layers in order, and enqueue all work that reads one before taking the next.
        """
        copied = self._copied
        if layer_idx + 1 < self._num_layers:
            self._copy_layer(layer_idx + 1)
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
        return self._sources[layer_idx % NUM_BUFFERS]

    def _copy_layer(self, layer_idx: int) -> None:
        """Copy a layer over the one before the last, after all enqueued work, which may still read that one."""
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):  # None changes nothing
            for context_id in self._in_step:
                rows = self._kv[context_id].layers[layer_idx]
                buffer = self._buffers[layer_idx % NUM_BUFFERS, context_id, : rows.shape[:2].numel()]
                buffer.view(rows.shape).copy_(rows, non_blocking=True)
        if self._copy_stream is not None:
            self._copied = self._copy_stream.record_event()


def reads_once(shape: EngineShape) -> bool:
    """Whether a kernel reads a context once for all rows of a step that continue it."""
    return shape.kv_format is None and supports_heads(
        shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.dtype
    )


def attend_all_bytes(shape: EngineShape) -> int:
    """Return the bytes of workspace that `AttendAll` takes on the device."""
    heads = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    return workspace_bytes(shape.batch_sizes, *heads, shape.tail_capacity) if reads_once(shape) else 0


def _plan(shape: EngineShape, device: torch.device) -> EveryRowAttention:
    return EveryRowAttention(
        batch_sizes=shape.batch_sizes,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        tail_capacity=shape.tail_capacity,
        softmax_scale=shape.softmax_scale,
        device=device,
        logit_cap=shape.logit_cap,
        has_sinks=shape.has_sinks,
    )


def streamed_bytes(shape: EngineShape) -> int:
    """Return the bytes of device memory that `StreamedRows` takes."""
    return NUM_BUFFERS * shape.num_contexts * shape.num_kv_heads * shape.max_context_len * shape.context_row_bytes
