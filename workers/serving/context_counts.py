"""Counts of a service's contexts and builds for its metrics; all are known anyway, without any work."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BuildCounts:
    """Builds of one kind: those under way, and those that have failed since the service began."""

    num_waiting: int = 0  # waiting for another build to end
    num_building: int = 0
    num_failed: int = 0


def _none() -> Mapping[str, BuildCounts]:
    return {"registered": BuildCounts(), "prompt": BuildCounts()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCounts:
    """Builds, loaded bytes and kept bytes of one engine's contexts."""

    builds: Mapping[str, BuildCounts] = field(default_factory=_none)  # by origin: "registered" or "prompt"
    loaded_bytes: int = 0
    loaded_budget: int | None = None  # None: limited only by memory
    kept_bytes: int | None = None  # on disk, from prompts; None: unknown until one has been built
    kept_budget: int = 0
