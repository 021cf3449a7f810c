"""Device work of a step that runs between two pieces of host work, as graphs of its own."""

from collections.abc import Callable, Hashable

import torch


class Replays:
    """Enqueues by a graph what it has enqueued before. On a CPU it just calls."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None

    def run(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """key: all that tells one piece of work from another, addresses included."""
        if key in self._graphs:
            self._graphs[key].replay()
            return
        enqueue()
        if self._on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                enqueue()
            self._graphs[key] = graph
