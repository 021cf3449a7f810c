"""Shared memory that several processes map, and that a device reads and writes in place."""

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

ALIGNMENT = 64  # bytes: pieces that different sides write are in different cache lines
# Memory registered for the device, kept here until it is closed. Unregistering waits for the device, which may itself
# wait for a host thread, so it must not be left to the garbage collector, which may run on any thread.
_of_device: dict[int, NDArray[np.uint8]] = {}


class SharedMemory:
    """Zeroed shared memory with a bump allocator: pieces are allocated from its start and never move.

    Other processes can map the descriptor `fd` until `close`. The memory is freed with the last array over it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises OSError if there is not enough memory, PinningError if the device cannot map it."""
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
        """End new mappings and use by the device; no step may be in progress. Allocated pieces stay readable."""
        self._close_descriptor()
        if _of_device.pop(self._address, None) is not None:
            host_unregister(self._address)

    @property
    def is_open(self) -> bool:
        """Whether other processes can still map it."""
        return self._close_descriptor.alive

    @property
    def _address(self) -> int:
        return int(self.array.ctypes.data)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate the next piece."""
        begin, num_bytes = self._end, prod(shape) * dtype.itemsize
        assert begin + num_bytes <= len(self.array), f"{self!r} has no room for {num_bytes:,} bytes more"
        self._end += piece_bytes(shape, dtype)
        return torch.from_numpy(self.array[begin : begin + num_bytes]).view(dtype).view(shape)

    def place_of(self, piece: Tensor) -> int:
        """Return the offset of a piece, in bytes."""
        return piece.data_ptr() - self._address


def piece_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that `SharedMemory.zeros` takes for such a piece."""
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def array_in(memory: NDArray[np.uint8], at: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return a view of the array at byte `at` of the memory."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    assert at + num_bytes <= len(memory), f"an array ends at byte {at + num_bytes} of {len(memory)}"
    array: NDArray[Any] = memory[at : at + num_bytes].view(dtype).reshape(shape)
    return array


def create_memory(num_bytes: int) -> int:
    """Create anonymous zeroed memory; return its file descriptor. It is freed with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("csattn", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)  # fails here instead of by SIGBUS at the first access
        else:
            os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int) -> NDArray[np.uint8]:
    """Map the memory of a descriptor, which may be closed afterwards. It is unmapped with the last array over it."""
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
