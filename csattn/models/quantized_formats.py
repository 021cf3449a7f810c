"""Finds the numbers, scales and zero points of one quantized matrix in each of the published layouts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.models.checkpoint_tensors import CheckpointTensors
from csattn.models.quantization import FP4_GROUP, WORD_BITS, Quantization
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles, lowest first: which of eight outputs each is of


@dataclass(frozen=True, slots=True)
class Matrix:
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


def scaled(
    files: CheckpointTensors,
    module: str,
    weight: Tensor,  # [num_out, num_in] float8 or int8
    scale: Tensor,  # [], [1], [num_out], [num_out, 1], [num_out, groups] or [blocks of outputs, of inputs] float32
    quantization: Quantization,
) -> Matrix:
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    num_out, num_in = weight.shape
    outs, ins = quantization.block or (1, quantization.group_size or num_in)
    if scale.numel() == 1:  # of the whole matrix
        outs, ins = num_out, num_in
    expected = -(-num_out // outs), -(-num_in // ins)
    _require_scales(module, weight, scale, expected)
    zeros = None
    if (name := f"{module}.weight_zero_point") in files and (stored := files.read(name).to(torch.int32)).any():
        zeros = stored.reshape(scale.shape).repeat_interleave(outs, 0)[:num_out]
    scales = scale.repeat_interleave(outs, 0)[:num_out]
    groups = torch.arange(num_in) // ins
    if (name := f"{module}.weight_g_idx") in files:
        groups = _groups_of(files, name, num_in, scale.shape[1], quantization)
    return Matrix(weight, 8, scales, zeros, groups)


def _require_scales(module: str, weight: Tensor, scale: Tensor, expected: tuple[int, int]) -> None:
    if tuple(scale.shape) != expected:
        raise ModelError(
            f"{module}'s weights of shape {tuple(weight.shape)} have scales of shape {tuple(scale.shape)} where "
            f"{expected} were expected; the checkpoint is damaged, or its quantization_config belongs to another"
        )


def packed(files: CheckpointTensors, module: str, quantization: Quantization) -> Matrix:
    """Read packed `compressed-tensors`: unsigned numbers with an offset of half their range, packed along inputs."""
    num_out, num_in = files.read(f"{module}.weight_shape").tolist()
    packed, scale, bits = files.read(f"{module}.weight_packed"), files.scale(module).float(), quantization.num_bits
    groups = _groups_of(files, f"{module}.weight_g_idx", num_in, scale.shape[1], quantization)
    zeros = torch.full_like(scale, 1 << (bits - 1), dtype=torch.int32)
    if not quantization.symmetric:
        stored = files.read(f"{module}.weight_zero_point")
        # older files have signed ones, one by one
        zeros = zeros + stored if stored.dtype == torch.int8 else _unpack(stored, bits, 0)[:num_out]
    return _checked(module, _unpack(packed, bits, 1)[:num_out, :num_in], bits, scale, zeros, groups)


def gptq(files: CheckpointTensors, module: str, quantization: Quantization) -> Matrix:
    """Read GPTQ: [num_in, num_out], packed along inputs; zero points are packed along outputs."""
    bits = quantization.num_bits
    numbers = _unpack(files.read(f"{module}.qweight"), bits, 0)
    scales = files.read_scales(f"{module}.scales").float()  # [groups, num_out]
    stored = _unpack(files.read(f"{module}.qzeros"), bits, 1)[:, : scales.shape[1]]
    zeros = (stored + quantization.zero_offset) & ((1 << bits) - 1)  # 0 is stored as the largest value
    groups = _groups_of(files, f"{module}.g_idx", len(numbers), len(scales), quantization)
    return _checked(module, numbers.T, bits, scales.T, zeros.T, groups)


def awq(files: CheckpointTensors, module: str, quantization: Quantization) -> Matrix:
    """Read AWQ: [num_in, num_out], packed along outputs."""
    if quantization.num_bits != 4:
        raise ModelError(f"its AWQ weights have {quantization.num_bits} bits; use a checkpoint with 4 bits")
    scales = files.read_scales(f"{module}.scales").float()  # [groups, num_out]
    numbers, zeros = (_unpack_awq(files.read(f"{module}.{part}")) for part in ("qweight", "qzeros"))
    groups = _groups_of(files, f"{module}.g_idx", len(numbers), len(scales), quantization)
    return _checked(module, numbers.T, 4, scales.T, zeros.T, groups)


def _checked(module: str, numbers: Tensor, bits: int, scales: Tensor, zeros: Tensor, groups: Tensor) -> Matrix:
    """Check shapes and return the matrix. numbers: [num_out, num_in] int32."""
    for what, there in (("scales", scales), ("zero points", zeros)):
        if there.shape != (len(numbers), scales.shape[1]):
            raise ModelError(
                f"{module}'s weights of shape {tuple(numbers.shape)} have {what} of shape {tuple(there.shape)} where "
                f"({len(numbers)}, {scales.shape[1]}) were expected; the checkpoint is damaged"
            )
    return Matrix(numbers.contiguous().to(torch.uint8), bits, scales.contiguous(), zeros.contiguous(), groups)


def mxfp4(
    blocks: Tensor,  # [experts, num_out, groups, 16] uint8: two numbers in each, the first in the low bits
    scales: Tensor,  # [experts, num_out, groups] uint8 or float8_e8m0fnu
) -> list[QuantizedWeight]:
    """Return the matrix [num_out, num_in] of each expert."""
    experts = []
    for block, scale in zip(blocks, scales.view(torch.uint8), strict=True):
        codes = torch.stack([block & 15, block >> 4], dim=-1).flatten(1)
        if scale.shape != block.shape[:2]:
            raise RuntimeError(f"scales of shape {tuple(scale.shape)} for blocks of shape {tuple(block.shape)}")
        experts.append(QuantizedWeight.pack("fp4", codes, scale, FP4_GROUP))
    return experts


def fp4(
    module: str,
    weight: Tensor,  # [num_out, num_in / 2] int8: two numbers in each, the first in the low bits
    scale: Tensor,  # [num_out, num_in / 32] float8_e8m0fnu
) -> QuantizedWeight:
    pairs = FP4_GROUP // 2
    num_out, num_pairs = weight.shape
    _require_scales(module, weight, scale, (num_out, num_pairs // pairs))
    blocks = weight.view(torch.uint8).view(1, num_out, -1, pairs)
    (matrix,) = mxfp4(blocks, scale[None])
    return matrix


def _unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words [_, _] into the unsigned numbers in them, lowest bits first, along one dimension."""
    if words.dtype != torch.int32:
        raise ModelError(
            f"its numbers are packed into {str(words.dtype).removeprefix('torch.')}, which csattn cannot read; use a "
            "checkpoint that packs them into int32"
        )
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack [rows, words] -> [rows, 8 * words], in the order of outputs."""
    nibbles = _unpack(words, 4, 1).reshape(len(words), -1, 8)
    in_order: Tensor = nibbles[:, :, torch.tensor(_AWQ_ORDER).argsort()].flatten(1)
    return in_order


def _groups_of(files: CheckpointTensors, name: str, num_in: int, num_groups: int, quantization: Quantization) -> Tensor:
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
