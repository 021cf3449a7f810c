"""CUDA C kernels: compiled once from the source beside their caller, launched on torch's stream.

This package is part of the base layer: it imports nothing of the project, and all packages may import it. CuPy compiles
and loads kernels. Launches call the driver directly, because only it offers programmatic dependent launch, by which a
kernel may start while the one before it ends.

`intrinsics.cuh` has the instructions without a name in CUDA C, `warps.cuh` sums over warps and blocks.
"""

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST_CAPABILITY = 8, 0  # the first with asynchronous copies (cp.async) and products of bfloat16
HOPPER = 9, 0  # the first with programmatic dependent launch and clusters of blocks
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_SHARED_BYTES_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INCLUDE = re.compile(r'^#include "(.+)".*$', re.MULTILINE)
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of CUtensorMap
_allowed_shared_bytes: dict[int, int] = {}  # by function: the dynamic shared memory that its launches may use


@dataclass(frozen=True, slots=True)
class Limits:
    """The properties of a device that kernels depend on."""

    capability: tuple[int, int]
    block_bytes: int  # of shared memory that a block may have, or all blocks of a multiprocessor together

    def __str__(self) -> str:
        major, minor = self.capability
        return f"compute capability {major}.{minor} and {self.block_bytes >> 10} KiB of shared memory for a block"

    @property
    def is_hopper(self) -> bool:
        """Whether the device is a Hopper or later."""
        return self.capability >= HOPPER


HOPPERS = Limits(HOPPER, 227 << 10)
_EMULATED = HOPPERS  # without a device


def limits() -> Limits:
    """The limits of the current device."""
    return _limits_of(torch.cuda.current_device()) if torch.cuda.is_available() else _EMULATED


@cache
def _limits_of(device: int) -> Limits:
    block_bytes = ctypes.c_int()
    error = _driver().cuDeviceGetAttribute(ctypes.byref(block_bytes), _MAX_SHARED_BYTES_OPTIN, device)
    _require(error, "to tell how much shared memory a block may have")
    return Limits(torch.cuda.get_device_capability(device), block_bytes.value)


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
    """One compiled kernel. Arguments are device addresses and sizes; a launch returns nothing to the host."""

    def __init__(self, name: str, function: Any, shared_bytes: int, early_start: bool) -> None:
        """See `cuda_kernel`."""
        self._name = name
        self._function = function  # which keeps its module loaded
        self._handle = ctypes.c_void_p(function.ptr)
        self._attribute = _LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = _LaunchConfig(
            shared_bytes=shared_bytes, attributes=ctypes.pointer(self._attribute), num_attributes=int(early_start)
        )

    def launch(self, grid: tuple[int, int, int], block: int, *args: Any) -> None:
        """Enqueue the kernel on torch's current stream.

        A tensor is passed as its address, None as the address 0, an int as 64 bits, a float as a double, and a numpy
        scalar as it is.
        """
        values = [as_argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = _LaunchConfig.from_buffer_copy(self._config)  # other threads may be launching the same kernel
        config.grid[:] = grid
        config.block[:] = (block, 1, 1)
        config.stream = torch.cuda.current_stream().cuda_stream
        _require(_driver().cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None), self._name)


def cuda_kernel(
    source: Path,  # a .cu file; see `source_text`
    name: str,  # of an extern "C" function in it
    defines: Mapping[str, object],  # -D options: the shape that the kernel is compiled for
    shared_bytes: int = 0,  # dynamic shared memory of every launch
    early_start: bool = False,  # on Hopper it may start while the kernel before it ends: it must wait before it reads
    architecture: str | None = None,  # to compile for; None: the one that the device shares with later devices
) -> CudaKernel:
    """Compile a kernel for the current device, or return what an earlier call compiled."""
    options = tuple(f"-D{key}={value}" for key, value in sorted(defines.items()))
    function = _function(source, name, options, shared_bytes, architecture, torch.cuda.current_device())
    return CudaKernel(name, function, shared_bytes, early_start and limits().is_hopper)


def source_text(
    source: Path,
    read: Callable[[Path], str] = Path.read_text,  # reads a file; includes are relative to the file's folder
) -> str:
    """Return the text of a file with the files that it includes by `#include "..."`, each where it is first included.

    If that is within an `#if`, a file that is also needed elsewhere must be included before it. All of it is one text
    because CuPy's cache of compiled kernels would not notice a change of an included file.
    """
    return _with_includes(source.resolve(), read, set())


def _with_includes(source: Path, read: Callable[[Path], str], seen: set[Path]) -> str:
    if source in seen:
        return ""
    seen.add(source)
    text = read(source).replace("#pragma once\n", "")  # compilers warn of it in a main file
    return _INCLUDE.sub(lambda line: _with_includes((source.parent / line[1]).resolve(), read, seen), text)


def tensor_map(
    matrix: Tensor,  # [rows, width] of any type of 1 or 2 bytes; address and row stride are multiples of 16 bytes
    box: tuple[int, int],  # rows, at most 256, and columns: 128 bytes of them
) -> Any:
    """Make a kernel argument (CUtensorMap) with which TMA loads boxes of the matrix into shared memory.

    The 128-byte swizzle applies: the i-th 16 bytes of a row are stored at i ^ row % 8. What is outside of the matrix is
    loaded as zeros.
    """
    (rows, width), size = matrix.shape, matrix.itemsize
    return _encoded_map(matrix.data_ptr(), rows, width, matrix.stride(0) * size, size, box)


@lru_cache(maxsize=256)  # consecutive launches use the same arrays
def _encoded_map(address: int, rows: int, width: int, row_bytes: int, size: int, box: tuple[int, int]) -> Any:
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    place = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(width, rows)
    strides = (ctypes.c_uint64 * 1)(row_bytes)
    boxes = (ctypes.c_uint32 * 2)(box[1], box[0])
    each = (ctypes.c_uint32 * 2)(1, 1)
    # unsigned integers, two dimensions; not interleaved, 128-byte swizzle, L2 promotion to 256 bytes, filled with zeros
    made = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), size - 1, 2, ctypes.c_void_p(address), sizes, strides, boxes, each, 0, 3, 3, 0
    )
    _require(made, f"a map of a matrix of {rows} x {width}")
    return np.frombuffer(ctypes.string_at(place, _MAP_BYTES), f"V{_MAP_BYTES}")[0]


def as_argument(arg: Any) -> Any:
    """The value as a kernel parameter in memory: see `CudaKernel.launch`."""
    if arg is None or isinstance(arg, Tensor):
        return ctypes.c_uint64(0 if arg is None else arg.data_ptr())
    if isinstance(arg, int):
        return ctypes.c_int64(arg)
    if isinstance(arg, float) and not hasattr(arg, "dtype"):
        return ctypes.c_double(arg)
    return (ctypes.c_char * arg.itemsize).from_buffer_copy(arg.tobytes())


def num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def free_device_bytes(device: torch.device | str) -> int:
    """The free bytes of a device's memory, including what torch's allocator caches and does not use."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def missing_for_kernels(device: int) -> str | None:
    """What kernels need and this device does not have, in words; None if they run on it."""
    of = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:  # its GPUs are devices of kind cuda, too, and have versions of their own
        return f"CUDA, and {of.name} is an AMD GPU"
    if (of.major, of.minor) >= LEAST_CAPABILITY:
        return None
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"compute capability {least} or more, and {of.name} has {of.major}.{of.minor}"


def has_warpgroup_products(device: torch.device) -> bool:
    """Whether the device runs code for sm_90a: products of whole warpgroups (wgmma), which only Hopper has."""
    if device.type != "cuda":
        return False
    return _limits_of(torch.cuda.current_device() if device.index is None else device.index).capability == HOPPER


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _require(error: int, what: str) -> None:
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"CUDA refused {what} with error {error}: {(text.value or b'unknown').decode()}")


@cache
def _function(
    source: Path,
    name: str,
    options: tuple[str, ...],
    shared_bytes: int,
    architecture: str | None,
    device: int,  # to load it on
) -> Any:
    function = _module(source, options, architecture, device).get_function(name)
    function = getattr(function, "kernel", function)  # if CuPy compiled it
    handle = ctypes.c_void_p(function.ptr)
    # needed if this and the kernel's static shared memory exceed 48 KiB; never lowered below an earlier value
    if shared_bytes > _allowed_shared_bytes.get(function.ptr, 0):
        _require(_driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes), name)
        _allowed_shared_bytes[function.ptr] = shared_bytes
    return function


@cache
def _module(source: Path, options: tuple[str, ...], architecture: str | None, device: int) -> Any:
    import cupy

    code, options = source_text(source), ("-std=c++17", *options)
    if architecture is None:
        return cupy.RawModule(code=code, options=options)
    module = cupy.cuda.function.Module()
    module.load(_compiled(code, (*options, "-ftz=true", f"-arch={architecture}")))
    return module


def _compiled(code: str, options: tuple[str, ...]) -> Any:
    """Compile to a cubin with NVRTC directly, for an architecture that CuPy does not know by name."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(code, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"CUDA C does not compile: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
