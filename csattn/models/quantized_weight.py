"""A quantized matrix of weights, 8 or 4 bits each, in the layout that products read and decode."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from csattn.errors import ConfigError

# float8_e4m3fn; 0 to 15 minus a zero point; float4_e2m1
WeightFormat = Literal["fp8", "int4", "fp4"]
Rounding = Literal["fp8", "int4"]  # formats that weights of 16 bits can be rounded to
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
RUN = 128  # inputs whose codes are packed together
CODES: dict[WeightFormat, int] = {"fp8": 2, "int4": 4, "fp4": 4}  # codes in a word of 16 bits
ZERO = 8  # the default zero point
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_EXPONENT_BIAS = 127
FP4_MAX_EXPONENT = 128  # the largest (biased) of a scale: a GPU multiplies codes by scales in bfloat16
_WORD_BITS, _GROUP_SIZE, _ZERO_BITS, _MAX_CODE = 16, 128, 15, 15
_CHUNK_WEIGHTS = 2**19  # weights to convert at a time


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [num_out, num_in] of (code value - zero point) * scale, with a scale and zero point per group of inputs.

    A row's inputs are divided into runs of RUN; the last run is padded. Word j of a run holds its inputs j, j + width,
    j + 2 * width, ..., from the lowest bits up, where width = RUN / codes in a word. The codes of a word thus belong to
    different parts of the run, and each part (width inputs) is decoded from all words of the run at once.
    """

    format: WeightFormat
    words: Tensor  # [num_out, runs * width] int16
    # [num_groups, num_out] float32; int4: the lowest four bits hold the zero point; fp4: uint8 exponents of two
    scales: Tensor
    num_in: int
    group_size: int  # 0: all inputs are one group
    has_zeros: bool  # whether any zero point differs from ZERO
    order: Tensor | None = None  # [num_in] int64: inputs sorted by group (act-order); None: they are

    @staticmethod
    def can_have(format: WeightFormat, group_size: int) -> bool:
        """Whether a group of this size consists of whole runs, or of whole parts of one run."""
        is_part = group_size >= RUN // CODES[format] and RUN % max(1, group_size) == 0
        return group_size % RUN == 0 or is_part

    @classmethod
    def pack(
        cls,
        format: WeightFormat,
        codes: Tensor,  # [num_out, num_in] uint8
        scales: Tensor,  # [num_out, num_groups] float32, or uint8 for fp4
        group_size: int,
        zeros: Tensor | None = None,  # [num_out, num_groups]; only for int4; None: all are ZERO
        order: Tensor | None = None,  # of the inputs, see the field
    ) -> "QuantizedWeight":
        """Pack codes into words, and zero points into scales."""
        assert cls.can_have(format, group_size), f"groups of {group_size} do not fit runs of {RUN}"
        (num_out, num_in), parts = codes.shape, CODES[format]
        words = _packed(functional.pad(codes, (0, -num_in % RUN)).view(num_out, -1, parts, RUN // parts))
        scales_and_zeros, has_zeros = scales.T.contiguous(), False
        if format == "int4":
            zero_of = torch.full_like(scales_and_zeros, ZERO) if zeros is None else zeros.T
            scales_and_zeros = (scales_and_zeros.view(torch.int32) & ~_ZERO_BITS | zero_of.int()).view(torch.float32)
            has_zeros = bool((zero_of != ZERO).any())
        return cls(format, words, scales_and_zeros, num_in, group_size, has_zeros, order)

    @classmethod
    def rounded(cls, weight: Tensor, format: Rounding) -> "QuantizedWeight":
        """Round weights to the nearest codes: fp8 with a scale for each row, int4 with one for each group of 128."""
        rows = _chunk_rows(weight.shape[1])
        whole = joined([cls._rounded(weight[i : i + rows], format) for i in range(0, len(weight), rows)])
        assert whole is not None, "they are of a kind"
        return whole

    @classmethod
    def _rounded(cls, weight: Tensor, format: Rounding) -> "QuantizedWeight":
        num_in = weight.shape[1]
        group_size = cls.group_size_of(format)
        grouped = _grouped(weight.float(), group_size)
        low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
        if format == "fp8":
            scale = _or_one(torch.maximum(-low, high) / torch.finfo(torch.float8_e4m3fn).max)
            codes, zeros = (grouped / scale).to(torch.float8_e4m3fn).view(torch.uint8), None
        else:  # codes span a group's least to greatest weight: clipping extremes costs more than it gains
            scale = _or_one(high / _MAX_CODE - low / _MAX_CODE)
            zero = (-low / scale).round()
            codes = (grouped / scale).round_().add_(zero).clamp_(0, _MAX_CODE).to(torch.uint8)
            zeros = zero[..., 0]
        return cls.pack(format, codes.flatten(1)[:, :num_in], scale[..., 0], group_size, zeros)

    @staticmethod
    def group_size_of(rounding: Rounding) -> int:
        return 0 if rounding == "fp8" else _GROUP_SIZE

    @staticmethod
    def size(format: WeightFormat, group_size: int, num_out: int, num_in: int) -> int:
        """Return the bytes of a matrix in this format."""
        word_bytes = -(-num_in // RUN) * (RUN // CODES[format]) * _WORD_BITS // 8
        return num_out * (word_bytes + -(-num_in // (group_size or num_in)) * (1 if format == "fp4" else 4))

    def __len__(self) -> int:
        return len(self.words)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    def outputs(self, which: slice | Tensor) -> "QuantizedWeight":
        """Return the matrix of only these rows."""
        return replace(self, words=self.words[which], scales=self.scales[:, which])

    def has_input_parts(self, num_parts: int) -> bool:
        """Whether so many equal slices of the inputs each consist of whole parts of runs and whole groups."""
        unit = max(RUN // CODES[self.format], self.group_size)
        return num_parts == 1 or (self.order is None and self.num_in % (num_parts * unit) == 0)

    def inputs(self, which: slice) -> "QuantizedWeight":
        """Return the matrix of only these inputs, copied: whole parts of runs and whole groups; not with an `order`."""
        first, stop, group_size, parts = which.start, which.stop, self.group_size, CODES[self.format]
        width = RUN // parts
        unit = max(width, group_size)
        assert self.order is None and first % unit == 0 and (stop % unit == 0 or stop == self.num_in)
        groups = slice(first // group_size, -(-stop // group_size)) if group_size else slice(None)
        words = self.words[:, first // RUN * width : -(-stop // RUN) * width]
        if first % RUN == 0:
            words = words.clone()
        else:
            rows, num_runs = _chunk_rows(stop - first), -(-(stop - first) // RUN)
            blocks = [words[i : i + rows] for i in range(0, len(words), rows)]
            words = torch.cat([_moved(block, first % RUN // width, num_runs, parts) for block in blocks])
        return replace(self, words=words, scales=self.scales[groups].clone(), num_in=stop - first)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        order = None if self.order is None else self.order.to(device)
        return replace(self, words=self.words.to(device), scales=self.scales.to(device), order=order)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decode the matrix, by way of float32, into a contiguous tensor [num_out, num_in] without padding."""
        whole = torch.empty(len(self), self.num_in, dtype=dtype, device=self.words.device)
        rows = _chunk_rows(self.num_in)
        for first in range(0, len(self), rows):
            whole[first : first + rows] = self.outputs(slice(first, first + rows))._decoded(dtype)
        return whole

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        parts = CODES[self.format]
        codes = _unpacked(self.words, parts).flatten(1)[:, : self.num_in]
        if self.format == "fp8":
            numbers, scales = codes.to(torch.uint8).view(torch.float8_e4m3fn).float(), self.scales.T
        elif self.format == "fp4":
            numbers = torch.tensor(FP4_VALUES, dtype=torch.float32, device=codes.device)[codes]
            scales = torch.exp2(self.scales.T.float() - FP4_EXPONENT_BIAS)
        else:
            bits_of = self.scales.T.contiguous().view(torch.int32)
            scales = (bits_of & ~_ZERO_BITS).view(torch.float32)
            numbers = codes.float()
        grouped = _grouped(numbers, self.group_size)
        if self.format == "int4":
            grouped = grouped - (bits_of & _ZERO_BITS).float()[..., None]
        decoded = (grouped * scales[..., None]).flatten(1)[:, : self.num_in].to(dtype)
        return decoded if self.order is None else decoded[:, self.order.argsort()]


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """The matrices of all experts of a layer, stacked."""

    # [num_experts * 2 * intermediate_size, hidden_size]: of each expert gates, then ups, or only what it has
    gate_up: QuantizedWeight
    down: QuantizedWeight  # [num_experts * hidden_size, intermediate_size]

    @classmethod
    def of(cls, gates_ups: Sequence[QuantizedWeight], downs: Sequence[QuantizedWeight]) -> "QuantizedExperts | None":
        """Stack matrices; gates_ups: by expert, gates, then ups. None if formats differ or inputs have an `order`."""
        gate_up, down = joined(gates_ups), joined(downs)
        if gate_up is None or down is None or gate_up.order is not None or down.order is not None:
            return None
        return cls(gate_up, down)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def to(self, device: torch.device | str) -> "QuantizedExperts":
        return QuantizedExperts(self.gate_up.to(device), self.down.to(device))


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Stack matrices into one; None if their format, width, group size or order of inputs differ."""
    first = parts[0]
    for part in parts:
        if (part.format, part.num_in, part.group_size) != (first.format, first.num_in, first.group_size):
            return None
        orders = [each.order for each in (first, part) if each.order is not None]
        if orders and (len(orders) == 1 or not torch.equal(*orders)):
            return None
    words, scales = torch.cat([part.words for part in parts]), torch.cat([part.scales for part in parts], dim=1)
    return replace(first, words=words, scales=scales, has_zeros=any(part.has_zeros for part in parts))


def _packed(codes: Tensor) -> Tensor:
    """Pack codes [num_out, num_runs, parts, width], any integers, into words [num_out, num_runs * width] int16."""
    num_out, num_runs, parts, width = codes.shape
    words = torch.zeros(num_out, num_runs, width, dtype=torch.int32, device=codes.device)
    for part in range(parts):
        words |= codes[:, :, part].int() << (_WORD_BITS // parts * part)
    return words.flatten(1).to(torch.int16)


def _unpacked(words: Tensor, parts: int) -> Tensor:
    """Invert `_packed`; int32."""
    bits = _WORD_BITS // parts
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)[:, None]
    return (words.int().view(len(words), -1, 1, RUN // parts) >> shifts) & ((1 << bits) - 1)


def _moved(words: Tensor, first_part: int, num_runs: int, parts: int) -> Tensor:
    """Repack words into num_runs runs that begin at part first_part of the first run."""
    of_parts = _unpacked(words, parts).flatten(1, 2)[:, first_part:]
    filled = functional.pad(of_parts, (0, 0, 0, -of_parts.shape[1] % parts))
    return _packed(filled.view(len(words), -1, parts, RUN // parts)[:, :num_runs])


def _chunk_rows(num_in: int) -> int:
    """Rows to convert at a time: their temporaries fit in caches. Pages of large ones are mapped anew each time."""
    return max(1, _CHUNK_WEIGHTS // num_in)


def rounding_named(name: str) -> Rounding:
    """Return the rounding of that name. Raises ConfigError if there is none."""
    for rounding in ROUNDINGS:
        if rounding == name:
            return rounding
    raise ConfigError(f"weights can be rounded to {' or '.join(ROUNDINGS)}, not to {name!r}")


def _or_one(scales: Tensor) -> Tensor:
    """Replace scales of 0, those of groups of zeros, by 1."""
    return torch.where(scales == 0, 1.0, scales)


def _grouped(numbers: Tensor, group_size: int) -> Tensor:
    """Reshape [num_out, num_in] to [num_out, num_groups, inputs of a group], the last group padded with zeros."""
    num_out, num_in = numbers.shape
    return functional.pad(numbers, (0, -num_in % (group_size or num_in))).view(num_out, -1, group_size or num_in)
