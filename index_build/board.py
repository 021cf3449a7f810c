"""How far a build is. In a file of its own: the process that keeps the board needs neither torch nor transformers."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Outcome = Literal["built", "resumed", "reused", "failed"]


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


class BuildState(NamedTuple):
    """How far a build of a batch is."""

    context_len: int
    first_share: float  # of the context, where this run began: more than 0 when an earlier one was interrupted
    share: float  # of the context, in all layers
    where: str  # "layer 3/30 index"


class Board:
    """An actor that keeps how far each job is until it is asked for."""

    def __init__(self) -> None:
        self._latest: dict[int, BuildState] = {}

    def put(self, job_idx: int, state: BuildState) -> None:
        self._latest[job_idx] = state

    def take(self) -> dict[int, BuildState]:
        latest, self._latest = self._latest, {}
        return latest
