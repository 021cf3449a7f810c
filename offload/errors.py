"""What can go wrong with memory and movement: every message says what came, what was wanted, and what to do."""

import errno

from csattn.errors import CsattnError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is about memory that could not be had: of numpy, of torch on the CPU or a GPU, of a memory map."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    message = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message


class OffloadError(CsattnError):
    """Base of all errors that this package raises on purpose."""


class MemoryPlanError(OffloadError):
    """The plan needs more memory than there is, or a context is longer than it was planned for."""


class PinningError(OffloadError):
    """Host memory could not be made readable for the device."""


class NoDeviceError(OffloadError):
    """This machine has no CUDA device, or a library that it is used through is missing."""


class TierError(OffloadError):
    """A tier cannot be made as wanted: its budget is too small, or no size at all."""


class DiskError(OffloadError):
    """A file of a tier could not be read, or does not hold what was written."""


class CodecError(OffloadError):
    """Rows cannot be kept in the format that was asked for, or there is no such format."""
