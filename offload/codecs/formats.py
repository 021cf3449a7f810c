"""The formats that keys and values can be kept in: their names and sizes.

This module imports little on purpose: settings and the command line read names here without waiting for numba.
"""

from dataclasses import dataclass
from typing import Self

from offload.errors import CodecError

BLOCK_LEN = 32  # values that share a scale in Q8_0 and Q4_0
Q8_0_BYTES, Q4_0_BYTES = 34, 18  # of such a block
FP8_HEAD_BYTES = 4  # the scale of a whole vector
FLOAT32, BFLOAT16, FLOAT16, Q8_0, Q4_0, FP8 = range(6)  # the formats' numbers in kernels


@dataclass(frozen=True, slots=True)
class Format:
    """The layout of one vector of head_dim values; `reference` defines its bytes."""

    name: str
    number: int
    unit_len: int  # head_dim must be a multiple of it
    unit_bytes: int  # bytes of unit_len values
    head_bytes: int = 0  # before the first unit of the vector

    def num_bytes(self, head_dim: int) -> int:
        """Return the bytes of one vector. Raises CodecError if head_dim does not fit the format."""
        if head_dim < 1 or head_dim % self.unit_len:
            raise CodecError(
                f"head_dim is {head_dim}, but {self.name} takes multiples of {self.unit_len} values; choose "
                f"{', '.join(f.name for f in FORMATS.values() if f.unit_len == 1)}"
            )
        return self.head_bytes + head_dim // self.unit_len * self.unit_bytes


FORMATS = {
    form.name: form
    for form in (
        Format("float32", FLOAT32, 1, 4),
        Format("bfloat16", BFLOAT16, 1, 2),
        Format("float16", FLOAT16, 1, 2),
        Format("q8_0", Q8_0, BLOCK_LEN, Q8_0_BYTES),
        Format("q4_0", Q4_0, BLOCK_LEN, Q4_0_BYTES),
        Format("fp8", FP8, 1, 1, head_bytes=FP8_HEAD_BYTES),
    )
}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The formats of a row's key and value; a row is its key's bytes, then its value's."""

    k: Format
    v: Format

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `q8_0`, for both, or `k=q8_0,v=q4_0`. Raises CodecError for anything else."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) == 1 and "=" not in text:
            return cls(_named(parts[0]), _named(parts[0]))
        given = {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in parts)}
        if len(parts) != 2 or given.keys() != {"k", "v"}:
            raise CodecError(
                f"{text!r} is not a format of keys and values; give one for both, such as q8_0, or one for each, "
                "such as k=q8_0,v=q4_0"
            )
        return cls(_named(given["k"]), _named(given["v"]))

    def __str__(self) -> str:
        return self.k.name if self.k == self.v else f"k={self.k.name},v={self.v.name}"

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of one row: a key and its value."""
        return self.k.num_bytes(head_dim) + self.v.num_bytes(head_dim)

    def v_offset(self, head_dim: int) -> int:
        """Return the offset of the value in a row, in bytes."""
        return self.k.num_bytes(head_dim)


def _named(name: str) -> Format:
    if name not in FORMATS:
        raise CodecError(f"{name!r} is not a format of keys or values; choose from {', '.join(FORMATS)}")
    return FORMATS[name]


def not_finite(form: Format) -> CodecError:
    return CodecError(
        f"keys or values are NaN or infinite, which {form.name} cannot represent; the artifact or the model that made "
        "it is broken: build the context again"
    )


def too_large(form: Format) -> CodecError:
    return CodecError(
        f"keys or values are too large for {form.name}: one of them, or a scale, would be written as infinity; "
        "choose float32 or fp8"
    )
