"""A file's bytes where the kernel maps them, and no file that stays open: a service may have many contexts mapped, and
few files open."""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_read_only(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """[num_bytes]: the first of that open file, for as long as an array over them lives. Raises OSError.

    `mmap.mmap` keeps a descriptor of its own.
    """
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Mapped(address, num_bytes))


class _Mapped:
    """Owns a map; numpy's arrays over it hold on to this."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, True),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
        end = weakref.finalize(self, _libc.munmap, address, num_bytes)
        end.atexit = False  # threads may still read
