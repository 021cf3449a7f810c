"""Who searches on the CPU: threads of this process, or search workers in processes of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.search.workspace import TokenSelections
from offload.shared_memory import SharedMemory
from workers.searchers.step_searches import StepPlan


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class RowSearch:
    """Rows of one step that continue the same context and search it in the same way."""

    context_id: int
    q: NDArray[np.float32]  # [num_rows, num_q_heads, head_dim], after RoPE
    top_k: int
    sink_len: int
    window_len: int
    softmax_scale: float
    out: TokenSelections  # kv_indices [num_rows, num_index_heads, top_k]


class ContextSearcher(Protocol):
    """What is chosen does not depend on who searches."""

    def load(self, context_id: int, artifact: Artifact) -> None: ...

    def unload(self, context_id: int) -> None: ...

    def close(self) -> None: ...


class Searcher(ContextSearcher, Protocol):
    """One layer's searches at a time: `start`, then `finish`."""

    def start(self, layer_idx: int, searches: Sequence[RowSearch]) -> None:
        """Hand the searches over. Until `finish`, their arrays must be left alone."""
        ...

    def finish(self) -> None:
        """Return when every `out` is filled. Raises SearchLostError where that cannot be had any more."""
        ...


class StepSearcher(ContextSearcher, Protocol):
    """Whole steps at once, beside the device, each search as soon as its query is there."""

    def attach(self, memory: SharedMemory) -> None:
        """Queries, choices and flags lie in that memory."""
        ...

    def run_step(self, plan: StepPlan, since: int) -> bool:
        """Return when every choice is there; False if the step was given up. since: what flags count from."""
        ...
