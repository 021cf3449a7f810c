"""Attention of whole decode steps on a GPU, by where a context's index and KV lie: on the device, the host, or both."""

from workers.engine.far_rows import CachedRows, DeviceRows
from workers.engine.on_device import SearchOnDevice
from workers.engine.shape import EngineShape

__all__ = ["CachedRows", "DeviceRows", "EngineShape", "SearchOnDevice"]
