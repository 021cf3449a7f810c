"""Checks of contexts, requests and rows that all engines make before they accept them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn, Protocol, TypeVar

from csattn.artifact import Artifact
from csattn.errors import ConfigError, ContextError, ModelError
from workers.model.rows import require_tokens
from workers.serving.step_engine import StepRow

Found = TypeVar("Found")


class OpenRequest(Protocol):
    """What the engines' requests have in common."""

    @property
    def context_id(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def tail_len(self) -> int: ...


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


def require_new_context(context_id: int, loaded: Collection[int], artifact: Artifact, max_positions: int) -> None:
    """Raise if the number is taken, or if the model has no positions left after the context."""
    if context_id in loaded:
        raise ConfigError(f"context {context_id} is loaded already; remove it first, or use another number")
    if artifact.spec.context_len >= max_positions:
        raise ContextError(
            f"the context has {artifact.spec.context_len:,} rows and the model has {max_positions:,} positions: no "
            "question can follow it; build a shorter one"
        )


def loaded_context(context_id: int, contexts: Mapping[int, Found]) -> Found:
    """Return what is kept of a context. Raises ConfigError if it is not loaded."""
    if context_id not in contexts:
        raise ConfigError(f"there is no context {context_id}; load it first")
    return contexts[context_id]


def require_watch(watch: tuple[int, int] | None, num_rows: int, num_layers: int) -> None:
    """Raise ConfigError if they do not exist. watch: a row of the step, and a layer; None: nothing is watched."""
    if watch is not None and not (0 <= watch[0] < num_rows and 0 <= watch[1] < num_layers):
        raise ConfigError(
            f"row {watch[0]} of {num_rows} and layer {watch[1]} of {num_layers} cannot be watched; both count from 0"
        )


def require_rows_suffice(search_period: int) -> None:
    """Raise ConfigError if a request's next step needs more of the steps before it than the rows they wrote."""
    if search_period > 1:
        raise ConfigError(
            f"rows cannot be written to a request whose search_period is {search_period}: the choice that its next "
            "tokens reuse is not among them; use 1"
        )


def require_token(next_id: int) -> int:
    """Return a step's next id. Raises ModelError if it is no token: NaN or infinity was the largest logit."""
    if next_id < 0:
        raise ModelError(
            "the model's logits hold NaN or infinity; load it in bfloat16 or float32, or correct its weights"
        )
    return next_id
