"""How far a build is. In a file of its own: the process that keeps the board needs neither torch nor transformers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build is. `done` and `total` count rows of prefill."""

    layer_idx: int
    num_layers: int
    phase: str  # "prefill", "index", or "write": the layer is written, or on its way to be
    done: int
    total: int

    @property
    def share(self) -> float:
        """Of all layers' prefill, 0 to 1."""
        return (self.layer_idx * self.total + self.done) / (self.num_layers * self.total)


class Board:
    """An actor that keeps where each job is until it is asked for."""

    def __init__(self) -> None:
        self._latest: dict[int, BuildProgress] = {}

    def put(self, job_idx: int, progress: BuildProgress) -> None:
        self._latest[job_idx] = progress

    def take(self) -> dict[int, BuildProgress]:
        latest, self._latest = self._latest, {}
        return latest
