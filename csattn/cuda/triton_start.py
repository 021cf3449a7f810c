"""Programmatic dependent launch for kernels in Triton: like `early_start` of `csattn.cuda.cuda_kernel`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """Wait for earlier kernels, then let the next kernel start. Every program of the kernel calls this.

    Before this call, a kernel writes nothing, and reads only what was written before the kernel ahead of it: that one
    has waited for all kernels before it. EARLY is false in the interpreter and on devices before Hopper.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
