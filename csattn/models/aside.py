"""Weights that are seldom read, in files without a name: the system may drop them from memory, and reads them again."""

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

_LEAST_BYTES = 2**20  # of a tensor: smaller ones stay where they are
_IN_MEMORY = {"ramfs", "tmpfs"}
_MOST_SHARE = 0.5  # of what the disk has free: contexts are built there, too


def has_room_aside(num_bytes: int) -> bool:
    """Whether the disk has room for so much to be put aside, and files may be written there."""
    place = next(path for path in (cache_dir(), *cache_dir().absolute().parents) if os.path.isdir(path))
    if _lies_in_memory(place) or not os.access(place, os.W_OK | os.X_OK):
        return False
    free = available_bytes(place)
    return free is not None and num_bytes <= _MOST_SHARE * free


def _lies_in_memory(place: Path) -> bool:
    """Whether files there take memory that cannot be dropped."""
    device = place.stat().st_dev
    with suppress(OSError):  # no Linux
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return kind.split()[0] in _IN_MEMORY
    return False


def aside(tensor: Tensor) -> Tensor:
    """The same numbers, in a file that goes with them; the tensor itself where it is small or cannot be written.

    They may be changed: what is changed stays in memory.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST_BYTES:
        return tensor
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_dir(), buffering=0) as file:
            left = tensor.flatten().view(torch.uint8).numpy().data
            while left:
                left = left[file.write(left) :]  # may be short
            mapped = mmap.mmap(file.fileno(), tensor.nbytes, access=mmap.ACCESS_COPY)
    except OSError:
        return tensor
    return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)


class MadeAside(TorchFunctionMode):
    """Meanwhile what this thread makes by these functions is put aside: the weights that a loader makes, one by one."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in self._functions or not isinstance(made, Tensor):
            return made
        trim_heap()  # of what the tensors before were made of
        return aside(made)
