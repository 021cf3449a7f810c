"""The options that all cases of a run share."""

from dataclasses import dataclass, replace

from bench.decode.widened import Heads
from csattn.config import SearchConfig
from csattn.models.spec import ModelSpec
from offload.codecs.formats import KvFormat

# the fields that identify a case; all other fields are measurements
KEY = (
    *("kind", "shape", "context_len", "batch_size", "variant", "placement", "schedule"),
    *("weights", "keep", "slots", "kv_codec", "as_ampere"),
)
SLOTS = 0.14  # share of a context's rows that a slot cache holds: the rows chosen in a step, with room to spare
EVERY_STEP, AHEAD = SCHEDULES = "every step", "one layer ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run."""

    shape: ModelSpec
    shape_name: str = ""  # recorded in each case if a run has several shapes
    search: SearchConfig
    ceilings: dict[str, float]  # see `gpu_timing.ceilings`
    seconds: float  # measuring time per figure
    num_steps: int = 192  # whole steps that are timed
    schedules: tuple[str, ...] = SCHEDULES  # of csattn's cases: those whose names begin with one of these
    slots: float | None = None  # share of a context's rows in the slot cache; None: SLOTS
    kv_format: KvFormat | None = None  # of contexts' rows in whole steps, where the engine keeps them; None: not coded
    is_shared: bool = False  # one context for all requests of a batch
    num_threads: int | None = None  # that search on the CPU if no workers do; None: one for each CPU
    as_ampere: bool = False  # treat the GPU as an older and smaller one: see tests/ampere.py

    def of_layers(self, num_layers: int) -> "Options":
        """Return these options for a shape of `num_layers` copies of its first searched layer."""
        layer = self.shape.layers[self.shape.indexed_layers[0]]
        return replace(self, shape=replace(self.shape, layers=(layer,) * num_layers))

    @property
    def heads(self) -> Heads:
        return Heads.of(self.shape)

    @property
    def num_layers(self) -> int:
        """The number of layers that are searched or attend to all rows."""
        return len(self.shape.indexed_layers)
