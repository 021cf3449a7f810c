"""Decode steps: on a GPU by where a context's index and KV lie: device, host, or both; on the CPU all is in place."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.engine.cpu_engine import CpuEngine
    from workers.engine.gpu_engine import GpuEngine
    from workers.engine.split_engine import SplitEngine

__all__ = ["CpuEngine", "GpuEngine", "SplitEngine"]
_MODULES = {"CpuEngine": "cpu_engine", "GpuEngine": "gpu_engine", "SplitEngine": "split_engine"}


def __getattr__(name: str) -> Any:
    """Load an engine when it is asked for: what it is made of imports from here, too."""
    if name not in _MODULES:
        raise AttributeError(f"module 'workers.engine' has no attribute {name!r}")
    return getattr(import_module(f"workers.engine.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """With what is not loaded yet: completion asks for it."""
    return sorted({*globals(), *__all__})
