"""The progress of builds. A module of its own, because the board's process needs neither torch nor transformers."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Outcome = Literal["built", "resumed", "reused", "failed"]


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """The progress of a build. `done` and `total` count rows of the current layer's prefill."""

    layer_idx: int
    num_layers: int
    phase: str  # "prefill", "index" or "write": the layer is written or queued for writing
    done: int
    total: int

    @property
    def share(self) -> float:
        """The share of the prefill of all layers that is done, 0 to 1."""
        return (self.layer_idx * self.total + self.done) / (self.num_layers * self.total)


class BuildState(NamedTuple):
    """The progress of a build in a batch."""

    context_len: int
    first_share: float  # the share that was done when this run began: more than 0 if an earlier run was interrupted
    share: float  # see `BuildProgress.share`
    where: str  # "layer 3/30 index"


class Board:
    """A Ray actor that keeps each job's latest progress until it is taken."""

    def __init__(self) -> None:
        self._latest: dict[int, BuildState] = {}

    def put(self, job_idx: int, state: BuildState) -> None:
        self._latest[job_idx] = state

    def take(self) -> dict[int, BuildState]:
        latest, self._latest = self._latest, {}
        return latest
