"""What stages are told: int64 words, each a number, or the address of numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at, record_at
from csattn.cpu.jit import exact_kernel


def words_at(names: Sequence[str]) -> Any:
    """For kernels: the record at an address that has words of these names, one after the other."""
    return record_at(np.dtype([(name, np.int64) for name in names]))


def words_of(names: Sequence[str], values: Mapping[str, Any]) -> NDArray[np.int64]:
    """The words, each of its value: see `word`. Whoever has them holds on to the values."""
    assert values.keys() == set(names), f"the stage wants {names}, got {tuple(values)}"
    return np.array([word(values[name]) for name in names], np.int64)


def word(value: Any) -> int:
    """Of a number; of an array or a tensor, where it begins; None is 0."""
    if value is None:
        return 0
    if hasattr(value, "data_ptr"):
        assert value.is_contiguous()
        return int(value.data_ptr())
    return value.ctypes.data if isinstance(value, np.ndarray) else int(value)


@exact_kernel
def word_of(address: int, row: int) -> Any:
    """A row's number of an int64 array."""
    return array_at(address + 8 * row, 1, np.int64(0))[0]


@exact_kernel
def floats_of(address: int, row: int, width: int) -> Any:
    """A row of a float32 array."""
    return array_at(address + 4 * row * width, width, np.float32(0))


@exact_kernel
def number_at(address: int) -> Any:
    """A float64, rounded to float32."""
    return np.float32(array_at(address, 1, np.float64(0))[0])


@exact_kernel
def bytes_of(like: Any) -> Any:
    """Of an element of that type."""
    return array_at(0, 0, like).itemsize
