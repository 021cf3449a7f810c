"""What a step reads besides searched layers and the weights of one token: windows, recurrent states, experts."""

from math import prod

import numpy as np
import torch

from bench.decode.options import Options
from bench.decode.placements import engine_shape, zero_sinks
from bench.decode.roofline import ITEM_BYTES, row_bytes
from bench.decode.workload import Workload
from csattn.config import SketchConfig
from csattn.models.weights import ModelWeights
from workers.engine.gpu.local_layers import LocalLayers
from workers.model import StepAttention


def with_other_layers(work: Workload, options: Options, searched: StepAttention) -> StepAttention:
    """Return the attention of all layers of the shape: `searched`, and the others.

    The others have random last rows for every context, or an empty state.
    """
    spec = options.shape
    if options.num_layers == spec.num_layers:
        return searched
    engine = engine_shape(work, options, SketchConfig(), options.search)
    layers = LocalLayers(engine, spec, searched, zero_sinks(engine, work.device, spec.num_layers), work.device)
    lens = [min(reach.num_rows, work.context_len) for reach in engine.local]
    num_kv_heads, head_dim = engine.of_local
    kv = [torch.randn(num_kv_heads, num_rows, 2, head_dim, dtype=engine.dtype) for num_rows in lens]
    recurrent = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
    states = [
        {name: np.zeros(part, np.float32) for name, part in zip(("conv", "memory"), of.parts, strict=True)}
        for of in recurrent
    ]
    for context_id in range(work.num_contexts):
        layers.load(context_id, kv, states)
    return layers


def other_bytes(work: Workload, weights: ModelWeights) -> float:
    """Return the bytes of those layers' rows and states that a step must read, and of states that it writes.

    For several requests, also the expected bytes of experts beyond one request's, if each chooses at random.
    """
    spec, total = weights.spec, 0.0
    for layer in spec.layers:
        if (reach := layer.attention.reach) is not None:
            total += work.batch_size * row_bytes(spec) * min(reach.num_rows, work.context_len)
        if layer.recurrent is not None:
            total += work.batch_size * 2 * 4 * sum(prod(part) for part in layer.recurrent.parts)
    return total + _bytes_of_more_experts(weights, work.batch_size)


def _bytes_of_more_experts(weights: ModelWeights, batch_size: int) -> float:
    total = 0.0
    for layer, of_layer in zip(weights.layers, weights.spec.layers, strict=True):
        for experts, of in zip(layer.experts, of_layer.experts, strict=True):
            num_read = of.num_experts * (1 - (1 - of.num_chosen / of.num_experts) ** batch_size)
            matrices = experts.gates, experts.ups, experts.down
            plain_bytes = sum(matrix.numel() * ITEM_BYTES for matrix in matrices if matrix is not None)
            num_bytes = plain_bytes if experts.quantized is None else experts.quantized.nbytes
            total += (num_read - of.num_chosen) / of.num_experts * num_bytes
    return total
