"""Weights that are seldom read, in files without a name: the system may drop them from memory, and reads them again."""

import mmap
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from csattn.artifact.durable import available_bytes
from csattn.cache import cache_dir
from csattn.cpu.heap import trim_heap

_LEAST_BYTES = 2**20  # of a tensor: smaller ones stay where they are
_MOST_SHARE = 0.5  # of what the disk has free: contexts are built there, too


def has_room_aside(num_bytes: int) -> bool:
    """Whether the disk has room for so much to be put aside."""
    free = available_bytes(cache_dir())
    return free is not None and num_bytes <= _MOST_SHARE * free


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


class CastAside(TorchFunctionMode):
    """Meanwhile what this thread casts by `Tensor.to` is put aside: the weights that a loader makes, one by one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not Tensor.to or not isinstance(made, Tensor):
            return made
        trim_heap()  # of what the tensors before were made of
        return aside(made)
