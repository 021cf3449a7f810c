"""The C library's heap."""

import ctypes


def trim_heap() -> None:
    """Return freed memory that the allocator keeps to the system; otherwise the process still seems to use it.

    The allocator keeps blocks of up to 32 MiB. Does nothing if the C library is not glibc.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
