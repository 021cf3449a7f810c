"""Layers that do not attend to everything: how far back their tokens see."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far back a token of a local layer sees: all rows of a window that ends with it, or those of its chunk."""

    num_rows: int  # the window's, the token's own included; or the chunk's
    chunked: bool = False

    def first_seen(self, position: int) -> int:
        """The first position that the token at that position sees."""
        return position - position % self.num_rows if self.chunked else max(0, position + 1 - self.num_rows)
