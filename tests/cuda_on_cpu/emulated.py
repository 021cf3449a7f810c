"""Emulation of CUDA C kernels on the CPU: a C++ compiler compiles them, and they are called as on a device.

If NVRTC is installed, it also compiles each unmodified kernel, in one shape. That code is not run.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from csattn.cuda import as_argument, limits, source_text
from offload import slot_cache
from tests.cuda_on_cpu import nvrtc

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# files of inline assembly and their replacements on the CPU, whose includes are relative to the replaced file
REPLACEMENTS = {
    ROOT / "csattn/cuda/intrinsics.cuh": HERE / "intrinsics.h",
    ROOT / "csattn/attention/products.cuh": HERE / "attention_products.h",
    ROOT / "csattn/lightning/score/products.cuh": HERE / "score_products.h",
    ROOT / "csattn/lightning/tensor_cores.cuh": HERE / "tensor_cores.h",
    ROOT / "csattn/lightning/mla/products.cuh": HERE / "mla_products.h",
    ROOT / "csattn/lightning/paged/products.cuh": HERE / "paged_products.h",
}
COMPILER = shutil.which("g++")
_OF_THREAD = threading.local()
LARGE_VARIABLES = "emulated_shared", "exchanged", "awaited", "anchor"  # thread_local variables of the emulator itself
MOST_STATIC_SHARED_BYTES = 48 * 1024
# -Og: kernels take longer to compile than they run
# -U: where it is the default, _FORTIFY_SOURCE takes a switch to another stack for an error
OPTIONS = (
    *("-std=c++17", "-Og", "-fPIC", "-w", "-U_FORTIFY_SOURCE"),
    *(["-mtls-dialect=gnu2"] if platform.machine() == "x86_64" else []),  # for thread_local, what is read most
    *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []),  # links in half the time
)


# Where kernels are tested: on the device, or emulated on the CPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def crossed(firsts: Sequence[tuple[Any, ...]], seconds: Sequence[Any]) -> list[Any]:
    """Return the product of two lists of test parameters that kernels are compiled for. A device runs all of it.

    The CPU, where compilation takes most of the time, runs each of the first with one of the second, in turn.
    """
    return [
        pytest.param(*first, second, marks=[] if i % len(seconds) == j else pytest.mark.gpu)
        for i, first in enumerate(firsts)
        for j, second in enumerate(seconds)
    ]


class EmulatedKernel:
    """The counterpart of `csattn.cuda.CudaKernel` for tensors on the CPU. A launch has ended when it returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(self, grid: tuple[int, int, int], block: int, *args: Any) -> None:
        values = [as_argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        assert all(grid), "the driver refuses a launch of no blocks"
        assert block == self._library.num_threads(), "the kernel was compiled for another number of threads"
        self._library.launch_kernel((ctypes.c_int * 3)(*grid), pointers, _fibers(self._library.fiber_bytes()))


def _fibers(num_bytes: int) -> ctypes.c_void_p:
    """Return this thread's fiber memory, 64-byte aligned. It is reused: fresh pages take longer than a kernel."""
    if len(getattr(_OF_THREAD, "memory", ())) < num_bytes + 64:
        _OF_THREAD.memory = np.empty(num_bytes + 64, np.uint8)
    address = int(_OF_THREAD.memory.ctypes.data)
    return ctypes.c_void_p(address + -address % 64)


def tensor_map(matrix: torch.Tensor, box: tuple[int, int]) -> Any:
    """The counterpart of `csattn.cuda.tensor_map`: a TMA descriptor for `score_products.h`."""
    (rows, width), size = matrix.shape, matrix.itemsize
    assert rows, "the driver refuses a map of no rows"
    assert box[1] * size == 128 and box[0] <= 256, "boxes are of 128 bytes and 256 rows at most"
    assert matrix.data_ptr() % 16 == 0 and matrix.stride(0) * size % 16 == 0, "the copy engine takes 16 bytes at a time"
    words = matrix.data_ptr(), rows, width * size, matrix.stride(0) * size, box[0]
    return np.array([*words, *[0] * 11], np.int64).view("V128")[0]


def _require_shared_fits(library: Path, launch_bytes: int) -> None:
    """Raise AssertionError if a kernel takes more shared memory than a thread block has.

    Its `__shared__` variables are `thread_local` here, and so are a few of the emulator's own.
    """
    listed = subprocess.run(["readelf", "--symbols", "--wide", library], check=True, capture_output=True, text=True)
    symbols = [line.split() for line in listed.stdout.splitlines() if " TLS " in line]
    static_bytes = sum(int(s[2], 0) for s in symbols if not any(name in s[-1] for name in LARGE_VARIABLES))
    assert static_bytes <= MOST_STATIC_SHARED_BYTES, (
        f"{static_bytes} bytes of static shared memory: no device compiles it"
    )
    assert static_bytes + launch_bytes <= limits().block_bytes, (
        f"{static_bytes} and {launch_bytes} bytes of shared memory: a block has {limits().block_bytes}"
    )


class Emulator:
    """Compiles each kernel once, into a directory that several processes may share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        said = [] if COMPILER is None else [subprocess.check_output([COMPILER, "--version"], text=True)]
        said += [" ".join(OPTIONS), *(header.read_text() for header in sorted(HERE.glob("*.h")))]
        self._compiled_by = "\n".join(said)  # compiler, options and headers: part of the cache key

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, multiprocessors: int = 4) -> None:
        """If there is no device, patch the modules to use emulated kernels, on a device of `multiprocessors`."""
        if DEVICE.type == "cuda":
            return
        if COMPILER is None:
            pytest.skip("this machine has neither a CUDA device nor a C++ compiler to emulate one")
        for module in modules:
            monkeypatch.setattr(module, "cuda_kernel", self.cuda_kernel)
            if hasattr(module, "tensor_map"):
                monkeypatch.setattr(module, "tensor_map", tensor_map)
            if hasattr(module, "num_multiprocessors"):
                monkeypatch.setattr(module, "num_multiprocessors", lambda device: multiprocessors)
            if module is slot_cache:  # a lookup takes as long as its threads are many, whatever it looks up
                monkeypatch.setattr(module, "_THREADS", 128)

    def cuda_kernel(
        self,
        source: Path,
        name: str,
        defines: Mapping[str, object],
        shared_bytes: int = 0,
        early_start: bool = False,
        architecture: str | None = None,
    ) -> EmulatedKernel:
        """The counterpart of `csattn.cuda.cuda_kernel`."""
        assert shared_bytes <= limits().block_bytes, f"{name} asks for {shared_bytes} bytes of shared memory"
        code = source_text(source, lambda path: REPLACEMENTS.get(path, path).read_text())
        code = re.sub(
            r"extern __shared__ (?:__align__\(16\) )?(\w+) (\w+)\[\];", r"\1* const \2 = (\1*)emulated_shared;", code
        )
        lines = [f"#define {key} {value}" for key, value in defines.items()]
        lines += [f"#define SHARED_BYTES {shared_bytes}", '#include "emulator.h"', code]
        lines.append('extern "C" int num_threads() { return THREADS; }')
        lines.append('extern "C" int fiber_bytes() { return CLUSTER * THREADS * sizeof(Fiber); }')
        lines.append('extern "C" void launch_kernel(const int* grid, void** args, void* fibers) {')
        lines.append(f"    launch({name}, grid, args, fibers);")
        lines.append("}")
        if nvrtc.is_installed():
            self._require_compiles(source_text(source), defines, architecture)
        return EmulatedKernel(self._compile("\n".join(lines), shared_bytes))

    def _require_compiles(self, code: str, defines: Mapping[str, object], architecture: str | None) -> None:
        """Require that NVRTC compiles a kernel's first shape: each takes at least as long as compiling for the CPU."""
        compiled = self.directory / f"{hashlib.sha256(f'{architecture} {code}'.encode()).hexdigest()[:24]}.nvrtc"
        if not compiled.exists():
            nvrtc.require_compiles(code, defines, architecture)
            compiled.touch()

    def _compile(self, code: str, shared_bytes: int) -> ctypes.CDLL:
        stem = self.directory / hashlib.sha256((self._compiled_by + code).encode()).hexdigest()[:24]
        library = stem.with_suffix(".so")
        if not library.exists():
            headers = "-include", str(self._standard_headers())
            self._run_compiler(code, library, "-x", "c++", "-shared", *headers, launch_bytes=shared_bytes)
        return ctypes.CDLL(str(library))

    def _standard_headers(self) -> Path:
        """Return the precompiled standard headers. Parsing them would take half as long as compiling a kernel."""
        headers = self.directory / "standard.h"
        if not headers.exists():
            standard = r"^#(?:include <.*>|undef _GLIBCXX.*)$"
            code = "\n".join(re.findall(standard, (HERE / "emulator.h").read_text(), re.MULTILINE))
            self._run_compiler(code, headers.with_suffix(".h.gch"), "-x", "c++-header")
            headers.write_text(code)
        return headers

    def _run_compiler(self, code: str, result: Path, *options: str, launch_bytes: int = 0) -> None:
        """Compile `code` to `result`, which appears under its name only when it is complete."""
        assert COMPILER is not None, "there is no C++ compiler"
        unfinished = result.with_suffix(f".{os.getpid()}{result.suffix}")
        source = unfinished.with_suffix(".cpp")
        source.write_text(code)
        command = [COMPILER, *OPTIONS, *options, f"-I{HERE}", str(source), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        if result.suffix == ".so":
            _require_shared_fits(unfinished, launch_bytes)
        unfinished.replace(result)
        source.unlink()
