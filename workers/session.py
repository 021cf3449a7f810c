"""Let a transformers model generate from an artifact: `model.generate(**session.ask("..."))`."""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock
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
from offload.codecs.formats import KvFormat
from workers.engine.answer import question_tokens, require_positions
from workers.engine.cpu_engine import CpuEngine
from workers.engine.fidelity import Observer
from workers.engine.opening import open_engine
from workers.interrupts import interrupts_wait
from workers.model.rows import ids_of, require_tokens
from workers.request_cache import RequestCache
from workers.serving.step_engine import StepRow
from workers.session_model import Method


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

    artifact: an open one, or the directory or URL of one. Raises ArtifactError when it cannot be read or was made for
    another model. kv_format: how the context's rows are kept in memory, q8_0, say; None: as the artifact maps them.
    host_budget_bytes: of the memory for them, or 64MiB, say, for contexts that are larger than memory; None: all that
    they take. placement: on a GPU, where index and KV lie: device, hybrid or host. options: num_slots, the requests at
    a time; tail_capacity, the tokens of one, question and answer; num_threads; with a placement on GPUs also
    num_devices, that share out the heads; slot_share, of the context's rows, that the device keeps where KV is on the
    host; and what else `GpuEngine` takes, as `CpuEngine` on the CPU.
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
    """Owns the engine that requests share. While it is open, the model hands their tokens to it. For any threads."""

    def __init__(
        self, loaded: LoadedModel, artifact: Artifact, config: SearchConfig, selector: str = "csattn", **options: Any
    ):
        """options: of `open_engine`."""
        self.loaded, self.artifact, self.config, self.selector = loaded, artifact, config, selector
        self.engine = open_engine(loaded, artifact, config, selector, **options)
        self._weights = Unchanged(loaded.model, loaded.name)
        # known also after the engine, which another thread may end at any time
        self._num_slots, self._max_rows = self.engine.num_slots, self.engine.max_rows
        self._max_positions, self._tail_capacity = self.engine.max_positions, self.engine.tail_capacity
        self._unused = deque(range(self._num_slots))
        self._given_back: deque[int] = deque()  # slots of requests that nobody holds any more; on any thread
        self._lock = Lock()  # the engine is used by one thread at a time
        self._has_begun = self._is_open = False

    def __enter__(self) -> Self:
        if self._has_begun:
            raise ConfigError("this session is open already, or has ended; open another with `csattn_session`")
        self._has_begun = True
        self._methods = [Method.begin_session(self.loaded.model, name) for name in ("forward", "generate")]
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            for method in self._methods:
                method.end_session()
            self.engine.close()
            del self.engine  # a name that outlives the block, as in a notebook, is not to hold a context's rows

    def __repr__(self) -> str:
        about = f"<Session of {self.loaded.name} over {self.artifact.spec.artifact_id}"
        if not self._is_open:
            return f"{about}, closed>"
        num_requests = self._num_slots - len(self._unused) - len(self._given_back)
        return f"{about}, {num_requests} of {self._num_slots} requests, open>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """What `copy` and `pickle` ask for."""
        raise ConfigError(
            "a session is neither copied nor sent to another process, for its threads and memory are this one's; open "
            "one there, over the same artifact"
        )

    def ask(self, question: str, observer: Observer | None = None) -> dict[str, Any]:
        """Arguments for `generate` that continue the context with a question, wrapped as the context was."""
        require_text("a question", question)
        ids = question_tokens(self.loaded, self.artifact, question)
        return self.continue_with(np.array(ids, np.int32), observer)

    def room_for(self, prompt_len: int, max_new_tokens: int) -> int:
        """As many new tokens as were asked for, or as there is room left for: for `generate`'s max_new_tokens.

        prompt_len: of the context and what has been said since, question and all: input_ids.shape[1].
        """
        context_len = self.artifact.spec.context_len
        require_at_least("prompt_len, the context included,", prompt_len, context_len)
        require_at_least("max_new_tokens", max_new_tokens, 0)
        self._require_open()
        room = min(self._max_positions, context_len + self._tail_capacity + 1)  # the last is never fed back
        return max(0, min(max_new_tokens, room - prompt_len))

    def require_room(self, prompt_len: int, max_new_tokens: int | None) -> None:
        """Raise ContextError where so many do not fit behind a prompt. None: at least one, how many nobody knows."""
        wanted = 1 if max_new_tokens is None else max_new_tokens
        room = self.room_for(prompt_len, wanted)
        if wanted > room:
            remedy = f"pass max_new_tokens of at most {room}" if room else "ask a shorter question"
            raise ContextError(
                f"{wanted} new tokens were asked for, and behind these {prompt_len} of context and question there is "
                f"room for {room}; {remedy}{self._or_more_room}"
            )

    def continue_with(
        self, token_ids: NDArray[np.integer[Any]] | Sequence[int], observer: Observer | None = None
    ) -> dict[str, Any]:
        """Arguments for `generate` that continue the context with given ids [num_tokens]: a request of its own."""
        new = ids_of(token_ids)
        require_tokens(new.tolist(), self.loaded.geometry.vocab_size)
        require_positions(self.loaded, self.artifact, len(new))
        ids = torch.from_numpy(np.concatenate([self.artifact.token_ids, new.astype(np.int64)]))[None]
        ids = ids.to(self.loaded.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            CACHE: self.request(observer),
        }

    def request(self, observer: Observer | None = None) -> RequestCache:
        """An empty request: a transformers cache that holds the context and no question yet.

        It has a slot of the engine as long as somebody holds it. observer: sees its steps, on the CPU.
        """
        with self._lock:
            self._require_open()
            slot = self._free_slot()
            self.engine.open(slot, 0, self.config, self.selector)  # type: ignore[arg-type]  # refuses others by name
            self._unused.popleft()
            request = RequestCache(self, slot, self._given_back)
            if observer is not None:
                if not isinstance(self.engine, CpuEngine):
                    raise ConfigError("steps are shown on the CPU; leave out the observer, or the placement")
                self.engine.observe(slot, observer)
        return request

    def feed(self, request: RequestCache, token_ids: list[int], first_wanted: int) -> Tensor:
        """Logits after the tokens from first_wanted on: [num_wanted, vocab_size] float32."""
        fed, size, logits = request.fed, self._max_rows, []
        with self._lock:
            self._require_open()
            if fed.has_failed:
                raise ConfigError("a step of this request has failed before; ask again for a new one")
            self._require_rows(len(fed.token_ids) + len(token_ids))
            fed.has_failed = True  # unless all goes well
            for start in range(0, len(token_ids), size):
                rows = [
                    StepRow(request.slot, token_id, asks=number >= first_wanted)
                    for number, token_id in enumerate(token_ids[start : start + size], start)
                ]
                with interrupts_wait():
                    result = self.engine.step(rows, want_logits=rows[-1].asks)
                fed.token_ids += token_ids[start : start + size]
                if result.logits is not None:
                    logits.append(torch.from_numpy(result.logits[max(0, first_wanted - start) :].copy()))
            fed.has_failed = False
        return torch.cat(logits)

    def require_unchanged(self) -> None:
        """Raise ModelError where the model would compute something else than requests do."""
        self._weights.require()

    @property
    def is_open(self) -> bool:
        """Whether requests can be decoded."""
        return self._is_open

    @cached_property
    def context_ids(self) -> list[int]:
        """The context's token ids."""
        ids: list[int] = self.artifact.token_ids.tolist()
        return ids

    def _require_open(self) -> None:
        if not self._is_open:
            raise ConfigError("this session has ended, or has not begun; ask again in an open session")

    def _require_rows(self, num_tokens: int) -> None:
        """num_tokens: of a request's own, with the new ones."""
        room = min(self._tail_capacity, self._max_positions - self.artifact.spec.context_len)
        if num_tokens > room:
            raise ContextError(
                f"a request would have {num_tokens} tokens of its own, question and answer, and there is room for "
                f"{room} behind this context; pass max_new_tokens of at most what `session.room_for` tells, or ask a "
                f"shorter question{self._or_more_room}"
            )

    @property
    def _or_more_room(self) -> str:
        """What else to do, if that is possible."""
        left = self._max_positions - self.artifact.spec.context_len
        return ", or open the session with more tail_capacity" if self._tail_capacity < left else ""

    def _free_slot(self) -> int:
        """The first of those that are free."""
        for tidy in (lambda: None, gc.collect):  # a request may be held by nothing but a cycle of references
            tidy()
            while self._given_back:
                slot = self._given_back.popleft()
                self.engine.close_slot(slot)
                self._unused.append(slot)
            if self._unused:
                return self._unused[0]
        raise ConfigError(
            f"this session has {self._num_slots} requests, as many as it has slots; let one go (a notebook "
            "keeps those that a cell has shown, until `%reset -f out`), or open the session with more num_slots"
        )
