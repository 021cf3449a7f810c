"""What can go wrong with memory and movement: every message says what came, what was wanted, and what to do."""


class OffloadError(Exception):
    """Base of all errors that this package raises on purpose."""


class MemoryPlanError(OffloadError):
    """The plan needs more memory than there is, or a context is longer than it was planned for."""


class PinningError(OffloadError):
    """Host memory could not be made readable for the device."""


class NoDeviceError(OffloadError):
    """This machine has no CUDA device, or a library that it is used through is missing."""
