"""Read published checkpoints with quantized weights: decode them, and keep the quantized form if products can read it.

Supported values of `quant_method` in the `quantization_config`:

* `fp8`: float8_e4m3fn with a scale for each block of weights (DeepSeek-V3, Qwen3-FP8), which may be a power of two;
  with an `expert_dtype` of fp4, experts are pairs of 4-bit floats in int8, 32 floats to a scale (DeepSeek-V4);
* `fbgemm_fp8`: float8_e4m3fn with a scale for each output;
* `compressed-tensors`: float8 or int8 with a scale for each output, group or matrix, or numbers packed into int32;
* `gptq`: 2, 4 or 8 bits, packed along inputs, groups of which share a scale and a zero point;
* `awq`: 4 bits, packed along outputs in AWQ's order (version `gemm`);
* `mxfp4`: pairs of 4-bit floats, 32 of which share a power of two (gpt-oss's experts).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from csattn.cpu.heap import trim_heap
from csattn.errors import ModelError
from csattn.models.quantized_weight import FP4_MAX_EXPONENT, QuantizedWeight, WeightFormat, joined

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
_EXPERT_DTYPES = ("fp8", "fp4")  # of the method `fp8`
_WORD_BITS, _FP4_GROUP = 32, 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles, lowest first: which of eight outputs each is of
_BYTE_TYPES = (torch.float8_e4m3fn, torch.int8)
_SCALES = ("weight_scale_inv", "weight_scale", "scale")  # of FP8 and int8 weights; all are factors, `_inv` too
# tensors beside a quantized matrix, which a decoded one does not need; the last three scale activations
_PARTS = (
    *(*_SCALES, "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("qzeros", "scales", "g_idx", "input_scale", "input_zero_point", "output_scale"),
)
_OF_ROWS = ("q_scale", "k_scale", "v_scale", "kv_scale")  # of 8-bit attention, which csattn does not compute


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
        method = str(config.get("quant_method"))
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
        of_weights = config
        if method == "compressed-tensors":
            groups = list((config.get("config_groups") or {}).values())
            if len({json.dumps(group.get("weights"), sort_keys=True) for group in groups}) != 1:
                raise ModelError(
                    "its layers are quantized in several ways, and csattn reads only one; use another checkpoint"
                )
            of_weights = groups[0]["weights"] or {}
        if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
            raise ModelError(
                f"its AWQ weights are laid out as {config['version']!r}; use a checkpoint of version 'gemm'"
            )
        num_bits = int(of_weights.get("num_bits", of_weights.get("bits", 8)))
        if _WORD_BITS % num_bits:
            raise ModelError(
                f"its weights have {num_bits} bits, which do not fill a word evenly; use a checkpoint with 2, 4 "
                "or 8 bits"
            )
        if of_weights.get("type") == "float" and num_bits != 8:
            raise ModelError(
                f"its weights are floats of {num_bits} bits ({config.get('format')}), which csattn cannot read in "
                "compressed-tensors; use a checkpoint in FP8 or of integers, or in 16 bits"
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
            is_float=of_weights.get("type") == "float",
            in_order=not (config.get("desc_act") or of_weights.get("actorder") == "group"),
            fp4_experts=method == "mxfp4" or expert_dtype == "fp4",
        )

    @property
    def expert_format(self) -> tuple[WeightFormat, int] | None:
        """Like `linear_format`, for the matrices of experts."""
        if self.fp4_experts:
            return "fp4", _FP4_GROUP
        return self.linear_format if self.in_order else None

    @property
    def linear_format(self) -> tuple[WeightFormat, int] | None:
        """Format and group size in which products read quantized linear layers; None: only decoded ones are kept."""
        is_fp8 = self.method in ("fp8", "fbgemm_fp8") or (self.num_bits == 8 and self.is_float)
        format: WeightFormat = "fp8" if is_fp8 else "int4"
        group_size = (self.block[1] if self.block else self.group_size) or 0
        has_codes = is_fp8 or (self.num_bits == 4 and self.method in ("gptq", "awq", "compressed-tensors"))
        return (format, group_size) if has_codes and QuantizedWeight.can_have(format, group_size) else None


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A decodable matrix: (numbers - zeros) * scales, with the zeros and scales of each input's group."""

    numbers: Tensor  # [num_out, num_in] float8, int8, or uint8 with values of `num_bits`
    num_bits: int
    scales: Tensor  # [num_out, num_groups] float32
    zeros: Tensor | None  # [num_out, num_groups] int32
    groups: Tensor  # [num_in]: the group of each input

    def decoded(self) -> Tensor:
        """Return the matrix in float32."""
        numbers = self.numbers.float()
        if self.zeros is not None:
            numbers = numbers - self.zeros.float()[:, self.groups]
        return numbers * self.scales[:, self.groups]

    def to_quantized(self) -> QuantizedWeight | None:
        """Return the matrix in the layout that products read; None if they cannot."""
        is_fp8 = self.numbers.dtype == torch.float8_e4m3fn
        if not is_fp8 and (self.numbers.dtype != torch.uint8 or self.num_bits != 4):
            return None
        codes = self.numbers.view(torch.uint8)
        if is_fp8 and bool(((codes & 0x7F) == 0x7F).any()):  # NaN, which products of quantized weights do not handle
            return None
        format: WeightFormat = "fp8" if is_fp8 else "int4"
        num_in, num_groups = len(self.groups), self.scales.shape[1]
        order = self.groups.argsort(stable=True)
        group_size = int((self.groups == 0).sum()) if num_groups > 1 else 0
        if not QuantizedWeight.can_have(format, group_size):
            return None
        if group_size and not torch.equal(self.groups[order], torch.arange(num_in) // group_size):
            return None
        if torch.equal(order, torch.arange(num_in)):
            return QuantizedWeight.pack(format, codes, self.scales, group_size, self.zeros)
        return QuantizedWeight.pack(format, codes[:, order], self.scales, group_size, self.zeros, order)


def read_state(
    folder: Path,  # with safetensors files
    quantization_config: Mapping[str, Any],
    dtype: torch.dtype,
    named: Callable[[str], str | None] = str,  # the model's name of a tensor; None: it has none
    store_decoded: Callable[[Tensor], Tensor]
    | None = None,  # stores decoded tensors with a quantized form; None: memory
) -> tuple[dict[str, Tensor], dict[str, QuantizedWeight]]:
    """Return a checkpoint's tensors by their names in the model, and the quantized form of those that products read.

    Decoded tensors are in `dtype`. The quantized form of experts in one tensor is stacked.
    Raises ModelError if a tensor is missing, does not have the shape that its scales imply, or cannot be read.
    """
    quantization, files = Quantization.read(quantization_config), _Tensors(folder)
    state: dict[str, Tensor] = {}
    quantized: dict[str, QuantizedWeight] = {}
    mover = None if store_decoded is None else _DecodedMover(state, store_decoded)
    for name in files.names:
        if _is_part(files, name) or named(name) is None:
            continue
        try:
            whole, tensor, quantized_form = _decoded(files, name, quantization, dtype)
        except (RuntimeError, IndexError) as error:  # from torch, for shapes that do not fit
            whole, what = name.removesuffix("_blocks"), str(error).splitlines()[0]
            raise ModelError(f"{whole} cannot be decoded: {what}; the checkpoint is damaged") from error
        place = named(whole) or whole
        state[place] = tensor
        if quantized_form is not None:
            quantized[place] = quantized_form
            if mover is not None:
                mover.put(place)
    if mover is not None:
        mover.end()
    return state, quantized


def _is_part(files: "_Tensors", name: str) -> bool:
    """Whether a tensor is not read on its own: it is part of another, or is not needed."""
    module, _, last = name.rpartition(".")
    if last in _PARTS and any(f"{module}.{kind}" in files for kind in ("weight", "qweight", "weight_packed")):
        return True
    return last in _OF_ROWS or (name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in files)


def _decoded(
    files: "_Tensors", name: str, quantization: Quantization, dtype: torch.dtype
) -> tuple[str, Tensor, QuantizedWeight | None]:
    """Return the name of the whole that a tensor is part of, its values, and its quantized form, if products read it.

    Values are decoded to `dtype`; those of a tensor that is not quantized are as stored.
    """
    module = name.rpartition(".")[0]
    if name.endswith("_blocks"):
        whole = name.removesuffix("_blocks")
        experts = _mxfp4(files.read(name), files.read(f"{whole}_scales"))
        decoded = torch.stack([expert.decoded(dtype).T for expert in experts])  # [experts, num_in, num_out]
        return whole, decoded, _if_readable(joined(experts))
    if quantization.method == "fp8" and files.dtype(name) == torch.int8:
        pairs = _fp4(module, files.read(name), files.scale(module))
        return name, pairs.decoded(dtype), _if_readable(pairs)
    if (matrix := _matrix(files, name, quantization)) is not None:
        quantized = matrix.to_quantized()
        return (
            f"{module}.weight",
            matrix.decoded().to(dtype) if quantized is None else quantized.decoded(dtype),
            quantized,
        )
    tensor = files.read(name)
    if tensor.dtype == torch.float8_e8m0fnu:
        raise ModelError(f"the checkpoint has the scales {name} but not their weights; download all of it")
    if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
        raise ModelError(
            f"its {name} is in {str(tensor.dtype).removeprefix('torch.')}, a format that csattn does not read; use a "
            "checkpoint in float8_e4m3fn or int8"
        )
    return name, tensor, None


def _if_readable(weight: QuantizedWeight | None) -> QuantizedWeight | None:
    """Return a matrix of 4-bit floats; None if a scale is too large for products to read."""
    return None if weight is None or int(weight.scales.max()) > FP4_MAX_EXPONENT else weight


class _DecodedMover:
    """Passes decoded tensors to `store_decoded`: a layer's experts together, as each call may hold a file open."""

    def __init__(self, state: dict[str, Tensor], store_decoded: Callable[[Tensor], Tensor]) -> None:
        self._state, self._store_decoded = state, store_decoded
        self._block, self._places = "", list[str]()  # of experts not moved yet

    def put(self, place: str) -> None:
        """Move the tensor of this name. Experts of a block must follow each other; they move when the block ends."""
        block, is_of_experts, _ = place.partition(".experts.")
        if not is_of_experts:
            self._state[place] = self._store_decoded(self._state[place])
            return
        if block != self._block:
            self.end()
        self._block = block
        self._places.append(place)

    def end(self) -> None:
        """Move the experts that were put and not moved yet."""
        if not self._places:
            return
        tensors = [self._state[place] for place in self._places]
        together = self._store_decoded(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = torch.split(together, [tensor.numel() for tensor in tensors])
        for place, tensor, part in zip(self._places, tensors, parts, strict=True):
            self._state[place] = part.view(tensor.shape)
        self._places.clear()
        del tensors, tensor
        trim_heap()


def _matrix(files: "_Tensors", name: str, quantization: Quantization) -> _Matrix | None:
    """Return the matrix that a tensor is part of; None if it is not quantized."""
    module, _, last = name.rpartition(".")
    if last == "qweight":
        return _awq(files, module, quantization) if quantization.method == "awq" else _gptq(files, module, quantization)
    if last == "weight_packed":
        return _packed(files, module, quantization)
    if files.dtype(name) in _BYTE_TYPES:
        return _scaled(files, module, files.read(name), files.scale(module).float(), quantization)
    return None


def _files_of(folder: Path) -> list[Path]:
    """Find the files as `transformers` does: others beside them may have the same weights in another layout."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


class _Tensors:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path):
        self._file_of: dict[str, Any] = {}
        paths = _files_of(folder)
        if not paths:
            raise ModelError(f"{folder} has no safetensors files, and quantized weights are read only from these")
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read as safetensors ({error}); download it again") from error
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

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor of FP8 or int8; None for other dtypes."""
        return {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}.get(self._file_of[name].get_slice(name).get_dtype())

    def scale(self, module: str) -> Tensor:
        """Return the scales of a module's FP8 or int8 weights, as stored."""
        name = next((x for part in _SCALES if (x := f"{module}.{part}") in self), None)
        if name is None:
            raise ModelError(
                f"the checkpoint has no scales of {module}.weight ({', '.join(_SCALES)}), without which it cannot be "
                "decoded; download all of it"
            )
        scale = self.read(name)
        if scale.float().isnan().any():
            raise ModelError(f"{name} has scales that are NaN; download the checkpoint again")
        return scale


def _scaled(
    files: _Tensors,
    module: str,
    weight: Tensor,  # [num_out, num_in] float8 or int8
    scale: Tensor,  # [], [1], [num_out], [num_out, 1], [num_out, groups] or [blocks of outputs, of inputs] float32
    quantization: Quantization,
) -> _Matrix:
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    num_out, num_in = weight.shape
    outs, ins = quantization.block or (1, quantization.group_size or num_in)
    outs, ins = (num_out if scale.shape[0] == 1 else outs), (num_in if scale.shape[1] == 1 else ins)
    expected = -(-num_out // outs), -(-num_in // ins)
    _require_scales(module, weight, scale, expected)
    zeros = None
    if (name := f"{module}.weight_zero_point") in files and (stored := files.read(name).to(torch.int32)).any():
        zeros = stored.reshape(scale.shape).repeat_interleave(outs, 0)[:num_out]
    scales = scale.repeat_interleave(outs, 0)[:num_out]
    return _Matrix(weight, 8, scales, zeros, torch.arange(num_in) // ins)


def _require_scales(module: str, weight: Tensor, scale: Tensor, expected: tuple[int, int]) -> None:
    if tuple(scale.shape) != expected:
        raise ModelError(
            f"{module}'s weights of shape {tuple(weight.shape)} have scales of shape {tuple(scale.shape)} where "
            f"{expected} were expected; the checkpoint is damaged, or its quantization_config belongs to another"
        )


def _packed(files: _Tensors, module: str, quantization: Quantization) -> _Matrix:
    """Read packed `compressed-tensors`: unsigned numbers with an offset of half their range, packed along inputs."""
    num_out, num_in = files.read(f"{module}.weight_shape").tolist()
    packed, scale, bits = files.read(f"{module}.weight_packed"), files.scale(module).float(), quantization.num_bits
    groups = _groups_of(files, f"{module}.weight_g_idx", num_in, scale.shape[1], quantization)
    zeros = torch.full_like(scale, 1 << (bits - 1), dtype=torch.int32)
    if not quantization.symmetric:
        zeros = _unpack(files.read(f"{module}.weight_zero_point"), bits, 0)[:num_out]
    return _checked(module, _unpack(packed, bits, 1)[:num_out, :num_in], bits, scale, zeros, groups)


def _gptq(files: _Tensors, module: str, quantization: Quantization) -> _Matrix:
    """Read GPTQ: [num_in, num_out], packed along inputs; zero points are packed along outputs."""
    bits = quantization.num_bits
    numbers = _unpack(files.read(f"{module}.qweight"), bits, 0)
    scales = files.read(f"{module}.scales").float()  # [groups, num_out]
    stored = _unpack(files.read(f"{module}.qzeros"), bits, 1)[:, : scales.shape[1]]
    zeros = (stored + quantization.zero_offset) & ((1 << bits) - 1)  # 0 is stored as the largest value
    groups = _groups_of(files, f"{module}.g_idx", len(numbers), len(scales), quantization)
    return _checked(module, numbers.T, bits, scales.T, zeros.T, groups)


def _awq(files: _Tensors, module: str, quantization: Quantization) -> _Matrix:
    """Read AWQ: [num_in, num_out], packed along outputs."""
    if quantization.num_bits != 4:
        raise ModelError(f"its AWQ weights have {quantization.num_bits} bits; use a checkpoint with 4 bits")
    scales = files.read(f"{module}.scales").float()  # [groups, num_out]
    numbers, zeros = (_unpack_awq(files.read(f"{module}.{part}")) for part in ("qweight", "qzeros"))
    groups = _groups_of(files, f"{module}.g_idx", len(numbers), len(scales), quantization)
    return _checked(module, numbers.T, 4, scales.T, zeros.T, groups)


def _checked(module: str, numbers: Tensor, bits: int, scales: Tensor, zeros: Tensor, groups: Tensor) -> _Matrix:
    """Check shapes and return the matrix. numbers: [num_out, num_in] int32."""
    for what, there in (("scales", scales), ("zero points", zeros)):
        if there.shape != (len(numbers), scales.shape[1]):
            raise ModelError(
                f"{module}'s weights of shape {tuple(numbers.shape)} have {what} of shape {tuple(there.shape)} where "
                f"({len(numbers)}, {scales.shape[1]}) were expected; the checkpoint is damaged"
            )
    return _Matrix(numbers.contiguous().to(torch.uint8), bits, scales.contiguous(), zeros.contiguous(), groups)


def _mxfp4(
    blocks: Tensor,  # [experts, num_out, groups, 16] uint8: two numbers in each, the first in the low bits
    scales: Tensor,  # [experts, num_out, groups] uint8
) -> list[QuantizedWeight]:
    """Return the matrix [num_out, num_in] of each expert."""
    experts = []
    for block, scale in zip(blocks, scales, strict=True):
        codes = torch.stack([block & 15, block >> 4], dim=-1).flatten(1)
        if scale.shape != block.shape[:2]:
            raise RuntimeError(f"scales of shape {tuple(scale.shape)} for blocks of shape {tuple(block.shape)}")
        experts.append(QuantizedWeight.pack("fp4", codes, scale, _FP4_GROUP))
    return experts


def _fp4(
    module: str,
    weight: Tensor,  # [num_out, num_in / 2] int8: two numbers in each, the first in the low bits
    scale: Tensor,  # [num_out, num_in / 32] float8_e8m0fnu
) -> QuantizedWeight:
    pairs = _FP4_GROUP // 2
    num_out, num_pairs = weight.shape
    _require_scales(module, weight, scale, (num_out, num_pairs // pairs))
    blocks = weight.view(torch.uint8).view(1, num_out, -1, pairs)
    (matrix,) = _mxfp4(blocks, scale.view(torch.uint8)[None])
    return matrix


def _unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words [_, _] into the unsigned numbers in them, lowest bits first, along one dimension."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack [rows, words] -> [rows, 8 * words], in the order of outputs."""
    nibbles = _unpack(words, 4, 1).reshape(len(words), -1, 8)
    in_order: Tensor = nibbles[:, :, torch.tensor(_AWQ_ORDER).argsort()].flatten(1)
    return in_order


def _groups_of(files: _Tensors, name: str, num_in: int, num_groups: int, quantization: Quantization) -> Tensor:
    """Return the group of each input [num_in]: as stored, or else neighbours; the last group may have fewer."""
    if name in files:
        groups = files.read(name).long()
        if groups.shape != (num_in,) or groups.min() < 0 or groups.max() >= num_groups:
            raise ModelError(
                f"{name} does not name one of {num_groups} groups for each of {num_in} inputs; it is damaged"
            )
        return groups
    size = quantization.group_size or -(-num_in // num_groups)  # a config may leave it out
    if (wanted := -(-num_in // size)) != num_groups:
        raise ModelError(
            f"{name.rpartition('.')[0]} has {num_groups} groups where {num_in} inputs need {wanted} of {size}; the "
            "checkpoint is damaged, or its quantization_config belongs to another"
        )
    return torch.arange(num_in) // size
