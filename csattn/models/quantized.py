"""Published checkpoints whose weights are in 8 or 4 bits, decoded once, as they are loaded.

What a step reads is then as large as a 16-bit checkpoint's. By `quant_method` of the `quantization_config`:

* `fp8`: float8_e4m3fn with a scale for each block of weights (DeepSeek-V3, Qwen3-FP8);
* `fbgemm_fp8`: the same with a scale for each output;
* `compressed-tensors`: float8 or int8 with a scale for each output, group or matrix, or numbers packed into int32;
* `gptq`: 2, 4 or 8 bits, packed along inputs, groups of which share a scale and a zero point;
* `awq`: 4 bits, packed along outputs in AWQ's order (version `gemm`);
* `mxfp4`: pairs of 4-bit floats, 32 of which share a power of two (gpt-oss's experts).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from csattn.errors import ModelError

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that each of a word's nibbles belongs to
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MXFP4_EXPONENT_BIAS = 127
_BYTE_TYPES = (torch.float8_e4m3fn, torch.int8)
# what a quantized matrix has besides, and a decoded one does without; the last few scale activations or KV
_PARTS = (
    *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("qzeros", "scales", "g_idx", "input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale"),
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says of how weights were written."""

    method: str
    num_bits: int
    group_size: int | None  # inputs that share a scale; None: all
    block: tuple[int, int] | None  # outputs and inputs that share one
    zero_offset: int  # what is missing from zero points as they are stored
    symmetric: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Quantization":
        """config: a `quantization_config`. Raises ModelError where nothing here decodes it."""
        method = str(config.get("quant_method"))
        if method not in METHODS:
            raise ModelError(
                f"its weights are quantized by {method!r}, of which nothing here can read weights; "
                f"take a checkpoint in {', '.join(METHODS)}, or in 16 bits"
            )
        of_weights = config
        if method == "compressed-tensors":
            groups = list((config.get("config_groups") or {}).values())
            if len({json.dumps(group.get("weights"), sort_keys=True) for group in groups}) != 1:
                raise ModelError(
                    "its layers are quantized in several ways, of which one is read; take another checkpoint"
                )
            of_weights = groups[0]["weights"] or {}
        if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
            raise ModelError(
                f"its AWQ weights are laid out as {config['version']!r}; take a checkpoint of version 'gemm'"
            )
        num_bits = int(of_weights.get("num_bits", of_weights.get("bits", 8)))
        if _WORD_BITS % num_bits:
            raise ModelError(
                f"its weights have {num_bits} bits, which do not divide a word; take one of 2, 4 or 8 bits"
            )
        group_size = int(of_weights.get("group_size") or -1)
        block = config.get("weight_block_size") or of_weights.get("block_structure")
        return cls(
            method=method,
            num_bits=num_bits,
            group_size=group_size if group_size > 0 else None,
            block=(int(block[0]), int(block[1])) if block else None,
            zero_offset=int(method == "gptq" and config.get("checkpoint_format", "gptq") != "gptq_v2"),
            symmetric=bool(of_weights.get("symmetric", of_weights.get("sym", True))),
        )


def decoded_state(
    folder: Path,  # with safetensors files
    quantization_config: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """All of a checkpoint's tensors, by the names that they have where nothing is quantized, in `dtype`.

    Raises ModelError where a tensor is missing, has another shape than its scales say, or cannot be read.
    """
    quantization, files = Quantization.read(quantization_config), _Tensors(folder)
    state: dict[str, Tensor] = {}
    for name in files.names:
        module, _, last = name.rpartition(".")
        if last in _PARTS and any(f"{module}.{kind}" in files for kind in ("weight", "qweight", "weight_packed")):
            continue
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in files:
            continue
        try:
            if last == "qweight":
                decode = _decode_awq if quantization.method == "awq" else _decode_gptq
                name, tensor = f"{module}.weight", decode(files, module, quantization)
            elif last == "weight_packed":
                name, tensor = f"{module}.weight", _decode_packed(files, module, quantization)
            elif name.endswith("_blocks"):
                name = name.removesuffix("_blocks")
                tensor = _decode_mxfp4(files.read(f"{name}_blocks"), files.read(f"{name}_scales"), dtype)
            else:
                tensor = files.read(name)
                if tensor.dtype in _BYTE_TYPES:
                    tensor = _decode_scaled(tensor, files.scale(module), quantization)
        except RuntimeError as error:  # torch's, of shapes that do not fit
            raise ModelError(
                f"{name} cannot be decoded: {str(error).splitlines()[0]}; the checkpoint is damaged"
            ) from error
        state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return state


class _Tensors:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path):
        self._file_of: dict[str, Any] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{folder} has no safetensors files, of which alone quantized weights are read")
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read as safetensors ({error}); fetch it again") from error
            self._file_of |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        if name not in self:
            raise ModelError(f"the checkpoint has no {name}, without which its weights cannot be decoded")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def scale(self, module: str) -> Tensor:
        """What a byte of its weights is multiplied with."""
        inverse = f"{module}.weight_scale_inv"  # named for what it does to activations: weights are multiplied with it
        return self.read(inverse if inverse in self else f"{module}.weight_scale").float()


def _decode_scaled(
    weight: Tensor,  # [num_out, num_in] of a byte each
    scale: Tensor,  # [], [1], [num_out], [num_out, 1], [num_out, groups] or [blocks of outputs, of inputs] float32
    quantization: Quantization,
) -> Tensor:
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    num_out, num_in = weight.shape
    outs, ins = quantization.block or (1, quantization.group_size or num_in)
    outs, ins = (num_out if scale.shape[0] == 1 else outs), (num_in if scale.shape[1] == 1 else ins)
    expected = -(-num_out // outs), -(-num_in // ins)
    if tuple(scale.shape) != expected:
        raise ModelError(
            f"weights of shape {tuple(weight.shape)} have scales of shape {tuple(scale.shape)} where {expected} were "
            "expected; the checkpoint is damaged, or its quantization_config is another's"
        )
    spread = scale.repeat_interleave(outs, 0)[:num_out].repeat_interleave(ins, 1)[:, :num_in]
    return weight.float() * spread


def _decode_packed(files: _Tensors, module: str, quantization: Quantization) -> Tensor:
    """`compressed-tensors`: unsigned numbers, by half their range more than they are, packed along inputs."""
    num_out, num_in = files.read(f"{module}.weight_shape").tolist()
    packed, scale, bits = files.read(f"{module}.weight_packed"), files.scale(module), quantization.num_bits
    middle = 1 << (bits - 1)
    q = _unpack(packed, bits, 1)[:, :num_in] - middle
    groups = _groups_of(files, f"{module}.weight_g_idx", num_in, scale.shape[1])
    zeros = torch.zeros_like(scale)
    if not quantization.symmetric:
        zeros = (_unpack(files.read(f"{module}.weight_zero_point"), bits, 0)[:num_out] - middle).float()
    return (q.float() - zeros[:, groups]) * scale[:, groups]


def _decode_gptq(files: _Tensors, module: str, quantization: Quantization) -> Tensor:
    """[num_in, num_out], packed along inputs; zero points along outputs."""
    bits = quantization.num_bits
    q = _unpack(files.read(f"{module}.qweight"), bits, 0)
    scales = files.read(f"{module}.scales").float()  # [groups, num_out]
    stored = _unpack(files.read(f"{module}.qzeros"), bits, 1)[:, : scales.shape[1]]
    zeros = (stored + quantization.zero_offset) & ((1 << bits) - 1)  # 0 is stored as the largest
    groups = _groups_of(files, f"{module}.g_idx", len(q), len(scales))
    return ((q.float() - zeros[groups].float()) * scales[groups]).T.contiguous()


def _decode_awq(files: _Tensors, module: str, quantization: Quantization) -> Tensor:
    """[num_in, num_out], packed along outputs."""
    if quantization.num_bits != 4:
        raise ModelError(f"its AWQ weights have {quantization.num_bits} bits; take a checkpoint of 4")
    scales = files.read(f"{module}.scales").float()  # [groups, num_out]
    q, zeros = (_unpack_awq(files.read(f"{module}.{part}")) for part in ("qweight", "qzeros"))
    groups = _groups_of(files, f"{module}.g_idx", len(q), len(scales))
    return ((q.float() - zeros[groups].float()) * scales[groups]).T.contiguous()


def _decode_mxfp4(
    blocks: Tensor,  # [experts, num_out, groups, 16] uint8: of two numbers the first is the lower half
    scales: Tensor,  # [experts, num_out, groups] uint8
    dtype: torch.dtype,
) -> Tensor:
    """[experts, num_in, num_out]"""
    values, experts = torch.tensor(_MXFP4_VALUES), []
    for block, scale in zip(blocks, scales, strict=True):
        pairs = torch.stack([values[(block & 15).int()], values[(block >> 4).int()]], dim=-1)
        powers = torch.exp2(scale.float() - _MXFP4_EXPONENT_BIAS)
        experts.append((pairs.flatten(-2) * powers[..., None]).flatten(-2).T.to(dtype))
    return torch.stack(experts)


def _unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """From int32 to the unsigned numbers in it, the lowest bits first, along a dimension of two."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


def _unpack_awq(words: Tensor) -> Tensor:
    """[rows, words] -> [rows, 8 * words], in the outputs' order."""
    nibbles = _unpack(words, 4, 1).reshape(len(words), -1, 8)
    in_order: Tensor = nibbles[:, :, torch.tensor(_AWQ_ORDER).argsort()].flatten(1)
    return in_order


def _groups_of(files: _Tensors, name: str, num_in: int, num_groups: int) -> Tensor:
    """The group of each input [num_in]: as the checkpoint says, or neighbours together."""
    if name in files:
        groups = files.read(name).long()
        if groups.shape != (num_in,) or groups.min() < 0 or groups.max() >= num_groups:
            raise ModelError(
                f"{name} does not name one of {num_groups} groups for each of {num_in} inputs; it is damaged"
            )
        return groups
    return torch.arange(num_in) // -(-num_in // num_groups)
