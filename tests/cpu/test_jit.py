"""What is compiled is of use whether it can be kept or not."""

import pytest
from numba import types
from numba.core.codegen import CPUCodeLibrary

from csattn.cpu.jit import c_function, exact_kernel


def doubled(x):
    return 2 * x


def refuse(library: CPUCodeLibrary) -> bytes:
    raise RuntimeError(f"no compiled object yet for {library}")


def test_a_kernel_that_cannot_be_kept_is_called_all_the_same(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CPUCodeLibrary, "_get_compiled_object", refuse)
    assert exact_kernel(doubled)(21) == 42
    assert c_function(doubled, types.int64(types.int64)).ctypes(21) == 42
    assert not list(tmp_path.rglob("*.nbc"))
