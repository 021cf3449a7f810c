"""Memory that several processes map, and a device reads and writes where it lies."""

import mmap
import os
import tempfile
import weakref
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.cuda import host_register, host_unregister

ALIGNMENT = 64  # bytes: what two sides write lies in different cache lines
# Memory that the device uses, until it is closed. Giving it back waits for the device, which may itself be waiting for
# a thread of the host: that must not happen wherever the garbage collector happens to run.
_of_device: dict[int, NDArray[np.uint8]] = {}


class SharedMemory:
    """Zeroed memory, given out piece by piece from its start; what was given stays where it is.

    Other processes map what `fd` names, until `close`; it is let go with the last array over it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises OSError where there is not so much memory, PinningError where the device cannot use it."""
        self.fd = create_memory(num_bytes)
        self._close_descriptor = weakref.finalize(self, os.close, self.fd)
        self.array = map_memory(self.fd)
        self._end = 0
        if device.type == "cuda":
            host_register(self._address, num_bytes)
            _of_device[self._address] = self.array

    def __repr__(self) -> str:
        return f"<SharedMemory {self._end:,} of {len(self.array):,} bytes>"

    def close(self) -> None:
        """No more processes may map it, and no step of the device may use it. What was given out may still be read."""
        self._close_descriptor()
        if _of_device.pop(self._address, None) is not None:
            host_unregister(self._address)

    @property
    def is_open(self) -> bool:
        """Whether more processes may map it."""
        return self._close_descriptor.alive

    @property
    def _address(self) -> int:
        return int(self.array.ctypes.data)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next piece."""
        begin, num_bytes = self._end, prod(shape) * dtype.itemsize
        assert begin + num_bytes <= len(self.array), f"{self!r} has no room for {num_bytes:,} bytes more"
        self._end += piece_bytes(shape, dtype)
        return torch.from_numpy(self.array[begin : begin + num_bytes]).view(dtype).view(shape)

    def place_of(self, piece: Tensor) -> int:
        """Where a piece begins, in bytes."""
        return piece.data_ptr() - self._address


def piece_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What `SharedMemory.zeros` takes."""
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def array_in(memory: NDArray[np.uint8], at: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """The array at that byte of the memory."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    assert at + num_bytes <= len(memory), f"an array ends at byte {at + num_bytes} of {len(memory)}"
    array: NDArray[Any] = memory[at : at + num_bytes].view(dtype).reshape(shape)
    return array


def create_memory(num_bytes: int) -> int:
    """A file descriptor of zeroed memory that has no name: it is gone with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("csattn", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)  # an error here and now, where touching what is not there would kill
        else:
            os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int) -> NDArray[np.uint8]:
    """The memory of that descriptor, which may be closed afterwards. It is let go with the last array over it."""
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
