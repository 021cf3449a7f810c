"""The positions of a supported model, read from its `transformers` config: how many, RoPE, and its scaling."""

from typing import Any

from csattn.errors import ModelError
from csattn.models.families import FAMILIES, Family, own_field
from csattn.models.spec import RopeSpec, Temper

# With these, the angle of a position depends on the position alone, so captured keys stay valid however long the
# sequence grows.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
_MAX_STRETCH = 1024.0
_ROPES = ("main", "compress")  # the two kinds of RoPE in models of compressed attention


def rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """RoPE parameters by the type of the layers that use them; by the empty name if all layers share one.

    Where layers have a base each (`layer_rope_theta`), parameters are by base.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if (bases := own_field(config, "layer_rope_theta", None)) is not None:
        return {str(float(base)): rope | {"rope_theta": base} for base in sorted(set(bases) - {0})}
    types = {*(getattr(config, "layer_types", None) or ()), *_ROPES}
    return {name: dict(of_type) for name, of_type in rope.items() if name in types} or {"": rope}


def rope_name(config: Any, layer_idx: int, layer_type: str) -> str | None:
    """Return the name of a layer's RoPE in `rope_parameters`; None: its base is 0, and it has no RoPE."""
    if (bases := own_field(config, "layer_rope_theta", None)) is not None:
        return str(float(bases[layer_idx])) if bases[layer_idx] else None
    return "" if "" in rope_parameters(config) else layer_type


def max_positions(config: Any) -> int:
    """The greatest number of positions.

    YaRN's factor multiplies the original positions; some models are published with `max_position_embeddings` unscaled.
    """
    ropes = [of for of in rope_parameters(config).values() if of.get("rope_type") == "yarn"]
    scaled = [(of["factor"] or 1) * of["original_max_position_embeddings"] for of in ropes]
    return int(max([config.max_position_embeddings, *scaled]))


def stretch_positions(config: Any, factor: float) -> None:
    """Multiply the number of a supported model's positions by a factor, with YaRN (arXiv:2309.00071), in its config.

    1 leaves it as it is. Raises ModelError if the factor is below 1 or above 1024, if the model has no RoPE or layer
    types have RoPE of their own, or if positions are scaled already.
    """
    if factor == 1.0:
        return
    if not 1.0 < factor <= _MAX_STRETCH:
        raise ModelError(f"a model's positions can be stretched by a factor of 1 to {_MAX_STRETCH:g}, got {factor}")
    if not rotates_any(config, FAMILIES[config.model_type]):
        raise ModelError("this model's layers have no RoPE, so its positions cannot be stretched; load it unstretched")
    if "" not in rope_parameters(config):
        raise ModelError(
            "this model's layers have different RoPE parameters, so its positions cannot be stretched; load it "
            "unstretched"
        )
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"this model's positions are scaled by {rope['rope_type']!r} already; load it unstretched")
    before = config.max_position_embeddings
    scaled = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": before}
    config.rope_parameters = rope | scaled
    config.max_position_embeddings = int(before * factor)


def rope_specs(config: Any, family: Family) -> tuple[RopeSpec, ...]:
    """Return the RoPEs of the types of layers, in the order of `rope_parameters`, then that of layers without any."""
    if not rotates_any(config, family):
        return ()
    of_types = (_rope_spec(config, of_type, family) for of_type in rope_parameters(config).values())
    return (*of_types, *unrotated_rope(config))


def rotates_any(config: Any, family: Family) -> bool:
    """Whether any layer has RoPE."""
    if family.rotated == "position_embedding_type":
        return bool(config.position_embedding_type == "rope")
    if own_field(config, "layer_rope_theta", None) is not None:
        return any(config.layer_rope_theta)
    return family.rotated != "none"


def _rope_spec(config: Any, parameters: dict[str, Any], family: Family) -> RopeSpec:
    rope_type = parameters.get("rope_type", "default")
    if family.alpha and rope_type == "dynamic" and (alpha := parameters.get("alpha")) and (dim := config.head_dim):
        base = parameters["rope_theta"] * alpha ** (dim / (dim - 2))
        rope_type, parameters = "default", {"rope_type": "default", "rope_theta": base}
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"this model's positions are scaled by {rope_type!r}, which changes stored keys as the sequence grows; "
            f"csattn supports {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    temper = None
    if family.tempered:
        fields = "llama_4_scaling_beta", "original_max_position_embeddings"
        beta, every = (parameters.get(name) for name in fields)
        if beta is None or every is None:
            raise ModelError(
                f"this model scales queries by their positions, and its rope_parameters lack {' or '.join(fields)}; "
                "add them to its config"
            )
        temper = Temper(beta=float(beta), every=every)
    interleaved = family.interleaved
    if isinstance(interleaved, str):
        interleaved = bool(getattr(config, interleaved))
    return RopeSpec(parameters=parameters, interleaved=interleaved, temper=temper)


def unrotated_rope(config: Any) -> tuple[RopeSpec, ...]:
    """The temperature of queries in layers without RoPE, as a RopeSpec that does not rotate; empty if none."""
    if not own_field(config, "attn_temperature_tuning", False):
        return ()
    temper = Temper(beta=float(config.attn_scale), every=int(config.floor_scale), offset=1)
    return (RopeSpec(parameters=None, temper=temper),)
