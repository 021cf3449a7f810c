"""Page-locking of host memory through CuPy, which clears CUDA's last error when a registration fails."""

from offload.errors import PinningError

_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
_READ_ONLY = 8  # cudaHostRegisterReadOnly


def host_register(address: int, num_bytes: int, read_only: bool = False) -> None:
    """Page-lock host memory and map it for the device at the same address. Raises PinningError."""
    import cupy

    runtime = cupy.cuda.runtime
    try:
        runtime.hostRegister(address, num_bytes, _PORTABLE_MAPPED | (_READ_ONLY if read_only else 0))
    except runtime.CUDARuntimeError as error:
        raise PinningError(f"the driver refused to page-lock {num_bytes} bytes of host memory: {error}") from error
    device_address = runtime.pointerGetAttributes(address).devicePointer
    if device_address != address:
        runtime.hostUnregister(address)
        raise PinningError(
            f"the device sees host memory at {address:#x} as {device_address:#x}, not at its own address"
        )


def host_unregister(address: int) -> None:
    """Undo `host_register`."""
    import cupy

    cupy.cuda.runtime.hostUnregister(address)
