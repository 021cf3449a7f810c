"""CUDA C kernels and page-locked host memory: the only file of the package that knows CuPy.

torch owns memory, streams and events; CuPy compiles, launches and pins. CuPy clears the error that a refused
registration leaves pending, before it raises.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import PinningError

_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
_READ_ONLY = 8  # cudaHostRegisterReadOnly
_PORTABLE_SHARED_BYTES = 48 << 10  # more has to be asked for


class CudaKernel:
    """One compiled kernel. Arguments are device addresses and sizes; nothing of a launch reaches the host."""

    def __init__(self, function: Any, shared_bytes: int) -> None:
        """shared_bytes: dynamic shared memory of every launch."""
        self._function = function
        self._shared_bytes = shared_bytes
        if shared_bytes > _PORTABLE_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = shared_bytes

    def launch(self, grid: tuple[int, int, int], block: int, *args: Tensor | int) -> None:
        """Enqueue on torch's current stream. A tensor passes its address, an int 64 bits."""
        import cupy

        raw = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        with cupy.cuda.Stream.from_external(_TorchStream()):
            self._function(grid, (block, 1, 1), raw, shared_mem=self._shared_bytes)


class _TorchStream:
    """torch's current stream, as the CUDA stream protocol has it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def cuda_kernel(
    sources: tuple[Path, ...],  # of CUDA C, compiled one after the other as one file
    name: str,  # of an extern "C" function in them
    defines: Mapping[str, int],  # -D options: the shape that the kernel is compiled for
    shared_bytes: int = 0,
) -> CudaKernel:
    """Compile, or take what an earlier call compiled."""
    return CudaKernel(_module(sources, tuple(sorted(defines.items()))).get_function(name), shared_bytes)


@cache
def _module(sources: tuple[Path, ...], defines: tuple[tuple[str, int], ...]) -> Any:
    import cupy

    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in defines))
    return cupy.RawModule(code="\n".join(source.read_text() for source in sources), options=options)


def host_register(address: int, num_bytes: int, read_only: bool = False) -> None:
    """Page-lock host memory and map it for the device, at the same address; PinningError says why not."""
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
