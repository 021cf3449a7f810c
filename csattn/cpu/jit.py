"""How all CPU kernels are compiled: without the GIL, and cached on disk if there is a writable place."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numba import njit
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numpy.typing import NDArray

from csattn.cpu.compile_lock import compile_under_lock
from csattn.cpu.source_stamp import source_stamp

Scalar = TypeVar("Scalar", bound=np.generic)
_PROCESS = uuid4().hex[:8]


def exact_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile lazily to machine code that releases the GIL.

    Every operation is rounded as written, without fast-math, so results are the same on every machine. Kernels are
    serial: parallel callers bring their own threads, because numba's fallback threading layer aborts the process when
    two threads enter a parallel kernel at once.
    """
    return _compile(function)


def inlined_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `exact_kernel`, but inlined into every kernel that calls it: arguments and results stay in registers."""
    return _compile(function, forceinline=True)


def _compile(function: Callable[..., Any], **special: Any) -> Callable[..., Any]:
    """Compile two versions: one for callers in Python, and one for kernels, which has no Python wrapper.

    Neither has a C wrapper. Compiling these wrappers would take a fifth of the compile time.
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
    """Compile now to a C function, cached like a kernel. The caller keeps it alive as long as its `address` is used."""
    compiled = _cached_c_function(function, signature)
    compiled.compile()
    return compiled


def is_missing(function: Callable[..., Any], signature: Any) -> bool:
    """Whether `c_function` would have to compile it, and would keep it for other processes."""
    cache = (compiled := _cached_c_function(function, signature))._cache
    if isinstance(cache, NullCache):
        return False
    key = cache._index_key(compiled._sig, compiled._targetdescr.target_context.codegen())
    return key not in cache._cache_file._load_index()


def _cached_c_function(function: Callable[..., Any], signature: Any) -> CFunc:
    options = {"nogil": True, "error_model": "numpy"}
    compiled = CFunc(function, normalize_signature(signature), locals={}, options=options)
    with suppress(RuntimeError):  # no writable place for a cache
        compiled.enable_caching()
        _share(compiled, function)
    return compiled


def _share(compiled: Any, function: Callable[..., Any]) -> None:
    """Share the cached kernel with other processes, present and later, as long as its sources are the same."""
    _stamp(compiled, function)
    compile_under_lock(compiled, function.__code__.co_filename)


def _stamp(compiled: Any, function: Callable[..., Any]) -> None:
    """Make cached code valid only as long as all source that is compiled into it is the same.

    The stamp is part of the index's version, so numba does not read the rest of an old index, which may name things
    that have moved. File names include an id of the process: numba numbers a kernel's files of machine code in an index
    that it writes first, so two processes that compile the kernel for different types at once would use one file name,
    and one of them would load the other's code.
    """
    index = compiled._cache._cache_file
    index._version = index._version, source_stamp(function.__module__)
    index._data_name_pattern = index._data_name_pattern.replace(".nbc", f".{_PROCESS}.nbc")
    index._load_index = partial(_try_load, index._load_index, dict)
    index.load = partial(_try_load, index.load, lambda: None)
    index._save_index = partial(_save_index, index, index._save_index)
    compiled._cache.save_overload = partial(_try_save, compiled._cache.save_overload)


def _save_index(index: Any, save: Callable[..., None], overloads: dict[Any, str]) -> None:
    """Replace a kernel's index, and remove its files of machine code that the new one does not name: no process finds
    them, and as their names have other processes' ids, they would never be overwritten."""
    is_new = not os.path.exists(index._index_path)
    save(overloads)
    if is_new:
        return
    pattern = re.escape(index._data_name_pattern).replace(re.escape("{number:d}"), r"\d+")
    of_kernel = re.compile(pattern.replace(_PROCESS, "[0-9a-f]{8}"))
    for name in os.listdir(index._cache_path):
        if of_kernel.fullmatch(name) and name not in overloads.values():
            with suppress(OSError):  # another process has removed it
                os.remove(os.path.join(index._cache_path, name))


def _try_load(load: Callable[..., Any], absent: Callable[[], Any], *key: Any) -> Any:
    """Load from the cache. A file that is cut off, as after a power failure, counts as absent, and is written again."""
    try:
        return load(*key)
    except Exception:  # numba reads pickles, which raise anything
        return absent()


def _try_save(save: Callable[..., None], *compiled: Any) -> None:
    """Save compiled code to the cache, or go on without, for example because the disk is full.

    Once, on a busy machine, numba no longer had the object code of a kernel that it had just compiled.
    """
    with suppress(RuntimeError, OSError):
        save(*compiled)


def readonly(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """A read-only view of an input array for a kernel.

    Numba compiles a version for each kind of array. Memory maps are read-only, so with views there is only one version.
    """
    assert array.flags.c_contiguous, f"an array of shape {array.shape} must be contiguous, not strided {array.strides}"
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
