"""Decode from a long, shared context: a few bits of every key, and the exact rows that matter.

This package is the method: configuration, the index and its tables, search, attention, selectors and the
on-disk artifact. It starts no process and moves no memory between devices; `index_build` writes artifacts,
`workers` decodes from them.
"""

import os

# libgomp reads this once, when it is loaded. By default its threads spin while they wait, and next to another busy
# process a fork-join then costs milliseconds instead of microseconds. Set it before torch, faiss or numba is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.2.0"
