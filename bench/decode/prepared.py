"""The baselines in whole steps: attentions whose contexts are loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.decode.baselines import fastest_full_attention
from bench.decode.gpu_timing import num_input_sets
from bench.decode.options import Options
from bench.decode.roofline import full_bytes, row_bytes
from bench.decode.steps import FullAttentionSteps, WindowSteps, merge_requests
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import DTYPE, Workload
from csattn.errors import CsattnError
from workers.model import StepAttention

TAIL_LEN, TAIL_CAPACITY = 64, 512
SPARE_BYTES = 3 << 30  # that a step needs besides weights, rows and indexes


class TooLargeError(CsattnError):
    """A case does not fit into this machine."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An attention whose contexts are loaded, and how it is measured."""

    attention: StepAttention
    step_bytes: float  # of device memory that attention must read in a step, all layers
    # returns further figures of the steps since `start_counting`, given their number
    facts: Callable[[int], dict[str, Any]] = lambda num_steps: {}
    start_counting: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    is_slow: bool = False  # fewer steps are timed, and none is profiled


def full_attention(work: Workload, options: Options) -> Prepared:
    """Load all rows of the contexts to the device, for torch's fastest full attention."""
    shape = options.shape
    moved = work.num_contexts * options.num_layers * full_bytes(shape, work.context_len)
    require_memory(moved, "the KV of full attention")
    first = [work.separate_kv(i) for i in range(min(NUM_WIDE_LAYERS, options.num_layers))]
    kv = first + [
        (first[i % len(first)][0].clone(), first[i % len(first)][1].clone())
        for i in range(len(first), options.num_layers)
    ]
    num_sets = num_input_sets(moved // options.num_layers, len(first))
    inputs = [(merge_requests(work.queries(i)[i], kv[i][0]), *kv[i]) for i in range(num_sets)]
    full = fastest_full_attention(inputs, seconds=0.05)
    steps = FullAttentionSteps(make_tails(work, options), kv, full.attend)
    return Prepared(steps, moved, lambda _: {"backend": full.name})


def window_only(work: Workload, options: Options) -> Prepared:
    """Attend to resident rows alone: random sinks, window and tail."""
    shape, search = options.shape, options.search
    num_resident = search.sink_len + search.window_len
    resident_shape = shape.num_kv_heads, num_resident, 2, shape.head_dim
    resident = [
        [torch.randn(resident_shape, dtype=DTYPE, device=work.device) for _ in range(work.batch_size)]
        for _ in range(options.num_layers)
    ]
    moved = work.batch_size * options.num_layers * row_bytes(shape) * (num_resident + TAIL_LEN)
    steps = WindowSteps(make_tails(work, options), resident, work.batch_size, shape.num_q_heads, shape.softmax_scale)
    return Prepared(steps, moved)


def make_tails(work: Workload, options: Options) -> Tensor:
    """Return random tails: [num_layers, batch_size, num_kv_heads, TAIL_CAPACITY, 2, head_dim]."""
    shape = options.shape
    sizes = options.num_layers, work.batch_size, shape.num_kv_heads, TAIL_CAPACITY, 2, shape.head_dim
    return torch.randn(sizes, dtype=DTYPE, device=work.device)


def require_memory(num_bytes: int, what: str) -> None:
    """Raise TooLargeError unless the device has so much memory free, and SPARE_BYTES more."""
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if num_bytes + SPARE_BYTES > free:
        raise TooLargeError(
            f"{what} needs {num_bytes / 1e9:.1f} GB and a step {SPARE_BYTES / 1e9:.1f}, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free"
        )
