"""Records real rows of a few layers of a context, so that decode benchmarks need neither copies nor made-up values."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.accuracy.attending.attend import Reading, attend
from bench.accuracy.attending.context import RealContext, Step
from bench.decode.recording import Recording
from bench.timing import gate

_LARGEST_BYTES = 40_000_000
_CONTEXT_QUERIES = 2048  # per head, evenly spaced: enough for the query metric of a sketch


def record(context: RealContext, layer_ids: Sequence[int], stretch: float, text_sha256: str) -> Recording:
    """Record some layers, except layer 0, whose queries cannot be predicted.

    Raises GateError for layer 0, or when the file would be large.
    """
    layers = [context.layers[layer_idx] for layer_idx in layer_ids]
    gate(0 not in layer_ids, "layer 0 has no layer before it to predict its queries from; record others")
    needed = sum(2 * layer.k.numel() for layer in layers)
    gate(
        needed <= _LARGEST_BYTES,
        f"{len(layers)} layers of {context.context_len} tokens take {needed / 1e6:.0f} MB, at most "
        f"{_LARGEST_BYTES / 1e6:.0f} are wanted; give fewer",
    )
    everything = Reading(0, 0, context.context_len, "none")
    steps: dict[int, Step] = {}

    def attend_and_keep(layer_idx: int, step: Step) -> Tensor:
        steps[layer_idx] = step
        return attend(context.layers[layer_idx], step, None, everything)

    context.predict(attend_and_keep, ahead=True)
    keys, key_steps = _in_8_bits(torch.stack([layer.k for layer in layers]))
    values, value_steps = _in_8_bits(torch.stack([layer.v for layer in layers]))
    spacing = -(-context.context_len // _CONTEXT_QUERIES)
    return Recording(
        keys,
        key_steps,
        values,
        value_steps,
        context_q=_halves([layer.q[:, :, ::spacing] for layer in layers]),
        own=_halves([steps[layer_idx].q for layer_idx in layer_ids]),
        predicted=_halves([steps[layer_idx].early for layer_idx in layer_ids]),
        layer_ids=np.array(layer_ids, np.int64),
        stretch=stretch,
        text_sha256=text_sha256,
    )


def _in_8_bits(rows: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise rows [..., num_rows, head_dim] to int8, with a step for each channel."""
    steps = (rows.abs().amax(-2, keepdim=True) / 127).clamp_min(1e-12)
    return (rows / steps).round().to(torch.int8).cpu().numpy(), steps.cpu().numpy()


def _halves(queries: list[Tensor]) -> NDArray[np.float16]:
    """[num_kv_heads, group_size, ...] of each layer -> [num_layers, num_q_heads, ...]."""
    return torch.stack([q.flatten(0, 1).half() for q in queries]).cpu().numpy()
