"""A stamp of the source that a kernel is compiled from, for caches of compiled kernels.

Numba drops a cached kernel when the kernel's own file changes. But the functions that it calls and the constants that
it uses are compiled into it as well, and come from other files. So a stamp covers everything that its module imports.
"""

import hashlib
import os
import re
import sys
from functools import cache
from pathlib import Path

_IMPORT = re.compile(rb"^\s*from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n#]+)|^\s*import\s+([\w.]+)", re.MULTILINE)


@cache
def source_stamp(module: str) -> str:
    """A digest of the module's source and of all modules of csattn and of its own package that it imports, directly or
    not."""
    packages = frozenset({b"csattn", module.split(".")[0].encode()})
    seen: set[str] = set()
    waiting = [*_files_of(module.encode())]
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting += [
                found for name in _imports(file) if name.split(b".")[0] in packages for found in _files_of(name)
            ]
    digests = b"".join(hashlib.sha256(_read(file)).digest() for file in sorted(seen))
    return hashlib.sha256(digests).hexdigest()


@cache
def _imports(file: str) -> tuple[bytes, ...]:
    """Names of modules that the file imports from, and of imported names that may be modules."""
    names: list[bytes] = []
    for package, imported, module in _IMPORT.findall(_read(file)):
        if module:
            names.append(module)
            continue
        names.append(package)
        names += [package + b"." + name for name in re.findall(rb"(\w+)(?:\s+as\s+\w+)?", imported)]
    return tuple(names)


@cache
def _files_of(name: bytes) -> tuple[str, ...]:
    """The existing files of the module and of its parent packages, as strings, which compare faster than paths."""
    top, *parts = name.decode().split(".")
    found: list[str] = []
    for root in getattr(sys.modules.get(top), "__path__", ()):
        places = [os.path.join(root, *parts[:depth], "__init__.py") for depth in range(len(parts) + 1)]
        found += [file for file in (*places, os.path.join(root, *parts) + ".py") if os.path.isfile(file)]
    return tuple(found)


@cache
def _read(file: str) -> bytes:
    return Path(file).read_bytes()
