"""What all cases of a run have in common."""

from dataclasses import dataclass

from csattn.config import SearchConfig
from csattn.models.spec import ModelSpec
from offload.codecs.formats import KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a run."""

    shape: ModelSpec
    search: SearchConfig
    ceilings: dict[str, float]  # see `gpu_timing.ceilings`
    seconds: float  # of measuring, per figure
    num_steps: int = 192  # that are timed, of whole steps
    only_ahead: bool = False  # of our schedules
    kv_format: KvFormat | None = None  # of contexts' rows, in whole steps of ours
    is_shared: bool = False  # one context for all requests of a batch
