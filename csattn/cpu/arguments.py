"""The arguments of stages: int64 words, each a number or the address of numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at, record_at
from csattn.cpu.jit import exact_kernel


def words_at(names: Sequence[str]) -> Any:
    """Make a function for kernels that returns the record of words with these names, in this order, at an address."""
    return record_at(np.dtype([(name, np.int64) for name in names]))


def words_of(names: Sequence[str], values: Mapping[str, Any]) -> NDArray[np.int64]:
    """Convert values to words, in the order of names: see `word`. The caller must keep the values alive."""
    assert values.keys() == set(names), f"the stage wants {names}, got {tuple(values)}"
    return np.array([word(values[name]) for name in names], np.int64)


def word(value: Any) -> int:
    """The word for a value: a number itself, the address of an array or a tensor, 0 for None."""
    if value is None:
        return 0
    if hasattr(value, "data_ptr"):
        assert value.is_contiguous()
        return int(value.data_ptr())
    return value.ctypes.data if isinstance(value, np.ndarray) else int(value)


@exact_kernel
def word_of(address: int, row: int) -> Any:
    """Element `row` of the int64 array at an address."""
    return array_at(address + 8 * row, 1, np.int64(0))[0]


@exact_kernel
def floats_of(address: int, row: int, width: int) -> Any:
    """Row `row` of the float32 array [..., width] at an address."""
    return array_at(address + 4 * row * width, width, np.float32(0))


@exact_kernel
def number_at(address: int) -> Any:
    """The float64 at an address, rounded to float32."""
    return np.float32(array_at(address, 1, np.float64(0))[0])


@exact_kernel
def bytes_of(like: Any) -> Any:
    """The size of an element of the type of `like`."""
    return array_at(0, 0, like).itemsize
