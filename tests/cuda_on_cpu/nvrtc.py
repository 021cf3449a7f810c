"""NVRTC, CUDA's runtime compiler, needs no device. It checks what a C++ compiler may accept and no device can run."""

import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ARCHITECTURES = "sm_80", "sm_90"  # the oldest that kernels support, and one with every feature that they use
NO_CLUSTERS = "this device has no clusters"  # a static_assert of kernels that need sm_90


@cache
def is_installed() -> bool:
    return _libraries() is not None


def require_compiles(code: str, defines: Mapping[str, object], architecture: str | None) -> None:
    """Raise AssertionError with the compiler's log if `code`, from `csattn.cuda.source_text`, does not compile.

    architecture: None for each of `ARCHITECTURES`, with the option that CuPy adds.
    """
    given = ["-std=c++17", *(f"-D{key}={value}" for key, value in defines.items())]
    given += ["-default-device"] if architecture is None else []
    for of in ARCHITECTURES if architecture is None else (architecture,):
        options = [*given, f"-arch={of}"]
        if (told := _refusal(code, options)) and NO_CLUSTERS not in told:
            raise AssertionError(f"CUDA C does not compile for {of}: {told}")


def _refusal(code: str, options: Sequence[str]) -> str | None:
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None) == 0
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given) == 0:
            return None
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL:
    libraries = _libraries()
    assert libraries is not None
    builtins, nvrtc = libraries
    ctypes.CDLL(str(builtins))  # loaded first: NVRTC would not find it by itself
    return ctypes.CDLL(str(nvrtc))


def _libraries() -> tuple[Path, Path] | None:
    """Return the libraries of the package nvidia-cuda-nvrtc, or None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for builtins in sorted(Path(folder).glob("cu*/lib/libnvrtc-builtins.so.*"), reverse=True):
            for nvrtc in builtins.parent.glob("libnvrtc.so.*"):
                return builtins, nvrtc
    return None
