"""A model as one of several devices computes it: some of its heads, and some columns of its MLPs.

Each device computes with its share what it adds to the residual stream; the sum over devices is what the whole adds.
"""

from collections.abc import Sequence
from dataclasses import replace

from csattn.errors import ConfigError
from csattn.models.spec import HeadsSpec, LayerSpec, ModelSpec
from csattn.models.weights import LayerWeights, Linear
from csattn.share import Share


def require_shares(spec: ModelSpec, num_devices: int) -> None:
    """Raise ConfigError for what so many devices cannot share out."""
    if num_devices < 1:
        raise ConfigError(f"the number of devices must be at least 1, got {num_devices}")
    if num_devices == 1:
        return
    fault = next((fault for layer in spec.layers if (fault := _fault(layer))), None)
    if fault is not None:
        raise ConfigError(f"the model has {fault}, which are not shared out among devices; choose one device")
    widths = [layer.mlp.intermediate_size for layer in spec.layers if layer.mlp is not None]
    kv_heads = {spec.heads_of(layer_idx).num_kv_heads for layer_idx in range(spec.num_layers)}
    fitting = [n for n in range(1, min(kv_heads) + 1) if not any(x % n for x in (*kv_heads, *widths))]
    if num_devices not in fitting:
        told = " and ".join(map(str, sorted(kv_heads)))
        raise ConfigError(
            f"{num_devices} devices cannot share {told} KV heads and the columns of the model's MLPs in "
            f"equal parts; {' or '.join(map(str, fitting))} can"
        )


def _fault(layer: LayerSpec) -> str | None:
    if layer.experts:
        return "layers of experts"
    if layer.delta is not None:
        return "layers of linear attention"
    if layer.latent is not None:
        return "layers of latents"
    if layer.attention.rows_of is not None:
        return "layers that attend to rows of others"
    return "norms over all heads together" if layer.attention.qk_norm == "projection" else None


def share_of_spec(spec: ModelSpec, num_devices: int) -> ModelSpec:
    """Of each device; all of the vocabulary is in it, and of the embedding."""
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, intermediate_size=layer.mlp.intermediate_size // num_devices))
        if layer.mlp is not None
        else layer
        for layer in spec.layers
    )
    num_q_heads, num_kv_heads = spec.num_q_heads // num_devices, spec.num_kv_heads // num_devices
    local_heads = spec.local_heads and (spec.local_heads[0] // num_devices, spec.local_heads[1])
    return replace(spec, layers=layers, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, local_heads=local_heads)


def share_of_layer(layer: LayerWeights, heads: HeadsSpec, of: LayerSpec, share: Share) -> LayerWeights:
    """heads, of: the whole layer's."""
    q_width, kv_width = heads.q_width, heads.kv_width
    widths = (q_width, 0), (kv_width, q_width), (kv_width, q_width + kv_width)
    layer = replace(
        layer,
        qkv=tuple(linear for width in widths for linear in _outputs(layer.qkv, share.of(*width))),
        gates=_outputs(layer.gates, share.of(q_width)) if layer.gates else (),
        sinks=None if layer.sinks is None else layer.sinks[share.of(heads.num_q_heads)],
        out=_inputs(layer.out, share.of(q_width), share.rank == 0),
    )
    if of.mlp is None or layer.down is None:
        return layer
    middle = of.mlp.intermediate_size
    gate_up = [share.of(middle, part * middle) for part in range(1 + of.mlp.gated)]
    return replace(
        layer,
        gate_up=tuple(linear for part in gate_up for linear in _outputs(layer.gate_up, part)),
        down=_inputs(layer.down, share.of(middle), share.rank == 0),
    )


def share_of_head(head: Linear, share: Share) -> Linear:
    """Its part of the vocabulary; all of it, where that cannot be shared out equally."""
    return head if len(head.weight) % share.num_devices else _outputs([head], share.of(len(head.weight)))[0]


def _outputs(linears: Sequence[Linear], part: slice) -> tuple[Linear, ...]:
    """Those of all side by side."""
    first, stop, found = part.start, part.stop, []
    for linear in linears:
        width = len(linear.weight)
        if max(first, 0) < min(stop, width):
            found.append(linear.outputs(max(first, 0), min(stop, width)))
        first, stop = first - width, stop - width
    return tuple(found)


def _inputs(linear: Linear, part: slice, has_bias: bool) -> Linear:
    return Linear(linear.weight[:, part].contiguous(), linear.bias if has_bias else None)
