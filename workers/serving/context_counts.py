"""How many contexts a service makes and how much it holds, as its measures have it: numbers that are there anyway."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BuildCounts:
    """Builds of one kind: those under way, and those that have failed since the service began."""

    num_waiting: int = 0  # for another build to end
    num_building: int = 0
    num_failed: int = 0


def _none() -> Mapping[str, BuildCounts]:
    return {"registered": BuildCounts(), "prompt": BuildCounts()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCounts:
    """Of one engine's contexts."""

    builds: Mapping[str, BuildCounts] = field(default_factory=_none)  # by who brought them
    loaded_bytes: int = 0
    loaded_budget: int | None = None  # None: as far as there is memory
    kept_bytes: int | None = None  # None: not known before one is built
    kept_budget: int = 0
