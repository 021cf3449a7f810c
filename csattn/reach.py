"""The reach of local layers, which attend to a sliding window or to a chunk instead of all rows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far back a token of a local layer attends: to a window that ends with it, or to the start of its chunk."""

    num_rows: int  # rows of the window, the token's own included, or of a chunk
    chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at `position` attends to."""
        return position - position % self.num_rows if self.chunked else max(0, position + 1 - self.num_rows)
