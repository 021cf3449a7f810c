"""A GPU older and smaller than the one at hand: `pytest --as-ampere`, of search, attention, offload and workers.

Kernels are compiled for compute capability 8.0, by the driver from there on, and have no more shared memory than the
smallest of such GPUs give a block (those of 8.6 and 8.9). Without a device, what is emulated has no more either.
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
    """From here on; what has been planned and compiled before stays as it was."""
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
    """As `csattn.cuda._module`."""
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
