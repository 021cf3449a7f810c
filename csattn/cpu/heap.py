"""The C library's heap."""

import ctypes


def trim_heap() -> None:
    """Give what the allocator keeps for later back to the system, whose account else does not show what was freed.

    It keeps blocks of up to 32 MiB. Does nothing where the C library is not GNU's.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
