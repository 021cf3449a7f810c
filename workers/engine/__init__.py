"""Attention of whole decode steps on a GPU, by where a context's index and KV lie: on the device, the host, or both."""

from workers.engine.answer import answer
from workers.engine.engine import Engine
from workers.engine.far_rows import CachedRows, DeviceRows
from workers.engine.memory import PLACEMENTS, Placement
from workers.engine.on_device import SearchOnDevice
from workers.engine.on_host import SearchOnHost
from workers.engine.shape import EngineShape

__all__ = [
    "PLACEMENTS",
    "CachedRows",
    "DeviceRows",
    "Engine",
    "EngineShape",
    "Placement",
    "SearchOnDevice",
    "SearchOnHost",
    "answer",
]
