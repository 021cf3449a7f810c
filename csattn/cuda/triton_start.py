"""For kernels in Triton: how one starts while the one before it ends, as of `csattn.cuda.cuda_kernel`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """Before it, a kernel reads only what is older than the kernel in front, and writes nothing: that one has waited
    for all before it. After it, the next kernel may start. Every program calls it. Not EARLY: where it is interpreted,
    and on devices before Hopper.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
