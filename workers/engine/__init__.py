"""Decode steps: on a GPU by where a context's index and KV lie: device, host, or both; on the CPU all is in place."""

from workers.engine.answer import answer, question_tokens
from workers.engine.cpu_engine import CpuEngine
from workers.engine.far_rows import CachedRows, DeviceRows
from workers.engine.gpu_engine import GpuEngine
from workers.engine.memory import PLACEMENTS, Placement
from workers.engine.on_device import SearchOnDevice
from workers.engine.on_host import SearchOnHost
from workers.engine.opening import open_engine
from workers.engine.pool_searcher import PoolSearcher
from workers.engine.shape import EngineShape
from workers.engine.split_engine import SplitEngine

__all__ = [
    "PLACEMENTS",
    "CachedRows",
    "CpuEngine",
    "DeviceRows",
    "EngineShape",
    "GpuEngine",
    "Placement",
    "PoolSearcher",
    "SearchOnDevice",
    "SearchOnHost",
    "SplitEngine",
    "answer",
    "open_engine",
    "question_tokens",
]
