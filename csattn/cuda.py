"""CUDA C kernels of this package: compiled once from the source beside their caller, launched on torch's stream.

The only file of the package that knows CuPy. torch owns memory, streams and events; CuPy compiles and launches.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

NON_PORTABLE_CLUSTER_SIZE = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
PORTABLE_SHARED_BYTES = 48 << 10  # more has to be asked for


class CudaKernel:
    """One compiled kernel. Arguments are device addresses and sizes; nothing of a launch reaches the host."""

    def __init__(self, function: Any, shared_bytes: int, wide_cluster: bool) -> None:
        """shared_bytes: dynamic shared memory of every launch. wide_cluster: clusters of more than 8 blocks."""
        import cupy

        self._function = function
        self._shared_bytes = shared_bytes
        self._stream_of = cupy.cuda.Stream.from_external
        if shared_bytes > PORTABLE_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = shared_bytes
        if wide_cluster:
            cupy.cuda.driver.funcSetAttribute(function.kernel.ptr, NON_PORTABLE_CLUSTER_SIZE, 1)

    def launch(self, grid: tuple[int, int, int], block: int, *args: Any) -> None:
        """Enqueue on torch's current stream.

        A tensor passes its address, an int 64 bits; numpy scalars pass as they are.
        """
        raw = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        with self._stream_of(_TorchStream()):
            self._function(grid, (block, 1, 1), raw, shared_mem=self._shared_bytes)


class _TorchStream:
    """torch's current stream, as the CUDA stream protocol has it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


@cache
def _module(sources: tuple[Path, ...], defines: tuple[tuple[str, str], ...]) -> Any:
    import cupy

    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in defines))
    return cupy.RawModule(code="\n".join(source.read_text() for source in sources), options=options)


def cuda_kernel(
    source: Path | tuple[Path, ...],  # .cu files, compiled as one
    name: str,  # of an extern "C" function in them
    defines: Mapping[str, object],  # -D options: the shape that the kernel is compiled for
    shared_bytes: int = 0,
    wide_cluster: bool = False,
) -> CudaKernel:
    """Compile, for the current device, or take what an earlier call compiled."""
    sources = source if isinstance(source, tuple) else (source,)
    module = _module(sources, tuple(sorted((key, str(value)) for key, value in defines.items())))
    return CudaKernel(module.get_function(name), shared_bytes, wide_cluster)
