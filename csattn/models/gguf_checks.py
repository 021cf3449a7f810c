"""What a GGUF file says of its model and `transformers` does not read: then the file is refused."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.models.positions import rope_parameters

# by name, the config's attributes that equal a file's fields if `transformers` has read them
_SAME_FIELDS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
# fields that `transformers` never reads, with the values that change nothing
_NO_EFFECT: dict[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
}


def read_rope_factors(gguf: Path) -> Tensor | None:
    """Return the divisors of RoPE's frequencies, [head_dim / 2], or None; `transformers` ignores them.

    Raises ModelError for other contents that `transformers` ignores although they change the model.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    values = {name: field.parts[-1] for name, field in reader.fields.items()}
    if "split.count" in values and (count := int(values["split.count"][0])) > 1:
        raise ModelError(f"it is one of {count} parts; join them with llama.cpp's llama-gguf-split --merge")
    family = bytes(values["general.architecture"]).decode()
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        field = reader.fields.get(f"{family}.{name}")
        if field is not None and len(field.data) > 1 and family != "lfm2":  # 0 KV heads: the layer is a convolution
            raise not_read(f"its layers have one {name} each, a field")
    by_name = (values.get(f"{family}.rope.{name}", [0.0])[0] for name in ("scaling.factor", "scale_linear"))
    is_scaled = next((factor for factor in by_name if factor), 1.0) != 1.0
    scaling = bytes(values.get(f"{family}.rope.scaling.type", b"linear")).decode()
    if scaling == "linear" and not is_scaled:
        scaling = "none"
    factors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    freqs = None if family == "gemma4" else factors.pop("rope_freqs.weight", None)
    if scaling != "none" or (factors and family != "gemma4"):  # Gemma 4's are read
        raise positions_not_read(next(iter(factors), scaling))
    return None if freqs is None else torch.tensor(freqs)


def require_fields_read(gguf: Path, config: Any) -> None:
    """Raise ModelError if the config of `transformers` differs from the file's fields.

    It ignores windows, rotated dimensions and those of _SAME_FIELDS in some families. Files lack the softmax scale: it
    follows from the width of heads, except in Gemma 2 27B and Gemma 3 27B.
    """
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    family = bytes(fields["general.architecture"].parts[-1]).decode()

    def number_at(name: str) -> int:
        return int(fields[f"{family}.{name}"].parts[-1][0]) if f"{family}.{name}" in fields else 0

    types, needed = getattr(config, "layer_types", None) or (), ["context_length", "attention.layer_norm_rms_epsilon"]
    if "sliding_attention" in types and family != "gemma2":  # whose window llama.cpp knows
        needed.append("attention.sliding_window")
    if f"{family}.expert_count" in fields:
        needed.append("expert_used_count")
    if lacking := [name for name in needed if f"{family}.{name}" not in fields]:
        raise ModelError(f"it lacks the field {family}.{lacking[0]}; convert its model to GGUF again, with llama.cpp")
    gates = {"expert_gating_func": (0, 2 if config.model_type == "minimax_m2" else 1)}  # sigmoid, softmax
    for name, neutral in {**_NO_EFFECT, **gates}.items():
        if f"{family}.{name}" in fields and (there := fields[f"{family}.{name}"].contents()) not in neutral:
            raise not_read(f"it has {name} {there:g}, a field")
    for name, attribute in _SAME_FIELDS.items():
        if hasattr(config, attribute) and f"{family}.{name}" in fields:
            there, read = fields[f"{family}.{name}"].contents(), getattr(config, attribute)
            if there != (read or 0):
                raise not_read(f"it has {name} {there:g}, for which transformers takes {read}, a field")
    pattern = f"{family}.attention.sliding_window_pattern"
    if (
        pattern in fields
        and types
        and _local_layers(fields[pattern].contents(), len(types))
        != [of_type == "sliding_attention" for of_type in types]
    ):
        raise not_read("its layers with a window are others than transformers takes (sliding_window_pattern), a field")
    window, num_rotated = number_at("attention.sliding_window"), number_at("rope.dimension_count")
    if 0 < window < config.max_position_embeddings and window != getattr(config, "sliding_window", None):
        raise not_read(f"its layers attend through a window of {window} rows (attention.sliding_window), a field")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "query_pre_attn_scalar", head_dim) != head_dim:
        raise not_read(f"its heads have {head_dim} dimensions and logits scaled by a number (query_pre_attn_scalar)")
    for of_type, rope in rope_parameters(config).items():
        name = "rope.freq_base_swa" if of_type == "sliding_attention" else "rope.freq_base"
        there, read = fields.get(f"{family}.{name}"), rope["rope_theta"]
        if (base := 10000.0 if there is None else there.contents()) != read:
            raise not_read(f"it has {name} {base:g}, for which transformers takes {read:g}, a field")
    of_all = rope_parameters(config).get("")  # with several RoPEs, the file's number is of some layers only
    if num_rotated and of_all and num_rotated != int(head_dim * of_all.get("partial_rotary_factor", 1.0)):
        raise not_read(f"RoPE rotates {num_rotated} of a head's {head_dim} dimensions (rope.dimension_count), a field")


def _local_layers(pattern: Any, num_layers: int) -> list[bool]:
    """Which layers attend through a window: told one by one, or all but every pattern-th."""
    if isinstance(pattern, list):
        return [bool(is_local) for is_local in pattern]
    return [not pattern or (layer_idx + 1) % pattern > 0 for layer_idx in range(num_layers)]


def require_tensors_read(gguf: Path, model: Any) -> None:
    """Raise ModelError if the file's tensors have more numbers than the model of `transformers`, which ignores those.

    Not counted: divisors of RoPE's frequencies, and layers that predict further tokens (MTP), which csattn never loads.
    """
    from gguf import GGUFReader

    reader, family = GGUFReader(gguf), model.config.model_type
    has_mtp = any(name.endswith(".nextn_predict_layers") for name in reader.fields)
    further = f"blk.{model.config.num_hidden_layers}." if has_mtp else "rope_f"
    there = {
        tensor.name: int(tensor.n_elements)
        for tensor in reader.tensors
        if not tensor.name.startswith(("rope_f", further))
    }
    # tied weights are there once
    read = {tensor.data_ptr(): (name, tensor.numel()) for name, tensor in model.state_dict().items()}
    num_there = sum(number for name, number in there.items() if name.endswith(".bias"))
    if num_there > sum(number for name, number in read.values() if name.endswith("bias")):
        raise not_read(f"it has biases where a {family} of transformers has none, a kind of tensor")
    more = sum(there.values()) - sum(number for _, number in read.values())
    if more < 0:  # `transformers` takes zeros for experts' matrices that are not there
        raise ModelError(f"it lacks {-more} of its model's numbers; convert its model to GGUF again, with llama.cpp")
    if more > 0:
        raise not_read(f"it has tensors beyond those of a {family} of transformers ({more} numbers), a kind")


def positions_not_read(how: str) -> ModelError:
    return not_read(f"its positions are scaled ({how}) in a way")


def not_read(what: str) -> ModelError:
    return ModelError(
        f"{what} that is not read from GGUF files here; give the model as a directory that transformers saved"
    )
