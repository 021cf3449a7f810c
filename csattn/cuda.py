"""CUDA C kernels of this package: compiled once from the source beside their caller, launched on torch's stream.

The only file of the package that knows CuPy, which compiles and loads. Launches go to the driver directly: only there
may a kernel start while the one before it ends.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PORTABLE_SHARED_BYTES = 48 << 10  # more has to be asked for
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a value of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("_padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaKernel:
    """One compiled kernel. Arguments are device addresses and sizes; nothing of a launch reaches the host."""

    def __init__(self, function: Any, shared_bytes: int, early_start: bool) -> None:
        """See `cuda_kernel`."""
        self._function = function
        if shared_bytes > PORTABLE_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = shared_bytes
        self._handle = ctypes.c_void_p(function.kernel.ptr)
        self._attribute = _LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = _LaunchConfig(
            shared_bytes=shared_bytes, attributes=ctypes.pointer(self._attribute), num_attributes=int(early_start)
        )

    def launch(self, grid: tuple[int, int, int], block: int, *args: Any) -> None:
        """Enqueue on torch's current stream.

        A tensor passes its address, an int 64 bits, a float a double; numpy scalars pass as they are.
        """
        values = [as_argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._config.grid[:] = grid
        self._config.block[:] = (block, 1, 1)
        self._config.stream = torch.cuda.current_stream().cuda_stream
        error = _driver().cuLaunchKernelEx(ctypes.byref(self._config), self._handle, pointers, None)
        if error:
            raise RuntimeError(f"CUDA refused to launch {self._function.name} with error {error}")


def cuda_kernel(
    source: Path | tuple[Path, ...],  # .cu files, compiled as one
    name: str,  # of an extern "C" function in them
    defines: Mapping[str, object],  # -D options: the shape that the kernel is compiled for
    shared_bytes: int = 0,  # dynamic shared memory of every launch
    early_start: bool = False,  # may start while the kernel before it ends: then it has to wait before it reads
) -> CudaKernel:
    """Compile, for the current device, or take what an earlier call compiled."""
    sources = source if isinstance(source, tuple) else (source,)
    module = _module(sources, tuple(sorted((key, str(value)) for key, value in defines.items())))
    return CudaKernel(module.get_function(name), shared_bytes, early_start)


def as_argument(arg: Any) -> Any:
    """The value as the kernel's parameter has it in memory."""
    if isinstance(arg, Tensor):
        return ctypes.c_uint64(arg.data_ptr())
    if isinstance(arg, int):
        return ctypes.c_int64(arg)
    if isinstance(arg, float) and not hasattr(arg, "dtype"):
        return ctypes.c_double(arg)
    return (ctypes.c_char * arg.itemsize).from_buffer_copy(arg.tobytes())


def num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _module(sources: tuple[Path, ...], defines: tuple[tuple[str, str], ...]) -> Any:
    import cupy

    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in defines))
    return cupy.RawModule(code="\n".join(source.read_text() for source in sources), options=options)
