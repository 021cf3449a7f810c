"""The configuration of a stream: which rows it keeps. Frozen, and validated once, when it is made."""

from dataclasses import dataclass
from typing import Literal

from csattn.checks import require_at_least
from csattn.errors import ConfigError

Policy = Literal["window", "h2o"]
POLICIES = ("window", "h2o")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """The rows that a token attends to: the last window_len, with its own, and a few older ones that are kept.

    The older ones are the first sink_len rows (`window`: StreamingLLM, arXiv:2309.17453) or, in each KV head, the
    heavy_len rows with the most accumulated attention (`h2o`: heavy hitters, arXiv:2306.14048). No more rows than these
    are ever kept. The published programs evict after a token has attended, so it sees one row more: their recent size
    of window_len - 1 corresponds to window_len here.
    """

    policy: Policy = "window"
    window_len: int = 1020
    sink_len: int = 4  # only for policy "window"
    heavy_len: int = 256  # only for policy "h2o"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown policy {self.policy!r}; choose one of {', '.join(POLICIES)}")
        require_at_least("window_len", self.window_len, 1)  # a token sees its own row
        require_at_least("sink_len", self.sink_len, 0)
        require_at_least("heavy_len", self.heavy_len, 0)

    @property
    def max_rows(self) -> int:
        """The greatest number of rows kept, which is the number of places (RoPE positions) among them."""
        return self.window_len + (self.sink_len if self.policy == "window" else self.heavy_len)

    def require_positions(self, max_positions: int) -> None:
        """Raise ConfigError if there are more places than the model has positions."""
        if self.max_rows > max_positions:
            raise ConfigError(
                f"a stream that keeps {self.max_rows} rows needs as many positions, and the model has "
                f"{max_positions}; ask for a shorter window"
            )
