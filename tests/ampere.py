"""Treat the GPU as an older and smaller one: `pytest --as-ampere`, for tests of search, attention, offload, workers.

Kernels are compiled to PTX for compute capability 8.0, and from there by the driver. A thread block has no more shared
memory than on the smallest of these GPUs (those of 8.6 and 8.9). Without a GPU, the emulation has the same limit.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from csattn import cuda
from csattn.cuda import Limits, limits, source_text

AMPERE = Limits((8, 0), 99 << 10)


def take_for_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the GPU as Ampere from this call on; what has been planned and compiled before is unchanged."""
    monkeypatch.setattr(cuda, "_EMULATED", AMPERE)
    if not torch.cuda.is_available():
        return
    import triton.compiler.compiler as triton_compiler

    monkeypatch.setattr(cuda, "_limits_of", lambda device: AMPERE)
    monkeypatch.setattr(cuda, "_module", _module)
    monkeypatch.setattr(triton_compiler, "max_shared_mem", lambda device: AMPERE.block_bytes)


def skip_where_refused(head_dim: int, dtype: torch.dtype) -> None:
    if head_dim > 256 and dtype == torch.float32 and limits() == AMPERE:
        pytest.skip("a small GPU has no memory for a head so wide, and says so")


@cache
def _module(source: Path, options: tuple[str, ...], architecture: str | None, device: int) -> Any:
    """Stand in for `csattn.cuda._module`."""
    import cupy
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source_text(source), "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-std=c++17", "-ftz=true", "-default-device", "-arch=compute_80", *options))
        code = nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    module = cupy.cuda.function.Module()
    module.load(code)
    return module
