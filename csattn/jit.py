"""One way to compile a CPU kernel: without the GIL, cached on disk where there is a place to cache."""

from collections.abc import Callable
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile lazily to machine code that releases the GIL.

    NaN is legal input to no kernel (inputs are checked where they enter), so arithmetic may be reordered.
    Kernels are serial: parallel callers bring their own threads, because numba's fallback threading layer
    aborts the process when two threads enter a parallel kernel at once.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no writable place for a cache: read-only site-packages and home
        return njit(**options)(function)  # type: ignore[no-any-return]
