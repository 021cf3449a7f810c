"""What all cases of a run have in common."""

from dataclasses import dataclass

from csattn.config import SearchConfig
from csattn.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a run."""

    shape: ModelSpec
    search: SearchConfig
    ceilings: dict[str, float]  # see `gpu_timing.ceilings`
    seconds: float  # of measuring, per figure
    pinned_bytes: int  # host memory that streaming may pin
    num_steps: int = 192  # that are timed, of whole steps
    only_ahead: bool = False  # of our schedules
    is_shared: bool = False  # one context for all requests of a batch
