"""Errors of memory and movement. Every message says what came, what was wanted, and what to do."""

import errno

from csattn.errors import CsattnError


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation: by numpy, by torch on the CPU or a GPU, or of a memory map."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    message = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message


class OffloadError(CsattnError):
    """Base of all errors that this package raises on purpose."""


class MemoryPlanError(OffloadError):
    """The plan needs more memory than is available, or a context is longer than planned for."""


class PinningError(OffloadError):
    """Host memory could not be made readable for the device."""


class NoDeviceError(OffloadError):
    """This machine has no CUDA device, or lacks a library to use it with."""


class TierError(OffloadError):
    """A tier cannot be made as requested: its budget is too small, or is not a size."""


class DiskError(OffloadError):
    """A file of a tier could not be read, or does not hold what was written."""


class CodecError(OffloadError):
    """Rows cannot be kept in the requested format, or no such format exists."""
