"""What stages of a tape are told, as a record of addresses and sizes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype
from numba.extending import intrinsic
from numpy.typing import NDArray

ALIGNMENT = 64


def record_of(names: Sequence[str], floats: Sequence[str] = ()) -> np.dtype[Any]:
    """Fields of int64, then of float64. Records whose names begin alike can be read as one another, so far."""
    return np.dtype([(name, np.int64) for name in names] + [(name, np.float64) for name in floats])


def reader_of(dtype: np.dtype[Any]) -> Any:
    """A function for kernels: the record of that type at an address."""

    @intrinsic
    def record_at(typing_context, address):  # type: ignore[no-untyped-def]
        return from_dtype(dtype)(address), _to_record

    return record_at


def _to_record(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(sig.return_type))


class Told:
    """A record, and the arrays that it tells of: they live as long as it does."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.record = np.zeros(1, dtype)
        self.words = self.record.view(np.int64)  # what a tape is given
        self._kept: dict[str, Any] = {}

    def __setitem__(self, name: str, value: int | float | NDArray[Any]) -> None:
        """A number, or an array, of which the record gets the address."""
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous, f"{name} of shape {value.shape} must be contiguous"
            self._kept[name] = value
            self.record[name] = value.ctypes.data
        else:
            self.record[name] = value

    def __getitem__(self, name: str) -> Any:
        """The array that was set."""
        return self._kept[name]


def scratch(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Zeros that begin on a cache line."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
