"""A file of named arrays in the safetensors format, aligned so that it can be memory-mapped and page-locked (pinned).

The layout is a pure function of names, dtypes, shapes and metadata. A reader that knows what a file must contain
therefore knows its header to the byte. It compares the header, and never interprets what it finds on disk.
"""

import ctypes
import json
import math
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact.durable import FileRecord, new_file
from csattn.errors import ArtifactCorruptError

assert sys.byteorder == "little", "artifacts are little-endian and are used without a copy"

# safetensors dtype -> numpy dtype of the mapped array; numpy has no bfloat16, so its bits travel as uint16
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
PAGE_BYTES = 4096
_PIECE_BYTES = 2**20  # written at a time, at least one row
SMALL_ALIGNMENT = 64  # of arrays smaller than a page; the end of a file is not aligned
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array of a file."""

    name: str
    dtype: str  # a key of NUMPY_DTYPES
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a file: its header, and the parts that follow it without gaps."""

    header: bytes  # a multiple of PAGE_BYTES
    parts: tuple[tuple[TensorSpec, int], ...]  # arrays and padding, each with its offset in the file
    size_bytes: int

    @property
    def tensors(self) -> Iterator[tuple[TensorSpec, int]]:
        """The arrays, without the padding between them."""
        return ((spec, offset) for spec, offset in self.parts if not _is_padding(spec))


def plan_file(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    """Lay out arrays in order, on 64-byte boundaries; those of a page or more on page boundaries.

    The format allows no gaps, so padding between two arrays is an array of zero bytes.
    """
    parts: list[tuple[TensorSpec, int]] = []
    end = 0
    for tensor in tensors:
        alignment = PAGE_BYTES if tensor.num_bytes >= PAGE_BYTES else SMALL_ALIGNMENT
        if padding := -end % alignment:
            parts.append((TensorSpec(f"padding.{len(parts)}", "U8", (padding,)), end))
            end += padding
        parts.append((tensor, end))
        end += tensor.num_bytes
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for part, start in parts:
        entries[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [start, start + part.num_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, tuple((part, len(header) + start) for part, start in parts), len(header) + end)


def write_file(path: Path, layout: FileLayout, arrays: Mapping[str, NDArray[Any] | torch.Tensor]) -> FileRecord:
    """Write the arrays to a file durably, or leave nothing behind. The file is hashed while it is written."""
    assert set(arrays) == {spec.name for spec, _ in layout.tensors}, f"{path.name} needs other arrays"
    with new_file(path, layout.size_bytes) as file:
        file.write(layout.header)
        for part, offset in layout.parts:
            assert file.size_bytes == offset, f"{part.name} does not start where it was planned"
            if _is_padding(part):
                file.write(bytes(part.num_bytes))
                continue
            for piece in _pieces(part, arrays[part.name]):
                file.write(piece)
    assert file.size_bytes == layout.size_bytes
    return file.record


def map_file(path: Path, layout: FileLayout) -> dict[str, NDArray[Any]]:
    """Memory-map the file read-only and return its arrays. Raises ArtifactCorruptError for another layout.

    Pages are read when they are touched. The file must not be shortened while it is mapped: touching what is gone
    ends the process (SIGBUS). Therefore finished artifacts are never written again.
    """
    with open_regular_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != layout.size_bytes:
            raise ArtifactCorruptError(
                f"{path} has {size_bytes} bytes instead of {layout.size_bytes}: it is truncated or altered; "
                f"{repair_advice(path.parent)}"
            )
        if file.read(len(layout.header)) != layout.header:
            raise ArtifactCorruptError(
                f"{path} does not hold the arrays that the manifest describes: its header is altered, or the "
                f"file belongs to another artifact or layer; {repair_advice(path.parent)}"
            )
        mapped = map_read_only(file.fileno(), size_bytes)
    return {
        spec.name: mapped[offset : offset + spec.num_bytes].view(NUMPY_DTYPES[spec.dtype]).reshape(spec.shape)
        for spec, offset in layout.tensors
    }


def open_regular_file(path: Path) -> Any:
    """Open a regular file for reading; refuse others, because a pipe in its place would block the reader forever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ArtifactCorruptError(f"{path} is not a regular file; {repair_advice(path.parent)}")
    return open(path, "rb")


def repair_advice(place: Path | str) -> str:
    """Return what to do about a damaged artifact, as the end of a sentence."""
    return f"delete {place}, and copy it again or build it again with `csattn build`"


def _is_padding(part: TensorSpec) -> bool:
    return part.name.startswith("padding.")


def _pieces(spec: TensorSpec, array: NDArray[Any] | torch.Tensor) -> Iterator[memoryview]:
    """Yield the array's bytes in order, some rows of its first axis at a time, so that only a piece is ever copied."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        array = (array.view(torch.uint16) if array.dtype == torch.bfloat16 else array).numpy()
    dtype = NUMPY_DTYPES[spec.dtype]
    assert array.shape == spec.shape, f"{spec.name} has shape {array.shape} instead of {spec.shape}"
    assert array.dtype == dtype, f"{spec.name} has dtype {array.dtype} instead of {dtype}"
    rows = np.atleast_1d(array)
    chunk_rows = max(1, _PIECE_BYTES * len(rows) // max(1, array.nbytes))
    for start in range(0, len(rows), chunk_rows):
        yield np.ascontiguousarray(rows[start : start + chunk_rows]).reshape(-1).view(np.uint8).data


def map_read_only(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map the first num_bytes of an open file, for as long as an array over them lives. Raises OSError.

    `mmap.mmap` would keep a file descriptor open for each map; a service maps many contexts, and may open few files.
    """
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Mapped(address, num_bytes))


class _Mapped:
    """Owns a memory map; numpy's arrays over it keep this object alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, True),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
        end = weakref.finalize(self, _libc.munmap, address, num_bytes)
        end.atexit = False  # threads may still read
