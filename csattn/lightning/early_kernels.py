"""Triton kernels that start while the kernel before them ends, as CUDA C kernels do: see `csattn.cuda.cuda_kernel`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(device: torch.device) -> dict[str, Any]:
    """To be passed to every launch of a kernel that calls `wait_for_earlier`; an interpreted one starts when called."""
    return {"EARLY": True, "launch_pdl": True} if device.type == "cuda" else {"EARLY": False}


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """Before it, a kernel reads and writes nothing; after it, the next kernel may start. Every program calls it."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
