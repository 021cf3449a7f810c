"""What all cases of a run have in common."""

from dataclasses import dataclass, replace

from bench.decode.widened import Heads
from csattn.config import SearchConfig
from csattn.models.spec import ModelSpec
from offload.codecs.formats import KvFormat

SLOTS = 0.14  # of a context: rows that a slot cache holds, and what is chosen at once with room to spare
EVERY_STEP, AHEAD = SCHEDULES = "every step", "one layer ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a run."""

    shape: ModelSpec
    shape_name: str = ""  # that cases tell, where a run has several shapes
    search: SearchConfig
    ceilings: dict[str, float]  # see `gpu_timing.ceilings`
    seconds: float  # of measuring, per figure
    num_steps: int = 192  # that are timed, of whole steps
    schedules: tuple[str, ...] = SCHEDULES  # of ours, which are told by how they begin
    slots: float | None = None  # of a context; None: SLOTS
    kv_format: KvFormat | None = None  # of contexts' rows, in whole steps of ours
    is_shared: bool = False  # one context for all requests of a batch
    num_threads: int | None = None  # that search on the CPU, where threads do; None: one for each CPU
    as_ampere: bool = False  # the GPU is taken for an older and smaller one: see tests/ampere.py

    def of_layers(self, num_layers: int) -> "Options":
        """The same of as many layers that are searched, and no others."""
        layer = self.shape.layers[self.shape.indexed_layers[0]]
        return replace(self, shape=replace(self.shape, layers=(layer,) * num_layers))

    @property
    def heads(self) -> Heads:
        return Heads.of(self.shape)

    @property
    def num_layers(self) -> int:
        """That are searched, or attend to everything."""
        return len(self.shape.indexed_layers)
