"""What identifies a model and its tokenizer, and the sizes that its artifacts depend on."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from math import gcd, prod
from typing import Any
from weakref import WeakKeyDictionary

from csattn.artifact import ModelGeometry
from csattn.artifact.manifest import ALL, COMPRESSED, GEOMETRY_LISTS, STATE
from csattn.errors import ModelError
from csattn.models.description import describe
from csattn.models.families import CHOICE_BIAS, EXPERTS_OF_TOKENS, FAMILIES, LAYER_SCALE
from csattn.models.spec import LayerSpec, ModelSpec

_SAMPLED_VALUES = 4096


def geometry_of(spec: ModelSpec) -> ModelGeometry:
    """Return the sizes of a model that determine the shapes in its artifacts."""
    names = [field.name for field in fields(ModelGeometry) if field.name not in GEOMETRY_LISTS]
    rows_of = tuple(i if x.attention.rows_of is None else x.attention.rows_of for i, x in enumerate(spec.layers))
    reaches = tuple(_reach(layer) for layer in spec.layers)
    state = next((layer.delta.state_sizes for layer in spec.layers if layer.delta is not None), ())
    sizes = {name: getattr(spec, name) for name in names}
    if spec.streams is not None:
        sizes["hidden_size"] *= spec.streams.num
    return ModelGeometry(
        **sizes,
        reaches=reaches if any(reaches) else (),
        state=state,
        local_heads=spec.local_heads or (),
        rows_of=rows_of if spec.kv_sources else (),
        compressed=_compressed_sizes(spec),
    )


def _reach(layer: LayerSpec) -> int:
    if layer.delta is not None:
        return STATE
    if layer.latent is not None:
        return ALL
    if layer.compressed is not None:
        return COMPRESSED
    return 0 if layer.attention.reach is None else layer.attention.reach.num_rows


def _compressed_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """The value of `ModelGeometry.compressed`."""
    layers = spec.compressed
    return (layers[0].window, *(x for of in layers for x in (of.ratio, of.span, of.key_dim))) if layers else ()


def fingerprint_of(model: Any) -> str:
    """SHA-256 over every weight's name, shape, dtype and an even sample of its values, and over settings that matter.

    A sample, because an 8B model takes a minute to hash in full and a fine-tune changes values everywhere.
    """
    digest = hashlib.sha256(json.dumps(dict(model.config.rope_parameters or {}), sort_keys=True).encode())
    field_values = {name: getattr(model.config, name) for name in FAMILIES[model.config.model_type].config_fields}
    if any(value is not None for value in field_values.values()):
        digest.update(json.dumps(field_values, sort_keys=True).encode())
    spec = describe(model.config)
    heads = spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.softmax_scale
    activations = [layer.mlp and layer.mlp.activation for layer in spec.layers]
    digest.update(json.dumps([heads, spec.norm_eps, activations]).encode())
    are_rotated_alike = all(layer.attention.rope == 0 for layer in spec.layers)
    if geometry_of(spec).reaches or not are_rotated_alike or any(layer.experts for layer in spec.layers):
        digest.update(repr(replace(spec, max_positions=1)).encode())  # the number of positions may grow
    weight_buffers = LAYER_SCALE, CHOICE_BIAS, EXPERTS_OF_TOKENS
    buffers = ((name, x) for name, x in model.named_buffers() if name.endswith(weight_buffers))
    for name, parameter in (*model.named_parameters(), *buffers):
        if parameter.is_meta:
            raise ModelError(
                f"some weights, such as {name}, are not in memory but offloaded; load the whole model into memory"
            )
        flat = parameter.detach().reshape(-1)
        sample = flat[:: _sample_stride(parameter.shape)].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()


def _sample_stride(shape: Sequence[int]) -> int:
    """The stride of the sample, coprime to the number of values: a common factor would leave out whole columns."""
    size = prod(shape)
    most = max(1, size // max((_SAMPLED_VALUES, *shape[-1:])))
    return next(step for step in range(most, 0, -1) if gcd(step, size) == 1)


# By tokenizer: its number of tokens, and the hash of its vocabulary so far. To hash 100 000 names takes a while.
_VOCABULARIES: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()


def hash_tokenizer(tokenizer: Any) -> str:
    size, digest = _VOCABULARIES.get(tokenizer, (0, hashlib.sha256()))
    if size != len(tokenizer):
        digest = hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
        _VOCABULARIES[tokenizer] = len(tokenizer), digest
    whole = digest.copy()
    whole.update(f"\n{tokenizer.chat_template}".encode())
    return str(whole.hexdigest())
