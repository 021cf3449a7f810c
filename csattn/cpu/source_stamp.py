"""A stamp of the source that a kernel is compiled from, for caches of compiled kernels.

Numba forgets a cached kernel when the kernel's own file changes. What the kernel calls is compiled into it, and the
constants it uses are too, but they come from other files: a stamp covers all that its module imports.
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
    """A digest of the module's source and of what it imports of csattn and of its own package, however indirectly."""
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
    """Names of modules that the file's source imports from, and what may be modules among the imported names."""
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
    """The module's file and those of the packages around it, where they exist: as words, which compare faster."""
    top, *parts = name.decode().split(".")
    found: list[str] = []
    for root in getattr(sys.modules.get(top), "__path__", ()):
        places = [os.path.join(root, *parts[:depth], "__init__.py") for depth in range(len(parts) + 1)]
        found += [file for file in (*places, os.path.join(root, *parts) + ".py") if os.path.isfile(file)]
    return tuple(found)


@cache
def _read(file: str) -> bytes:
    return Path(file).read_bytes()
