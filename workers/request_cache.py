"""A request of a session as transformers sees it: a cache that holds the context, and what the request adds to it."""

import weakref
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from csattn.errors import ConfigError
from csattn.models.attending_cache import AttendingCache
from workers.engine.cpu.engine import CpuEngine
from workers.engine.open_requests import StepCount

if TYPE_CHECKING:
    from workers.session import Session


class RequestCache(AttendingCache):
    """One request, whose rows are in the engine. It can be neither copied nor cropped."""

    def __init__(self, session: "Session", request_slot: int, freed_request_slots: deque[int]) -> None:
        """freed_request_slots: receives the slot when the request is garbage-collected."""
        self.session, self.request_slot = session, request_slot
        self.decoded = _DecodedTokens(session.artifact.spec.context_len)
        self.is_generating = False  # within a `generate` whose arguments were checked
        if isinstance(engine := session.engine, CpuEngine):  # a GPU counts no bytes
            request = engine.requests[request_slot]
            self.count: StepCount = request.count  # what it has read so far; also after the session has ended
            # bytes that its selector and attention to the rest hold besides the KV, all layers
            self.index_bytes = request.index_bytes
        super().__init__([self.decoded] * session.loaded.geometry.num_layers)
        weakref.finalize(self, freed_request_slots.append, request_slot)

    def __repr__(self) -> str:
        return f"<RequestCache of {self.decoded.kv_len} tokens, {len(self.decoded.token_ids)} of its own>"

    def begins(self, token_ids: list[int]) -> bool:
        """Whether token_ids begin with all ids of the context."""
        return self._num_of_context(token_ids) == self._context_len

    def new_among(self, token_ids: list[int]) -> list[int]:
        """Return those of a whole sequence's ids, the context's included, that the request does not have yet.

        Raises ConfigError if there are none, or if the ids before them are not those of the request.
        """
        same = self._num_of_context(token_ids)
        if same < self._context_len:
            how = f"which differ from the context's at position {same}" if same else "without the context's before them"
            raise ConfigError(
                f"{len(token_ids)} token ids were given to a request of a context of {self._context_len}, {how}; give "
                "a whole sequence, as `session.ask` and `continue_with` do: the context's ids, unchanged, and then "
                "the question's"
            )
        old, new = token_ids[self._context_len : self.decoded.kv_len], token_ids[self.decoded.kv_len :]
        if old != self.decoded.token_ids or not new:
            raise ConfigError(
                f"these {len(token_ids)} token ids do not follow a request of {self.decoded.kv_len}: it has been "
                "decoded already; ask again for a new one, or continue with all the tokens that it has"
            )
        return new

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"a request cannot go back to fewer tokens; {_ASK_AGAIN}")

    reset = crop

    def reorder_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"a request is one sequence, without beams and batches; {_ASK_AGAIN}")

    batch_repeat_interleave = batch_select_indices = reorder_cache

    def get_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Called by layers that keep a state, which append no rows."""
        raise ConfigError(_BY_ITS_OWN_MODEL)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Called by `copy` and `pickle`."""
        raise ConfigError(f"a request cannot be copied, because its session owns its rows; {_ASK_AGAIN}")

    @property
    def _context_len(self) -> int:
        return self.session.artifact.spec.context_len

    def _num_of_context(self, token_ids: list[int]) -> int:
        """Return how many leading token_ids are the context's."""
        pairs = zip(token_ids, self.session.context_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


_ASK_AGAIN = "ask again in its session: all its questions share the context's rows"
_BY_ITS_OWN_MODEL = (
    "a request is decoded by `model.generate` or `model(...)` of its own model, while its session is open; ask again "
    "in an open session"
)


class _DecodedTokens:
    """The tokens that the engine has of a request, as `AttendingRows` without rows of their own."""

    def __init__(self, context_len: int) -> None:
        self._context_len = context_len
        self.token_ids: list[int] = []  # the request's own
        self.has_failed = False

    @property
    def kv_len(self) -> int:
        return self._context_len + len(self.token_ids)

    def append(self, k: Tensor, v: Tensor) -> None:
        raise ConfigError(_BY_ITS_OWN_MODEL)

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        raise AssertionError("nothing is appended")
