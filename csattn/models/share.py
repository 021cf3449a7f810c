"""Tensor parallelism: the share of a model on one of several devices, some of its heads and columns of its MLPs.

The outputs of all shares, summed over devices, are what the whole model adds to the residual stream.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from csattn.errors import ConfigError
from csattn.models.latent_spec import CompressedSpec
from csattn.models.quantized_weight import QuantizedExperts, QuantizedWeight
from csattn.models.spec import ExpertsSpec, HeadsSpec, LayerSpec, ModelSpec
from csattn.models.weights import ExpertWeights, LayerWeights, Linear, ModelWeights, by_expert
from csattn.share import Share


def require_shares(spec: ModelSpec, num_devices: int) -> None:
    """Raise ConfigError for a model that cannot be divided among so many devices."""
    if num_devices < 1:
        raise ConfigError(f"the number of devices must be at least 1, got {num_devices}")
    if num_devices == 1:
        return
    fault = next((fault for layer in spec.layers if (fault := _fault(layer))), None)
    if fault is not None:
        raise ConfigError(f"the model has {fault}, which csattn cannot split over several devices; choose one device")
    if num_devices not in (fitting := _fitting(spec)):
        counts, what = " and ".join(map(str, sorted(_shared(spec)))), "KV heads"
        if spec.compressed:
            what = "groups of heads"
        raise ConfigError(
            f"{num_devices} devices cannot split {counts} {what} and the columns of the model's MLPs and experts "
            f"equally; {' or '.join(map(str, fitting))} can"
        )


def require_shares_of_quantized(weights: ModelWeights, num_devices: int) -> None:
    """Raise ConfigError if the inputs of quantized weights cannot be divided among so many devices.

    weights: the whole model's; its spec has passed `require_shares`.
    """
    matrices = [matrix for layer in weights.layers for matrix in _shared_by_inputs(layer)]
    fitting = [n for n in _fitting(weights.spec) if all(matrix.has_input_parts(n) for matrix in matrices)]
    if num_devices not in fitting:
        raise ConfigError(
            f"{num_devices} devices cannot split this model's weights of 8 or 4 bits: each device needs whole groups "
            f"of a matrix's inputs, in their original order (no act-order); {' or '.join(map(str, fitting))} can, and "
            "more may with weights of 16 bits"
        )


def _shared_by_inputs(layer: LayerWeights) -> list[QuantizedWeight]:
    linears = [None if linear is None else linear.quantized for linear in (layer.out, layer.down)]
    experts = [None if x.quantized is None else x.quantized.down for x in layer.experts]
    return [matrix for matrix in (*linears, *experts) if matrix is not None]


def _fitting(spec: ModelSpec) -> list[int]:
    """Return the numbers of devices that divide heads and columns equally."""
    shared = _shared(spec)
    widths = [of.intermediate_size for layer in spec.layers for of in (layer.mlp, *layer.experts) if of is not None]
    return [n for n in range(1, min(shared) + 1) if not any(x % n for x in (*shared, *widths))]


def _shared(spec: ModelSpec) -> set[int]:
    """Return how many units of attention the layers have to divide: KV heads, or compressed attention's head groups."""
    if spec.compressed:
        return {of.num_groups for of in spec.compressed}
    return {spec.heads_of(layer_idx).num_kv_heads for layer_idx in range(spec.num_layers)}


def _fault(layer: LayerSpec) -> str | None:
    if layer.recurrent is not None:
        return "layers that keep a state instead of rows"
    if layer.mlp_only:
        return "layers without attention"
    if layer.latent is not None:
        return "layers of latents"
    if layer.attention.rows_of is not None:
        return "layers that share the rows of other layers"
    if layer.attention.qk_norm == "projection":
        return "norms over all heads together"
    return "experts with separate norms" if any(of.has_own_norms for of in layer.experts) else None


def share_of_spec(spec: ModelSpec, num_devices: int) -> ModelSpec:
    """Return the spec of each device's share. It has the whole vocabulary, embedding and routers.

    All heads see compressed rows, so every device has them and the indexer.
    """
    layers = tuple(
        replace(
            layer,
            compressed=layer.compressed
            and replace(
                layer.compressed,
                num_heads=layer.compressed.num_heads // num_devices,
                num_groups=layer.compressed.num_groups // num_devices,
            ),
            mlp=layer.mlp and replace(layer.mlp, intermediate_size=layer.mlp.intermediate_size // num_devices),
            experts=tuple(replace(of, intermediate_size=of.intermediate_size // num_devices) for of in layer.experts),
        )
        for layer in spec.layers
    )
    num_q_heads, num_kv_heads = spec.num_q_heads // num_devices, spec.num_kv_heads // num_devices
    if spec.compressed:
        num_kv_heads = spec.num_kv_heads
    local_heads = spec.local_heads and (spec.local_heads[0] // num_devices, spec.local_heads[1])
    return replace(spec, layers=layers, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, local_heads=local_heads)


def replicated_params(spec: ModelSpec, num_devices: int) -> int:
    """Return how many parameters are replicated on every device.

    The embedding, the output head if it cannot be divided, routers and biases of experts' outputs, the matrices that
    make and choose compressed rows, and those that mix streams, which are float32 and count twice. spec: the whole's.
    """
    has_head = not spec.tied_embedding and spec.vocab_size % num_devices > 0
    of_experts = sum(of.num_experts * (1 + of.bias) for layer in spec.layers for of in layer.experts)
    of_rows = sum(of.num_row_params(spec.hidden_size) for of in spec.compressed)
    of_streams = 0 if spec.streams is None else 2 * spec.streams.num_params(spec.num_layers, spec.hidden_size)
    return (spec.vocab_size * (1 + has_head) + of_experts) * spec.hidden_size + of_rows + of_streams


def padding_bytes(weights: ModelWeights, num_devices: int) -> int:
    """Return how many bytes of quantized weights each device takes beyond its equal part.

    A run is padded if a device's inputs end within it; a scale for a whole row is on every device.
    weights: the whole model's; they have passed `require_shares_of_quantized`.
    """
    matrices = [matrix for layer in weights.layers for matrix in _shared_by_inputs(layer)]
    return sum(
        QuantizedWeight.size(of.format, of.group_size, len(of), of.num_in // num_devices) - of.nbytes // num_devices
        for of in matrices
    )


def share_of_layer(layer: LayerWeights, heads: HeadsSpec, spec: LayerSpec, share: Share) -> LayerWeights:
    """Return a device's share of a layer's weights. heads, spec: the whole layer's."""
    if spec.compressed is None:
        layer = _share_of_attention(layer, heads, share)
    else:
        layer = _share_of_groups(layer, spec.compressed, share)
    each = zip(layer.experts, spec.experts, strict=True)
    layer = replace(layer, experts=tuple(_share_of_experts(experts, of, share) for experts, of in each))
    if spec.mlp is None or layer.down is None:
        return layer
    middle = spec.mlp.intermediate_size
    gate_up = [share.of(middle, part * middle) for part in range(1 + spec.mlp.gated)]
    return replace(
        layer,
        gate_up=tuple(linear for part in gate_up for linear in _outputs(layer.gate_up, part)),
        down=_inputs(layer.down, share.of(middle), share.rank == 0),
    )


def _share_of_attention(layer: LayerWeights, heads: HeadsSpec, share: Share) -> LayerWeights:
    q_width, kv_width = heads.q_width, heads.kv_width
    widths = (q_width, 0), (kv_width, q_width), (kv_width, q_width + kv_width)
    return replace(
        layer,
        qkv=tuple(linear for width in widths for linear in _outputs(layer.qkv, share.of(*width))),
        gates=_outputs(layer.gates, share.of(q_width)) if layer.gates else (),
        sinks=None if layer.sinks is None else layer.sinks[share.of(heads.num_q_heads)],
        out=layer.out and _inputs(layer.out, share.of(q_width), share.rank == 0),
    )


def _share_of_groups(layer: LayerWeights, spec: CompressedSpec, share: Share) -> LayerWeights:
    """Return a share of compressed attention: some groups of heads, and all that makes and chooses rows."""
    whole = layer.compressed
    assert whole is not None
    part, index_part = share.of(spec.q_width), slice(spec.q_width, spec.q_width + spec.index_q_width)
    groups = share.of(spec.out_width)
    compressed = replace(
        whole,
        queries=(*_outputs(whole.queries, part), *_outputs(whole.queries, index_part)),
        groups=whole.groups.outputs(groups.start, groups.stop),
        sinks=whole.sinks[share.of(spec.num_heads)],
    )
    return replace(layer, compressed=compressed, out=layer.out and _inputs(layer.out, groups, share.rank == 0))


def _share_of_experts(experts: ExpertWeights, spec: ExpertsSpec, share: Share) -> ExpertWeights:
    """Return the same columns of every expert. All devices choose the same experts."""
    columns, quantized = share.of(spec.intermediate_size), experts.quantized
    if quantized is not None:
        columns_of = torch.arange(spec.intermediate_size)[columns]
        # first rows of each expert's gates, then ups, if it has both
        firsts = spec.intermediate_size * torch.arange((1 + spec.gated) * spec.num_experts)
        rows = (firsts[:, None] + columns_of).flatten().to(quantized.gate_up.words.device)
        quantized = QuantizedExperts(quantized.gate_up.outputs(rows), quantized.down.inputs(columns))
    if quantized is not None and not experts.gates.is_floating_point():
        gates, ups, down = by_expert(quantized.gate_up.words, quantized.down.words, spec.num_experts, spec.gated)
    else:
        gates, down = experts.gates[:, columns], experts.down[..., columns]
        ups = None if experts.ups is None else experts.ups[:, columns]
    return replace(
        experts,
        gates=gates,
        ups=ups,
        down=down,
        gate_bias=None if experts.gate_bias is None else experts.gate_bias[:, columns],
        up_bias=None if experts.up_bias is None else experts.up_bias[:, columns],
        down_bias=experts.down_bias if share.rank == 0 else None,
        quantized=quantized,
    )


def share_of_head(head: Linear, share: Share) -> Linear:
    """Return a device's part of the vocabulary in the output head; all of it if it does not divide equally."""
    return head if len(head.weight) % share.num_devices else _outputs([head], share.of(len(head.weight)))[0]


def _outputs(linears: Sequence[Linear], part: slice) -> tuple[Linear, ...]:
    """Return a range of the concatenated outputs of several linear layers."""
    first, stop, found = part.start, part.stop, []
    for linear in linears:
        width = len(linear.weight)
        if max(first, 0) < min(stop, width):
            found.append(linear.outputs(max(first, 0), min(stop, width)))
        first, stop = first - width, stop - width
    return tuple(found)


def _inputs(linear: Linear, part: slice, has_bias: bool) -> Linear:
    bias = linear.bias if has_bias else None
    if linear.quantized is None:
        return Linear(linear.weight[:, part].contiguous(), bias)
    quantized = linear.quantized.inputs(part)
    return Linear(linear.weight[:, part] if linear.weight.is_floating_point() else quantized.words, bias, quantized)
