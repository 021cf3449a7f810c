"""One way to compile a CPU kernel: without the GIL, cached on disk where there is a place to cache."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numba import njit
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numpy.typing import NDArray

from csattn.cpu.compile_turn import compile_in_turn
from csattn.cpu.source_stamp import source_stamp

Scalar = TypeVar("Scalar", bound=np.generic)
_PROCESS = uuid4().hex[:8]


def exact_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile lazily to machine code that releases the GIL.

    Every operation is rounded where it is written: results are the same on every machine. Kernels are serial: parallel
    callers bring their own threads, because numba's fallback threading layer aborts the process when two threads enter
    a parallel kernel at once.
    """
    return _compile(function)


def inlined_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `exact_kernel`, and made part of every kernel that calls it: what goes in and out stays in registers."""
    return _compile(function, forceinline=True)


def _compile(function: Callable[..., Any], **special: Any) -> Callable[..., Any]:
    """What Python calls. Kernels that call it find another version, without an entry for Python; neither has one for C.

    Making such entries would take a fifth of the time that compiling takes.
    """
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, **special}
    compiled = _cached(function, options)
    in_kernels = _cached(function, {**options, "no_cpython_wrapper": True}, ".in-kernels")
    compiled.in_kernels = in_kernels
    compiled.get_call_template, compiled.get_overload = in_kernels.get_call_template, in_kernels.get_overload
    kernel: Callable[..., Any] = compiled
    return kernel


def _cached(function: Callable[..., Any], options: dict[str, Any], version: str = "") -> Any:
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for a cache: read-only site-packages and home
        return njit(**options)(function)
    index = compiled._cache._cache_file
    index._index_name = index._index_name.replace(".nbi", f"{version}.nbi")
    index._index_path = str(Path(index._index_path).with_name(index._index_name))
    index._data_name_pattern = index._data_name_pattern.replace(".nbc", f"{version}.nbc")
    _share(compiled, function)
    return compiled


def c_function(function: Callable[..., Any], signature: Any) -> CFunc:
    """Compile now to a function of C, cached like a kernel; whoever has its `address` has to keep it."""
    options = {"nogil": True, "error_model": "numpy"}
    compiled = CFunc(function, normalize_signature(signature), locals={}, options=options)
    with suppress(RuntimeError):  # no writable place for a cache
        compiled.enable_caching()
        _share(compiled, function)
    compiled.compile()
    return compiled


def _share(compiled: Any, function: Callable[..., Any]) -> None:
    """Let other processes, and later ones, find it in the cache, as long as it is what its sources say."""
    _stamp(compiled, function)
    compile_in_turn(compiled, function.__code__.co_filename)


def _stamp(compiled: Any, function: Callable[..., Any]) -> None:
    """Let what is cached of it count only as long as all that is compiled in is what it was.

    An index of another version is not looked into: what it names may have moved since. Numba counts a kernel's files of
    machine code in an index that it writes first. Two processes that compile it for different types at once would give
    their files one name, and either would find the other's code there.
    """
    index = compiled._cache._cache_file
    index._version = index._version, source_stamp(function.__module__)
    index._data_name_pattern = index._data_name_pattern.replace(".nbc", f".{_PROCESS}.nbc")
    compiled._cache.save_overload = partial(_save_if_it_can_be, compiled._cache.save_overload)


def _save_if_it_can_be(save: Callable[..., None], *compiled: Any) -> None:
    """What cannot be kept is compiled all the same: it was seen, once and on a busy machine, that numba had no object
    code left of a kernel that it had just compiled."""
    with suppress(RuntimeError):
        save(*compiled)


def readonly(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """A read-only view for a kernel's inputs.

    Memory maps are read-only and numba compiles a version for each kind of array: this way there is one.
    """
    assert array.flags.c_contiguous, f"an array of shape {array.shape} must be contiguous, not strided {array.strides}"
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
