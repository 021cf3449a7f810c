"""An engine's open requests: what all engines keep of one, and the checks of their rows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from csattn.errors import ConfigError, ContextError
from workers.model.rows import require_tokens
from workers.serving.step_engine import StepRow


@dataclass(slots=True, kw_only=True)
class StepCount:
    """What a request has read so far, over all layers. A GPU counts only tokens and rows."""

    tokens: int = 0  # that steps computed; rows from `write_rows` do not count
    searches: int = 0
    search_bytes: int = 0  # read by searches
    rest_bytes: int = 0  # read by attention to the rest
    far_rows: float = 0.0  # fetched rows per head (top_k with csattn), summed over layers and tokens
    near_rows: float = 0.0  # near rows per head, summed likewise

    def add(self, more: "StepCount", times: int = 1) -> None:
        """Add another count; with times = -1, take it away."""
        self.tokens += times * more.tokens
        self.searches += times * more.searches
        self.search_bytes += times * more.search_bytes
        self.rest_bytes += times * more.rest_bytes
        self.far_rows += times * more.far_rows
        self.near_rows += times * more.near_rows


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """What all engines keep of a request."""

    context_id: int
    context_len: int
    tail_len: int = field(init=False, default=0)
    count: StepCount = field(init=False, default_factory=StepCount)
    drafted: list[StepCount] = field(init=False, default_factory=list)  # of the last step's drafts, part of `count`

    def add_row(self, tail_len: int, read: StepCount, is_draft: bool) -> None:
        """Add a row of a step, which sees tail_len rows of the tail, its own included."""
        self.tail_len = tail_len
        self.count.add(read)
        self.drafted = [*self.drafted, read] if is_draft else []

    def drop(self, num_rows: int) -> None:
        """Remove the last rows, drafts of the last step."""
        self.tail_len -= num_rows
        for _ in range(num_rows):
            self.count.add(self.drafted.pop(), -1)

    def rows_read(self, num_layers: int) -> float:
        """Return how many rows a token has read: the mean over tokens and layers."""
        return (self.count.far_rows + self.count.near_rows) / max(1, self.count.tokens * num_layers)


AnyRequest = TypeVar("AnyRequest", bound=OpenRequest)


class OpenRequests(dict[int, AnyRequest]):
    """An engine's open requests, by request slot. Raises ConfigError for a slot in which none is open."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_rows: int,  # of a step
        tail_capacity: int,
        max_positions: int,
        vocab_size: int,
    ) -> None:
        self._max_requests, self._max_rows = max_requests, max_rows
        self._tail_capacity, self._max_positions, self._vocab_size = tail_capacity, max_positions, vocab_size

    def __missing__(self, request_slot: int) -> NoReturn:
        raise ConfigError(f"request slot {request_slot} is not open; open it first")

    def require_free(self, request_slot: int) -> None:
        if not 0 <= request_slot < self._max_requests:
            raise ConfigError(f"there are request slots 0 to {self._max_requests - 1}, not {request_slot}")
        if request_slot in self:
            raise ConfigError(f"request slot {request_slot} is taken; close it first")

    def require_unused(self, context_id: int) -> None:
        """Raise ConfigError if a request uses the context."""
        users = [request_slot for request_slot, request in self.items() if request.context_id == context_id]
        if users:
            raise ConfigError(f"context {context_id} is in use in request slots {users}; close them first")

    def require_room(self, request_slot: int, num_new: int) -> None:
        """Raise ContextError if a request would outgrow its tail, or the model's positions."""
        request = self[request_slot]
        num_rows = request.tail_len + num_new
        room = min(self._tail_capacity, self._max_positions - request.context_len)
        if num_rows > room:
            raise ContextError(
                f"request slot {request_slot} would have {num_rows} rows of its own, and there is room for {room}; end "
                "the request, or ask a shorter question"
            )

    def seen_lens(self, rows: Sequence[StepRow]) -> list[int]:
        """Return how many rows of its tail each row of a step sees, its own included.

        Raises for rows that cannot be run, before anything changes.
        """
        if not 1 <= len(rows) <= self._max_rows:
            raise ConfigError(f"a step has 1 to {self._max_rows} rows, got {len(rows)}")
        require_tokens([row.token_id for row in rows], self._vocab_size)
        num_new, seen = Counter[int](), []
        for row in rows:
            num_new[row.request_slot] += 1
            seen.append(self[row.request_slot].tail_len + num_new[row.request_slot])
        for request_slot, number in num_new.items():
            self.require_room(request_slot, number)
        return seen
