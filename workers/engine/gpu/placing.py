"""Plans a GPU's memory and captures steps when the first context or request arrives."""

import gc

import torch

from csattn.artifact import Artifact
from csattn.config import IndexConfig
from csattn.errors import ConfigError
from offload.errors import MemoryPlanError
from workers.engine.gpu.on_host import StepSearcher
from workers.engine.gpu.placed_model import PlacedModel, Progress
from workers.engine.gpu.sizing import Sizing
from workers.engine.gpu.step_model import StepModel


class Placing:
    """Owns the placed model, once there is one. While it is unused, it is planned again for a context that does not
    fit."""

    def __init__(
        self,
        sizing: Sizing,
        index_config: IndexConfig,  # assumed until there is a context
        searcher: StepSearcher | None,
        device: torch.device,
        on_progress: Progress,
    ) -> None:
        self._sizing, self._index_config, self._searcher = sizing, index_config, searcher
        self.device, self._on_progress = device, on_progress
        self.placed: PlacedModel | None = None

    def ready(self) -> PlacedModel:
        if self.placed is None:
            raise ConfigError("no context is loaded and no request open yet; begin with one of them")
        return self.placed

    def start(self, model: StepModel) -> None:
        """Plan and load, if nothing is placed yet, for requests without a context."""
        if self.placed is None:
            self.placed = self._plan(model, None)

    def start_for(self, artifact: Artifact, model: StepModel, is_used: bool) -> PlacedModel:
        """Return the placed model, planned again if the context does not fit and no max_context_len is set.

        Raises MemoryPlanError, or ConfigError for another index, if it has to be planned again but is_used.
        """
        placed = self.placed
        if placed is not None and not placed.has_room_for(artifact) and self._sizing.max_context_len is None:
            if is_used:
                placed.require_same_index(artifact)
                raise MemoryPlanError(
                    f"the context has {artifact.spec.context_len:,} rows, and while others are in use, memory is "
                    f"planned for contexts of up to {placed.shape.max_context_len:,}; set engine.max_context_len"
                )
            self.close()
            placed = None
            gc.collect()  # reference cycles hold its memory
        if placed is None:
            placed = self.placed = self._plan(model, artifact)
        return placed

    def close(self) -> None:
        """Close the placed model, if there is one. No step may be in flight."""
        if self.placed is not None:
            self.placed.close()
            self.placed = None

    def _plan(self, model: StepModel, first: Artifact | None) -> PlacedModel:
        index_config = self._index_config if first is None else first.spec.index_config
        sizing, needed = self._sizing, 0 if first is None else first.spec.context_len
        longest = sizing.max_context_len or sizing.longest(
            index_config, needed, model.available(self.device).device_bytes
        )
        return PlacedModel(
            model,
            index_config,
            sizing.shape(index_config, longest),
            sizing.placement,
            device=self.device,
            num_cache_slots=sizing.num_cached(longest),
            searcher=self._searcher,
            on_progress=self._on_progress,
            first=first,
        )
