"""Let a transformers model generate from an artifact: `model.generate(**session.ask("..."))`."""

import gc
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact, open_artifact
from csattn.checks import require_at_least, require_text
from csattn.config import SearchConfig
from csattn.errors import ConfigError, ContextError
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE
from csattn.models.unchanged import Unchanged
from csattn.torch_modes import without_modes
from offload.codecs.formats import KvFormat
from workers.engine.answer import question_tokens, require_positions
from workers.engine.cpu.engine import CpuEngine
from workers.engine.fidelity import Observer
from workers.engine.opening import open_engine
from workers.interrupts import interrupts_wait
from workers.model.rows import ids_of, require_tokens
from workers.request_cache import RequestCache
from workers.serving.step_engine import StepRow
from workers.session_model import METHODS, Method


@contextmanager
def csattn_session(
    loaded: LoadedModel,
    artifact: Artifact | Path | str,
    config: SearchConfig | None = None,
    selector: str = "csattn",
    kv_format: KvFormat | str | None = None,
    host_budget_bytes: int | str | None = None,
    placement: str = "cpu",
    **options: Any,
) -> Iterator["Session"]:
    """Decode from an artifact with `loaded.model.generate` until the block ends.

        with csattn_session(loaded, "store/3f2a...") as session:
            loaded.model.generate(**session.ask("Who keeps the inn?"), max_new_tokens=60)

    artifact: an open one, or its directory or URL. Raises ArtifactError if it cannot be read or was made for another
    model. kv_format: the format of the context's rows in memory, such as q8_0; None: as the artifact maps them.
    host_budget_bytes: memory for these rows, as a number or a size like 64MiB, for contexts larger than memory; None:
    as much as they take. placement: cpu, or where index and KV are for a GPU: device, hybrid or host.

    options: max_requests, the number of concurrent requests; tail_capacity, the most tokens of a request, question and
    answer; num_threads; on GPUs also num_devices, which divide the heads, and slot_share, the share of the context's
    rows that the device caches if KV is on the host; and other arguments of `GpuEngine` or, on the CPU, `CpuEngine`.
    """
    opened = open_artifact(artifact) if isinstance(artifact, str | Path) else artifact
    try:
        kept = {"kv_format": kv_format, "host_budget_bytes": host_budget_bytes, "placement": placement}
        search = SearchConfig() if config is None else config
        with Session(loaded, opened, search, selector, **kept, **options) as session:
            yield session
    finally:
        if opened is not artifact:
            opened.close()


class Session:
    """Owns the engine that requests share. While it is open, the model passes their tokens to it. Thread-safe."""

    @without_modes()
    def __init__(
        self, loaded: LoadedModel, artifact: Artifact, config: SearchConfig, selector: str = "csattn", **options: Any
    ):
        """options: those of `open_engine`."""
        self.loaded, self.artifact, self.config, self.selector = loaded, artifact, config, selector
        self.engine = open_engine(loaded, artifact, config, selector, **options)
        self._weights = Unchanged(loaded.model, loaded.name)
        # copied from the engine, which another thread may close at any time
        self._max_requests, self._max_rows = self.engine.max_requests, self.engine.max_rows
        self._max_positions, self._tail_capacity = self.engine.max_positions, self.engine.tail_capacity
        self._unused = deque(range(self._max_requests))
        self._freed_request_slots: deque[int] = deque()  # of garbage-collected requests; appended by any thread
        self._lock = Lock()  # the engine is used by one thread at a time
        self._user: int | None = None  # id of that thread
        self._has_begun = self.is_open = False  # the latter: requests can be decoded
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        if self._has_begun:
            raise ConfigError("this session is open already, or has ended; open another with `csattn_session`")
        self._has_begun = True
        model = self.loaded.model
        self._methods = [Method.begin_session(model, name) for name in METHODS if hasattr(model, name)]
        self.is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        with self._own_turn():
            if not self.is_open:
                return
            self.is_open = False
            for method in self._methods:
                method.end_session()
            self.engine.close()
            del self.engine  # a name that outlives the block, as in a notebook, must not hold a context's rows

    def __repr__(self) -> str:
        about = f"<Session of {self.loaded.name} over {self.artifact.spec.artifact_id}"
        if not self.is_open:
            return f"{about}, closed>"
        num_requests = self._max_requests - len(self._unused) - len(self._freed_request_slots)
        return f"{about}, {num_requests} of {self._max_requests} requests, open>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Called by `copy` and `pickle`."""
        raise ConfigError(
            "a session cannot be copied or sent to another process, because its threads and memory belong to this "
            "one; open one there, over the same artifact"
        )

    def ask(self, question: str, observer: Observer | None = None) -> dict[str, Any]:
        """Return the arguments of `generate` for a question, wrapped in the chat template if the context was."""
        require_text("a question", question)
        ids = question_tokens(self.loaded, self.artifact, question)
        return self.continue_with(np.array(ids, np.int32), observer)

    def room_for(self, prompt_len: int, max_new_tokens: int) -> int:
        """Return max_new_tokens, or fewer if a request has room for fewer: a value for `generate`'s max_new_tokens.

        prompt_len: tokens of the context and of all that follows it, question included: input_ids.shape[1].
        """
        context_len = self.artifact.spec.context_len
        require_at_least("prompt_len, the context included,", prompt_len, context_len)
        require_at_least("max_new_tokens", max_new_tokens, 0)
        self._require_open()
        room = min(self._max_positions, context_len + self._tail_capacity + 1)  # the last new token is never fed back
        return max(0, min(max_new_tokens, room - prompt_len))

    def require_room(self, prompt_len: int, max_new_tokens: int | None) -> None:
        """Raise ContextError if max_new_tokens do not fit after a prompt. None: unknown, and one has to fit."""
        wanted = 1 if max_new_tokens is None else max_new_tokens
        room = self.room_for(prompt_len, wanted)
        if wanted > room:
            remedy = f"pass max_new_tokens of at most {room}" if room else "ask a shorter question"
            raise ContextError(
                f"{wanted} new tokens were requested, and after these {prompt_len} of context and question there is "
                f"room for {room}; {remedy}{self._or_more_room}"
            )

    def continue_with(
        self, token_ids: NDArray[np.integer[Any]] | Sequence[int], observer: Observer | None = None
    ) -> dict[str, Any]:
        """Return the arguments of `generate` for a request that continues the context with token_ids [num_tokens]."""
        new = ids_of(token_ids)
        require_tokens(new.tolist(), self.loaded.geometry.vocab_size)
        require_positions(self.loaded, self.artifact, len(new))
        ids = torch.from_numpy(np.concatenate([self.artifact.token_ids, new.astype(np.int64)]))[None]
        ids = ids.to(self.loaded.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: self.request(observer)}

    def request(self, observer: Observer | None = None) -> RequestCache:
        """Open an empty request: a transformers cache that holds the context and no question yet.

        It takes one of `max_requests` until it is garbage-collected. observer: sees its steps, on the CPU only.
        """
        self._require_own_process()
        with self._own_turn(), without_modes():
            self._require_open()
            request_slot = self._free_request_slot()
            self.engine.open(request_slot, 0, self.config, self.selector)  # type: ignore[arg-type]  # refuses others by name
            self._unused.popleft()
            request = RequestCache(self, request_slot, self._freed_request_slots)
            if observer is not None:
                if not isinstance(self.engine, CpuEngine):
                    raise ConfigError("steps are shown on the CPU; leave out the observer, or the placement")
                self.engine.observe(request_slot, observer)
        return request

    def feed(self, request: RequestCache, token_ids: list[int], first_wanted: int, kv_len: int) -> Tensor:
        """Feed tokens; return the logits after those from index first_wanted on, [num_wanted, vocab_size] float32.

        Raises ConfigError if the request has no longer the kv_len tokens that these ones follow.
        """
        decoded, size, logits = request.decoded, self._max_rows, []
        self._require_own_process()
        with self._own_turn(), without_modes():
            self._require_open()
            if decoded.has_failed:
                raise ConfigError("a step of this request has failed before; ask again for a new one")
            if decoded.kv_len != kv_len:
                raise ConfigError("another thread has decoded this request meanwhile; make one for each thread")
            self._require_rows(len(decoded.token_ids) + len(token_ids))
            decoded.has_failed = True  # until all steps have succeeded
            for start in range(0, len(token_ids), size):
                rows = [
                    StepRow(request.request_slot, token_id, wants_token=number >= first_wanted)
                    for number, token_id in enumerate(token_ids[start : start + size], start)
                ]
                with interrupts_wait():
                    result = self.engine.step(rows, want_logits=rows[-1].wants_token)
                decoded.token_ids += token_ids[start : start + size]
                if result.logits is not None:
                    logits.append(torch.from_numpy(result.logits[max(0, first_wanted - start) :].copy()))
            decoded.has_failed = False
        return torch.cat(logits)

    @without_modes()
    def require_unchanged(self) -> None:
        """Raise ModelError if the model has changed, so that it would compute something else than requests do."""
        self._weights.require()

    @cached_property
    def context_ids(self) -> list[int]:
        """The context's token ids."""
        ids: list[int] = self.artifact.token_ids.tolist()
        return ids

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Hold the lock. Raises ConfigError in a call from within the thread's own turn, which it would wait for."""
        if self._user == get_ident():
            raise ConfigError(
                "a session was used from within one of its steps, by an observer or a selector; use it after the step"
            )
        with self._lock:
            self._user = get_ident()
            try:
                yield
            finally:
                self._user = None

    def _require_open(self) -> None:
        if not self.is_open:
            raise ConfigError("this session has ended, or has not begun; ask again in an open session")

    def _require_own_process(self) -> None:
        """Raise ConfigError in a process that was forked since: it has none of the threads for which it would wait."""
        if os.getpid() != self._pid:
            raise ConfigError(
                "this process was forked from the one that opened this session, and the session's threads do not "
                "survive a fork; open another session in this process"
            )

    def _require_rows(self, num_tokens: int) -> None:
        """Raise ContextError if a request has no room for num_tokens of its own, the new ones included."""
        room = min(self._tail_capacity, self._max_positions - self.artifact.spec.context_len)
        if num_tokens > room:
            raise ContextError(
                f"a request would have {num_tokens} tokens of its own, question and answer, and there is room for "
                f"{room} after this context; pass max_new_tokens of at most what `session.room_for` returns, or ask a "
                f"shorter question{self._or_more_room}"
            )

    @property
    def _or_more_room(self) -> str:
        """A further remedy for an error message, if more tail_capacity would help."""
        left = self._max_positions - self.artifact.spec.context_len
        return ", or open the session with more tail_capacity" if self._tail_capacity < left else ""

    def _free_request_slot(self) -> int:
        """Return the first free request slot; those of garbage-collected requests become free here."""
        for tidy in (lambda: None, gc.collect):  # a request may be held only by a reference cycle
            tidy()
            while self._freed_request_slots:
                request_slot = self._freed_request_slots.popleft()
                self.engine.close_request(request_slot)
                self._unused.append(request_slot)
            if self._unused:
                return self._unused[0]
        raise ConfigError(
            f"this session has {self._max_requests} requests, as many as it may have; release one (a notebook keeps "
            "those that a cell has shown, until `%reset -f out`), or open the session with more max_requests"
        )
