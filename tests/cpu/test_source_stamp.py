"""A kernel is recompiled when anything that is compiled into it changes."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from csattn.cpu import source_stamp as module
from csattn.cpu.source_stamp import source_stamp

ROOT = Path(__file__).parent.parent.parent
KERNEL = """
import ctypes
from numba import types
from csattn.cpu.jit import c_function, exact_kernel
from near.constants import FACTOR
from near import helpers

@exact_kernel
def scaled(x):
    return helpers.twice(x) * FACTOR

def scaled_by_address(x):
    return helpers.twice(x) * FACTOR

if __name__ == "near.kernel":
    compiled = c_function(scaled_by_address, types.int64(types.int64))
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)(1) == scaled.py_func(1)
    print(scaled(1))
"""
HELPERS = """
from csattn.cpu.jit import exact_kernel

@exact_kernel
def twice(x):
    return {factor} * x
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Create a package of three files next to csattn: a kernel, a kernel that it calls, and a constant."""
    (tmp_path / "csattn").symlink_to(ROOT / "csattn")
    near = tmp_path / "near"
    near.mkdir()
    (near / "__init__.py").write_text("")
    (near / "kernel.py").write_text(KERNEL)
    (near / "helpers.py").write_text(HELPERS.format(factor=2))
    (near / "constants.py").write_text("FACTOR = 10\n")
    return near


def run(package: Path) -> int:
    """Return the kernel's result, computed in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(package.parent / "cache")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # or a file that changes twice in a second would be stale
    command = [sys.executable, "-c", "import near.kernel"]
    said = subprocess.run(command, env=environment, cwd=package.parent, capture_output=True, text=True, check=True)
    return int(said.stdout)


def test_a_change_in_an_imported_file_recompiles_the_kernel(package: Path) -> None:
    assert run(package) == 20
    (package / "helpers.py").write_text(HELPERS.format(factor=3))
    assert run(package) == 30
    (package / "constants.py").write_text("FACTOR = 7\n")
    assert run(package) == 21


def test_a_cache_index_that_names_moved_modules_is_ignored(package: Path) -> None:
    """An earlier version of the project may have left it: numba's version, then objects of modules that are gone."""
    run(package)
    indexes = list((package.parent / "cache").rglob("*.nbi"))
    for index in indexes:
        index.write_bytes(pickle.dumps(numba.__version__) + b"cnear.moved\nKind\n.")
    assert run(package) == 20
    assert indexes


def test_processes_that_compile_at_once_do_not_overwrite_each_others_code(package: Path) -> None:
    """Here, the second process has read the cache index before the first has written it."""
    run(package)
    first = {file: file.read_bytes() for file in (package.parent / "cache").rglob("*scaled-*.nbc")}
    for index in (package.parent / "cache").rglob("*.nbi"):
        index.unlink()
    (package / "kernel.py").write_text(KERNEL.replace("print(scaled(1))", "print(int(scaled(1.0)))"))
    assert run(package) == 20
    assert first and first.items() <= {file: file.read_bytes() for file in first}.items()
    assert len(list((package.parent / "cache").rglob("*scaled-*.nbc"))) == 2 * len(first)


def test_the_code_of_other_sources_is_removed_when_a_kernel_is_compiled_again(package: Path) -> None:
    def files() -> set[Path]:
        return set((package.parent / "cache").rglob("*.nbc"))

    run(package)
    before = files()
    (package / "helpers.py").write_text(HELPERS.format(factor=3))
    assert run(package) == 30
    assert len(files()) == len(before) and not files() & before
    (package / "kernel.py").write_text(KERNEL.replace("print(scaled(1))", "scaled(1.0), print(scaled(1))"))
    assert run(package) == 30
    now = files()
    (package / "kernel.py").write_text(KERNEL.replace("print(scaled(1))", "scaled(1), print(int(scaled(1.0)))"))
    assert run(package) == 30
    assert now and len(files()) == len(now)


@pytest.fixture
def stamp(package: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return the stamp of the package's kernel, as a new process computes it."""
    found = type(sys)("near")
    found.__path__ = [str(package)]
    monkeypatch.setitem(sys.modules, "near", found)

    def stamp() -> str:
        for cached in (source_stamp, module._imports, module._files_of, module._read):
            cached.cache_clear()
        return source_stamp("near.kernel")

    return stamp


def test_a_source_stamp_covers_imported_files_only(package: Path, stamp: Callable[[], str]) -> None:
    before = stamp()
    (package / "unused.py").write_text("nothing = 1\n")
    assert stamp() == before
    for name in ("kernel", "helpers", "constants", "__init__"):
        file = package / f"{name}.py"
        file.write_text(file.read_text() + "\n# another\n")
        assert stamp() != before
        before = stamp()


@pytest.mark.parametrize(
    ("statement", "covers"),
    [
        ("from near.package.module import FACTOR", False),  # what else the package imports does not matter
        ("from near.package import FACTOR", True),
        ("from near.package import module", True),
        ("import near.package.module", True),
    ],
)
def test_a_source_stamp_covers_what_a_package_imports_if_names_come_from_it(
    package: Path, stamp: Callable[[], str], statement: str, covers: bool
) -> None:
    (package / "package").mkdir()
    (package / "package" / "__init__.py").write_text("from near.origin import FACTOR\n")
    (package / "package" / "module.py").write_text("FACTOR = 3\n")
    (package / "origin.py").write_text("FACTOR = 5\n")
    (package / "constants.py").write_text(f"{statement}\n")
    before = stamp()
    (package / "origin.py").write_text("FACTOR = 7\n")
    assert (stamp() != before) == covers
    before = stamp()
    (package / "package" / "module.py").write_text("FACTOR = 4\n")
    assert (stamp() != before) == ("module" in statement)


def test_the_source_stamp_of_score_covers_plan() -> None:
    files = {file for name in module._imports(str(ROOT / "csattn/search/score.py")) for file in module._files_of(name)}
    assert str(ROOT / "csattn/search/plan.py") in files
