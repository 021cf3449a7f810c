"""Rarely read weights in unnamed, memory-mapped files: the system may drop their pages, and reads them again."""

import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from csattn.artifact.durable import available_bytes
from csattn.cache import cache_dir
from csattn.cpu.heap import trim_heap

_MIN_BYTES = 2**20  # smaller tensors stay in memory
_IN_MEMORY = {"ramfs", "tmpfs"}
_MAX_SHARE = 0.5  # of the disk's free space: contexts are built there, too


def has_disk_space(num_bytes: int) -> bool:
    """Whether so many bytes can go to mapped files: the cache directory is writable and on a disk with enough room."""
    place = next(path for path in (cache_dir(), *cache_dir().absolute().parents) if os.path.isdir(path))
    if _is_in_memory(place) or not os.access(place, os.W_OK | os.X_OK):
        return False
    free = available_bytes(place)
    return free is not None and num_bytes <= _MAX_SHARE * free


def _is_in_memory(place: Path) -> bool:
    """Whether files there take memory that cannot be dropped."""
    device = place.stat().st_dev
    with suppress(OSError):  # not on Linux
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return kind.split()[0] in _IN_MEMORY
    return False


def to_mapped_file(tensor: Tensor) -> Tensor:
    """Move a tensor to an unnamed file, which is deleted with it, and return it mapped from there.

    Return the tensor itself if it is small, not on the CPU, or cannot be written. The mapping is private
    (copy-on-write): the tensor may be changed, and changed pages stay in memory.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _MIN_BYTES:
        return tensor
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_dir(), buffering=0) as file:
            left = tensor.flatten().view(torch.uint8).numpy().data
            while left:
                left = left[file.write(left) :]  # a write may be short
            mapped = mmap.mmap(file.fileno(), tensor.nbytes, access=mmap.ACCESS_COPY)
    except OSError:
        return tensor
    return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)


class ResultsToFiles(TorchFunctionMode):
    """While open, tensors that these functions return in this thread go to mapped files: weights, one by one."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in self._functions or not isinstance(made, Tensor):
            return made
        trim_heap()  # frees what earlier tensors were made from
        return to_mapped_file(made)
