"""What identifies a model and its tokenizer, and the sizes that its artifacts depend on."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from math import gcd, prod
from typing import Any
from weakref import WeakKeyDictionary

from csattn.artifact import LayerGeometry, ModelGeometry
from csattn.errors import ModelError
from csattn.models.description import describe
from csattn.models.families import CHOICE_BIAS, EXPERTS_OF_TOKENS, FAMILIES, LAYER_SCALE
from csattn.models.spec import LayerSpec, ModelSpec

_SAMPLED_VALUES = 4096


def geometry_of(spec: ModelSpec) -> ModelGeometry:
    """Return the sizes of a model that determine the shapes in its artifacts."""
    layers = tuple(map(_layer_geometry, spec.layers))
    return ModelGeometry(
        num_layers=spec.num_layers,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size * (1 if spec.streams is None else spec.streams.num),
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        window_heads=spec.local_heads or (),
        layers=() if set(layers) == {LayerGeometry()} else layers,
    )


def _layer_geometry(layer: LayerSpec) -> LayerGeometry:
    if layer.mlp_only:
        return LayerGeometry(keeps="nothing")
    if layer.recurrent is not None:
        conv, memory = layer.recurrent.parts
        return LayerGeometry(keeps="state", conv=conv, memory=memory)
    if layer.latent is not None:
        return LayerGeometry(keeps="latents")
    if (of := layer.compressed) is not None:
        return LayerGeometry(keeps="compressed", window=of.window, ratio=of.ratio, span=of.span, key_width=of.index_dim)
    attention = layer.attention
    if attention.reach is None:
        return LayerGeometry(rows_of=attention.rows_of)
    return LayerGeometry(keeps="window", window=attention.reach.num_rows, rows_of=attention.rows_of)


def fingerprint_of(model: Any) -> str:
    """SHA-256 over every weight's name, shape, dtype and an even sample of its values, and over settings that matter.

    A sample, because an 8B model takes a minute to hash in full and a fine-tune changes values everywhere.
    """
    rope = dict(getattr(model.config, "rope_parameters", None) or {})
    digest = hashlib.sha256(json.dumps(rope, sort_keys=True).encode())
    field_values = {name: getattr(model.config, name) for name in FAMILIES[model.config.model_type].config_fields}
    if any(value is not None for value in field_values.values()):
        digest.update(json.dumps(field_values, sort_keys=True).encode())
    spec = replace(describe(model.config), max_positions=1)  # the number of positions may grow
    digest.update(json.dumps(_without_defaults(spec), sort_keys=True).encode())
    names = FAMILIES[model.config.model_type].names
    weight_buffers = LAYER_SCALE, names.get(CHOICE_BIAS, CHOICE_BIAS), EXPERTS_OF_TOKENS
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


def _without_defaults(value: Any) -> Any:
    """A spec as JSON, without fields that have their default: a new one changes the fingerprint of no other model."""
    if is_dataclass(value):
        values = {of.name: (getattr(value, of.name), of.default) for of in fields(value)}
        return {name: _without_defaults(x) for name, (x, default) in values.items() if x != default}
    return [_without_defaults(x) for x in value] if isinstance(value, tuple) else value


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
