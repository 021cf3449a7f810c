"""Probes that need a process of their own: libraries may be broken, hang, or end the process that loads them.

    python -m workers.doctor.probes NAME [ARGUMENT]

prints one JSON object as its last line. An exception here is a finding of the caller: "cannot be loaded".
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from workers.garbage import reduce_gc


def probe_import(name: str) -> dict[str, Any]:
    return {"version": str(getattr(import_module(name), "__version__", "unknown"))}


def probe_numba() -> dict[str, Any]:
    """Compile a function, and see whether it can be cached on disk."""
    import numba

    def add_one(x: int) -> int:
        return x + 1

    try:
        compiled, keeps = numba.njit(cache=True)(add_one), True
    except RuntimeError:  # no writable place for a cache
        compiled, keeps = numba.njit(add_one), False
    assert compiled(1) == 2
    return {"version": numba.__version__, "keeps": keeps}


def probe_torch() -> dict[str, Any]:
    """Report torch, its GPUs, and whether host memory can be pinned for them."""
    import torch

    from csattn.cuda import missing_for_kernels

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": [], "pinning": None}
    if not torch.cuda.is_available():
        return found
    for idx in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(idx)
        free_bytes, total_bytes = torch.cuda.mem_get_info(idx)
        found["devices"].append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "free_bytes": free_bytes,
                "total_bytes": total_bytes,
                "missing": missing_for_kernels(idx),
            }
        )
    found["pinning"] = _pin()
    return found


def probe_memory() -> dict[str, Any]:
    from offload.budget import host_memory_bytes, locked_limit_bytes

    return {
        "available_bytes": host_memory_bytes(),
        "total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "locked_limit_bytes": locked_limit_bytes(),
    }


def probe_store(path: str) -> dict[str, Any]:
    """Report a store, or the directory in which it would be made."""
    from csattn.artifact import scan_store
    from csattn.artifact.manifest import FORMAT_VERSION

    store = Path(path)
    place = next(parent for parent in (store.absolute(), *store.absolute().parents) if parent.exists())
    found: dict[str, Any] = {"exists": store.exists(), "is_directory": place.is_dir(), "writable": False}
    found["format_version"] = FORMAT_VERSION
    if not place.is_dir():
        return found
    try:
        with tempfile.TemporaryFile(dir=place):
            found["writable"] = True
    except OSError as error:
        found["refusal"] = error.strerror
    found["free_bytes"] = shutil.disk_usage(place).free
    summaries, broken = scan_store(store)
    found["artifacts"] = len(summaries)
    found["size_bytes"] = sum(summary.size_bytes for summary in summaries)
    found["broken"] = {path.name: str(error) for path, error in broken.items()}
    return found


def probe_kept(path: str) -> dict[str, Any]:
    """Report what services have kept of prompts and turns, and its limit in the settings of this environment."""
    from workers.serving.kept_store import kept_files
    from workers.settings import load_settings

    kept = load_settings(None, os.environ, {}).settings.kept
    return {**asdict(kept_files(Path(path))), "most_bytes": kept.context_bytes + kept.disk_bytes}


def _pin() -> dict[str, Any]:
    """Pin host memory as the engine pins a context's KV."""
    import torch

    try:
        from offload.host_memory import allocate_rows
        from offload.pinned import PinnedRows

        rows = PinnedRows(allocate_rows(1, (1, 1024, 2, 128), torch.float32))
        pinned, how = rows.pinned, rows.how
        rows.close()
    except Exception as error:  # of any kind: the user should read it
        return {"pinned": False, "how": f"{type(error).__name__}: {error}"}
    return {"pinned": pinned, "how": how}


def probe_auto(given: str) -> dict[str, str]:
    """Report what `auto` stands for in the settings of a service."""
    from workers.auto import choose_for_service

    return choose_for_service(given)


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "auto": probe_auto,
    "import": probe_import,
    "kept": probe_kept,
    "memory": probe_memory,
    "numba": probe_numba,
    "store": probe_store,
    "torch": probe_torch,
}

if __name__ == "__main__":
    reduce_gc()
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
