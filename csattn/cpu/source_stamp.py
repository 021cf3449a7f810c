"""A stamp of the source that a kernel is compiled from, for caches of compiled kernels.

Numba drops a cached kernel when the kernel's own file changes. But the functions that it calls and the constants that
it uses are compiled into it as well, and come from other files. So a stamp covers everything that its module imports.
A module's packages do not count as imported: nothing in a kernel comes through them, and they import most of csattn.
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
    """A digest of the module's source, of all modules of csattn and of its own package that it imports, directly or
    not, and of their packages' own files."""
    packages = frozenset({b"csattn", module.split(".")[0].encode()})
    files, seen, waiting = set[str](), set[bytes](), [module.encode()]
    while waiting:
        name = waiting.pop()
        if name in seen or name.split(b".")[0] not in packages:
            continue
        seen.add(name)
        for place in _places(name):
            files.update(_files_of(place))
        for file in _files_of(name):
            waiting += _imports(file)
    digests = b"".join(hashlib.sha256(_read(file)).digest() for file in sorted(files))
    return hashlib.sha256(digests).hexdigest()


def _places(name: bytes) -> list[bytes]:
    """The names of the packages that a module is in, and its own."""
    parts = name.split(b".")
    return [b".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


@cache
def _imports(file: str) -> tuple[bytes, ...]:
    """Names of modules that the file imports from, and of imported names that may be modules."""
    names: list[bytes] = []
    for package, imported, module in _IMPORT.findall(_read(file)):
        if module:
            names += _places(module)  # all of them are reached by this import
            continue
        names.append(package)
        names += [package + b"." + name for name in re.findall(rb"(\w+)(?:\s+as\s+\w+)?", imported)]
    return tuple(names)


@cache
def _files_of(name: bytes) -> tuple[str, ...]:
    """The module's existing files, as strings, which compare faster than paths."""
    top, *parts = name.decode().split(".")
    places = [os.path.join(root, *parts) for root in getattr(sys.modules.get(top), "__path__", ())]
    files = [file for place in places for file in (os.path.join(place, "__init__.py"), place + ".py")]
    return tuple(filter(os.path.isfile, files))


@cache
def _read(file: str) -> bytes:
    return Path(file).read_bytes()
