"""Engines that run decode steps: on the CPU in place; on a GPU with index and KV on the device, the host, or both."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.engine.cpu.engine import CpuEngine
    from workers.engine.gpu.engine import GpuEngine
    from workers.engine.gpu.split_engine import SplitEngine

__all__ = ["CpuEngine", "GpuEngine", "SplitEngine"]
_MODULES = {"CpuEngine": "cpu.engine", "GpuEngine": "gpu.engine", "SplitEngine": "gpu.split_engine"}


def __getattr__(name: str) -> Any:
    """Import an engine on first access: its parts import from this package, too."""
    if name not in _MODULES:
        raise AttributeError(f"module 'workers.engine' has no attribute {name!r}")
    return getattr(import_module(f"workers.engine.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """List names that are not imported yet, too, for tab completion."""
    return sorted({*globals(), *__all__})
