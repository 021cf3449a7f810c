"""Compiled kernels work whether or not they can be cached."""

import errno
import os
from importlib import import_module

import pytest
from numba import types
from numba.core.caching import IndexDataCacheFile
from numba.core.codegen import CPUCodeLibrary

from csattn.cpu.jit import c_function, exact_kernel


def doubled(x):
    return 2 * x


KERNELS = """
from csattn.cpu.jit import exact_kernel

@exact_kernel
def doubled_twice(x):
    return doubled_once(doubled_once(x))

@exact_kernel
def doubled_once(x):
    return 2 * x
"""


def refuse(library: CPUCodeLibrary) -> bytes:
    raise RuntimeError(f"no compiled object yet for {library}")


def find_no_space(index: IndexDataCacheFile, file: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)


def test_a_kernel_can_be_called_from_python_and_from_kernels(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds in any order of calls, and where both versions come from the cache."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    (tmp_path / "doubling.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    kernels = import_module("doubling")
    assert kernels.doubled_twice(5) == 20 and kernels.doubled_once(5) == 10 and kernels.doubled_twice(5.0) == 20.0
    assert kernels.doubled_once.signatures == [(types.int64,)]
    assert kernels.doubled_once.in_kernels.signatures == [(types.int64,), (types.float64,)]
    for _ in range(2):
        again = exact_kernel(doubled)
        assert again.in_kernels.compile((types.int64,)) is not None
        assert again(21) == 42
        hits = [sum(kernel.stats.cache_hits.values()) for kernel in (again, again.in_kernels)]
    assert hits == [1, 1]


@pytest.mark.parametrize(
    ("of", "name", "fail"),
    [(CPUCodeLibrary, "_get_compiled_object", refuse), (IndexDataCacheFile, "_open_for_write", find_no_space)],
)
def test_a_kernel_that_cannot_be_cached_still_runs(tmp_path, monkeypatch: pytest.MonkeyPatch, of, name, fail) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(of, name, fail)
    assert exact_kernel(doubled)(21) == 42
    assert c_function(doubled, types.int64(types.int64)).ctypes(21) == 42
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_kernel_whose_cached_files_are_cut_off_is_compiled_and_cached_again(
    tmp_path, monkeypatch: pytest.MonkeyPatch, suffix: str, num_bytes: int
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    def run() -> int:
        kernel = exact_kernel(doubled)
        assert kernel(21) == 42 and c_function(doubled, types.int64(types.int64)).ctypes(21) == 42
        return sum(kernel.stats.cache_hits.values())

    assert (run(), run()) == (0, 1)
    files = list(tmp_path.rglob(f"*.{suffix}"))
    for file in files:
        os.truncate(file, num_bytes)
    assert files and (run(), run()) == (0, 1)
