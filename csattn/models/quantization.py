"""How the weights of published checkpoints are quantized.

Supported values of `quant_method` in the `quantization_config`:

* `fp8`: float8_e4m3fn with a scale for each block of weights (DeepSeek-V3, Qwen3-FP8), which may be a power of two;
  with an `expert_dtype` of fp4, experts are pairs of 4-bit floats in int8, 32 floats to a scale (DeepSeek-V4);
* `fbgemm_fp8`: float8_e4m3fn with a scale for each output;
* `compressed-tensors`: float8 or int8 with a scale for each output, group or matrix, or numbers packed into int32;
* `gptq`: 2, 4 or 8 bits, packed along inputs, groups of which share a scale and a zero point (`gptq` or `gptq_v2`);
* `awq`: 4 bits, packed along outputs in AWQ's order (version `gemm`);
* `mxfp4`: pairs of 4-bit floats, 32 of which share a power of two (gpt-oss's experts).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from csattn.errors import ModelError
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
_EXPERT_DTYPES = ("fp8", "fp4")  # of the method `fp8`
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # that are read, first the one that configs leave out
WORD_BITS, FP4_GROUP = 32, 32  # of packed numbers; of floats of 4 bits that share a scale


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's weights are quantized, by its `quantization_config`."""

    method: str
    num_bits: int
    group_size: int | None  # inputs that share a scale; None: all
    block: tuple[int, int] | None  # outputs and inputs that share a scale
    zero_offset: int  # to add to stored zero points
    symmetric: bool
    is_float: bool
    in_order: bool  # whether groups are of neighbouring inputs (no act-order)
    fp4_experts: bool  # whether experts are 4-bit floats, as in `mxfp4`

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Quantization":
        """Read a `quantization_config`. Raises ModelError if it is unsupported."""
        if "quant_method" not in config:
            raise ModelError(
                "its quantization_config has no quant_method, without which its weights cannot be decoded; add it, one "
                f"of {', '.join(METHODS)}, or use a checkpoint in 16 bits"
            )
        method = str(config["quant_method"])
        if method not in METHODS:
            raise ModelError(
                f"its weights are quantized by {method!r}, which csattn cannot read; use a checkpoint in "
                f"{', '.join(METHODS)}, or in 16 bits"
            )
        if config.get("transform_config"):
            raise ModelError(
                "its weights are rotated (transform_config), which csattn does not undo; use a checkpoint "
                "without rotation"
            )
        expert_dtype = (method == "fp8" and config.get("expert_dtype")) or "fp8"  # other methods keep DeepSeek's field
        if expert_dtype not in _EXPERT_DTYPES:
            raise ModelError(
                f"its experts are in {expert_dtype!r} (expert_dtype), which csattn cannot read; use a checkpoint with "
                f"experts in {' or '.join(_EXPERT_DTYPES)}, or in 16 bits"
            )
        of_weights = config if method != "compressed-tensors" else _of_weights(config.get("config_groups") or {})
        num_bits = _whole("bits", of_weights.get("num_bits", of_weights.get("bits", 8)))
        if num_bits not in (1, 2, 4, 8):
            raise ModelError(
                f"its weights have {num_bits} bits, which do not fill a word evenly; use a checkpoint with 2, 4 "
                "or 8 bits"
            )
        of_modules = (config.get("dynamic") or {}).values() if method == "gptq" else ()
        if any(isinstance(of, dict) and of.get("bits", num_bits) != num_bits for of in of_modules):
            raise _several_ways()
        if of_weights.get("type") == "float" and num_bits != 8:
            raise ModelError(
                f"its weights are floats of {num_bits} bits ({config.get('format')}), which csattn cannot read in "
                "compressed-tensors; use a checkpoint in FP8 or of integers, or in 16 bits"
            )
        group_size = _whole("group_size", of_weights.get("group_size") or -1)
        return cls(
            method=method,
            num_bits=num_bits,
            group_size=group_size if group_size > 0 else None,
            block=_block(config.get("weight_block_size") or of_weights.get("block_structure")),
            zero_offset=int(_layout(method, config) == "gptq"),
            symmetric=bool(of_weights.get("symmetric", of_weights.get("sym", True))),
            is_float=of_weights.get("type") == "float",
            in_order=not (config.get("desc_act") or of_weights.get("actorder") in ("group", "dynamic")),
            fp4_experts=method == "mxfp4" or expert_dtype == "fp4",
        )

    @property
    def expert_format(self) -> tuple[WeightFormat, int] | None:
        """Like `linear_format`, for the matrices of experts."""
        if self.fp4_experts:
            return "fp4", FP4_GROUP
        return self.linear_format if self.in_order else None

    @property
    def linear_format(self) -> tuple[WeightFormat, int] | None:
        """Format and group size in which products read quantized linear layers; None: only decoded ones are kept."""
        is_fp8 = self.method in ("fp8", "fbgemm_fp8") or (self.num_bits == 8 and self.is_float)
        format: WeightFormat = "fp8" if is_fp8 else "int4"
        group_size = (self.block[1] if self.block else self.group_size) or 0
        has_codes = is_fp8 or (self.num_bits == 4 and self.method in ("gptq", "awq", "compressed-tensors"))
        return (format, group_size) if has_codes and QuantizedWeight.can_have(format, group_size) else None


def _of_weights(groups: Any) -> Mapping[str, Any]:
    """Return how compressed-tensors quantize weights; nothing if they are not: then only activations or KV are."""
    if not isinstance(groups, dict) or not all(
        isinstance(of, dict) and isinstance(of.get("weights") or {}, dict) for of in groups.values()
    ):
        raise _unread("config_groups", groups, "an object for each group")
    found = {json.dumps(weights, sort_keys=True): weights for of in groups.values() if (weights := of.get("weights"))}
    if len(found) > 1:
        raise _several_ways()
    return next(iter(found.values()), {})


def _several_ways() -> ModelError:
    return ModelError("its layers are quantized in several ways, and csattn reads only one; use another checkpoint")


def _layout(method: str, config: Mapping[str, Any]) -> str:
    """Return the layout of GPTQ or AWQ, which libraries name in different fields. Raises ModelError for others."""
    if method not in _LAYOUTS:
        return method
    fields = ("version", "checkpoint_format", "format") if method == "awq" else ("checkpoint_format", "format")
    told = (config.get(name) for name in fields)
    layout = next((str(name).lower() for name in told if name), _LAYOUTS[method][0])
    if layout not in _LAYOUTS[method]:
        raise ModelError(
            f"its {method.upper()} weights are laid out as {layout!r}, which csattn cannot read; use a checkpoint of "
            f"version {' or '.join(_LAYOUTS[method])}"
        )
    return layout


def _block(sizes: Any) -> tuple[int, int] | None:
    """Read the size of blocks; older compressed-tensors write 128x128."""
    read = sizes.split("x") if isinstance(sizes, str) else sizes or None
    try:
        block = None if read is None else (int(read[0]), int(read[1]))
    except (TypeError, ValueError, LookupError):
        raise _unread("blocks of", sizes, "two whole numbers") from None
    if block is not None and min(block) < 1:
        raise _unread("blocks of", sizes, "two positive numbers")
    return block


def _whole(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise _unread(name, value, "a whole number") from None


def _unread(name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(f"its quantization_config has {name} {value!r}, wanted {wanted}; use its published config")
