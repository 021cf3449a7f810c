"""Let a transformers model generate from an artifact: `model.generate(**session.ask("..."))`."""

import gc
import inspect
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.attending_cache import AttendingCache
from offload.codecs.formats import KvFormat
from workers.engine.answer import question_tokens, require_positions
from workers.engine.cpu_context import CpuRequest, StepCount
from workers.engine.cpu_engine import CpuEngine
from workers.engine.fidelity import Observer
from workers.engine.opening import open_engine
from workers.engine.slots import require_room
from workers.serving.step_engine import StepRow


@contextmanager
def csattn_session(
    loaded: LoadedModel,
    artifact: Artifact | Path | str,
    config: SearchConfig | None = None,
    selector: str = "csattn",
    kv_format: KvFormat | None = None,
    host_budget_bytes: int | None = None,
    placement: str = "cpu",
    **options: Any,
) -> Iterator["Session"]:
    """Decode from an artifact with `loaded.model.generate` until the block ends.

        with csattn_session(loaded, "store/3f2a...") as session:
            loaded.model.generate(**session.ask("Who keeps the inn?"), max_new_tokens=60)

    artifact: an open one, or the directory or URL of one. Raises ArtifactError when it cannot be read or was made for
    another model. kv_format: how the context's rows are kept in memory; None: as the artifact maps them.
    host_budget_bytes: of the memory for them, for contexts that are larger than memory; None: all that they take.
    placement: on a GPU, where index and KV lie: device, hybrid or host. options: num_slots, the requests at a time;
    tail_capacity, the tokens of one, question and answer; and others of the engine.
    """
    opened = open_artifact(artifact) if isinstance(artifact, str | Path) else artifact
    try:
        kept = {"kv_format": kv_format, "host_budget_bytes": host_budget_bytes, "placement": placement}
        with Session(loaded, opened, config or SearchConfig(), selector, **kept, **options) as session:
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
        self._unused = deque(range(self.engine.num_slots))
        self._given_back: deque[int] = deque()  # slots of requests that nobody holds any more; on any thread
        self._lock = Lock()  # the engine is used by one thread at a time
        self._is_open = False

    def __enter__(self) -> Self:
        self._forward = _Forward.of(self.loaded.model)
        self._forward.num_sessions += 1
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._forward.end_session()
        with self._lock:
            self._is_open = False
            self.engine.close()

    def ask(self, question: str, observer: Observer | None = None) -> dict[str, Any]:
        """Arguments for `generate` that continue the context with a question, wrapped as the context was."""
        ids = question_tokens(self.loaded, self.artifact, question)
        return self.continue_with(np.array(ids, np.int32), observer)

    def room_for(self, prompt_len: int, max_new_tokens: int) -> int:
        """As many new tokens as were asked for, or as there is room left for."""
        context_len, engine = self.artifact.spec.context_len, self.engine
        room = min(engine.max_positions, context_len + engine.tail_capacity + 1)  # the last is never fed back
        return min(max_new_tokens, room - prompt_len)

    def continue_with(self, token_ids: NDArray[np.int32], observer: Observer | None = None) -> dict[str, Any]:
        """Arguments for `generate` that continue the context with given ids [num_tokens]: a request of its own."""
        require_positions(self.loaded, self.artifact, len(token_ids))
        ids = torch.from_numpy(np.concatenate([self.artifact.token_ids, token_ids])).long()[None].to(self.loaded.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "past_key_values": self.request(observer),
        }

    def request(self, observer: Observer | None = None) -> "RequestCache":
        """An empty request: a transformers cache that holds the context and no question yet.

        It has a slot of the engine as long as somebody holds it. observer: sees its steps, on the CPU.
        """
        with self._lock:
            slot = self._free_slot()
            self.engine.open(slot, 0, self.config, self.selector)  # type: ignore[arg-type]  # refuses others by name
            self._unused.popleft()
            request = RequestCache(self, slot)
            if observer is not None:
                if not isinstance(self.engine, CpuEngine):
                    raise ConfigError("steps are shown on the CPU; leave out the observer, or the placement")
                self.engine.observe(slot, observer)
        return request

    def feed(self, request: "RequestCache", token_ids: list[int], first_wanted: int) -> Tensor:
        """Logits after the tokens from first_wanted on: [num_wanted, vocab_size] float32."""
        fed, size, logits = request.fed, self.engine.max_rows, []
        with self._lock:
            if not self._is_open:
                raise ConfigError("this request's session has ended; ask again in an open session")
            if fed.has_failed:
                raise ConfigError("a step of this request has failed before; ask again for a new one")
            require_room(request.slot, fed.num_tokens + len(token_ids), self.engine.tail_capacity)
            fed.has_failed = True  # unless all goes well
            for start in range(0, len(token_ids), size):
                rows = [
                    StepRow(request.slot, token_id, asks=number >= first_wanted)
                    for number, token_id in enumerate(token_ids[start : start + size], start)
                ]
                result = self.engine.step(rows, want_logits=rows[-1].asks)
                fed.num_tokens += len(rows)
                if result.logits is not None:
                    logits.append(torch.from_numpy(result.logits[max(0, first_wanted - start) :].copy()))
            fed.has_failed = False
        return torch.cat(logits)

    @property
    def is_open(self) -> bool:
        """Whether requests can be decoded."""
        return self._is_open

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
            f"this session has {self.engine.num_slots} requests, as many as it has slots; let one go, or open the "
            "session with more num_slots"
        )


class RequestCache(AttendingCache):
    """One request as transformers sees it: the context, and what the request adds to it. The rows are the engine's."""

    def __init__(self, session: Session, slot: int) -> None:
        self.session, self.slot = session, slot
        self.fed = _Fed(session.artifact.spec.context_len)
        super().__init__([self.fed] * session.loaded.geometry.num_layers)
        weakref.finalize(self, session._given_back.append, slot)

    @property
    def count(self) -> StepCount:
        """What it has read so far."""
        return self._on_cpu.count

    @property
    def index_bytes(self) -> int:
        """What its selector and attention to the rest hold beside the KV, all layers."""
        return self._on_cpu.index_bytes

    @property
    def _on_cpu(self) -> CpuRequest:
        assert isinstance(self.session.engine, CpuEngine), "on a GPU it is not counted"
        return self.session.engine.request(self.slot)


class _Fed:
    """How much of a request the engine has: `AttendingRows` that are elsewhere."""

    def __init__(self, context_len: int) -> None:
        self._context_len = context_len
        self.num_tokens = 0
        self.has_failed = False

    @property
    def kv_len(self) -> int:
        return self._context_len + self.num_tokens

    def append(self, k: Tensor, v: Tensor) -> None:
        raise ConfigError(
            "a request is decoded by `model.generate` or `model(...)` of its own model, while its session is open; ask "
            "again in an open session"
        )

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        raise AssertionError("nothing is appended")


class _Forward:
    """A model's `forward` while sessions over it are open: requests go to their engines, all else as before."""

    def __init__(self, model: Any) -> None:
        self._model, self._before = model, model.__dict__.get("forward")
        self._forward, self._signature = model.forward, inspect.signature(model.forward)
        update_wrapper(self, model.forward)
        self.num_sessions = 0

    @classmethod
    def of(cls, model: Any) -> "_Forward":
        """The model's, put in its place if it is not."""
        if not isinstance(model.forward, cls):
            model.forward = cls(model)
        return model.forward

    def end_session(self) -> None:
        """Put back what was there, after the last, unless something else has been put there since."""
        self.num_sessions -= 1
        if self.num_sessions == 0 and self._model.__dict__.get("forward") is self:
            del self._model.forward
            if self._before is not None:
                self._model.forward = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(*args, **kwargs).arguments
        cache = given.get("past_key_values")
        if not (
            isinstance(cache, RequestCache) and cache.session.is_open and cache.session.loaded.model is self._model
        ):
            return self._forward(*args, **kwargs)
        return _decode(cache, {**given.pop("kwargs", {}), **given})


def _decode(cache: RequestCache, given: dict[str, Any]) -> CausalLMOutputWithPast | tuple[Any, ...]:
    """What `forward` gives for the next tokens of a request."""
    for name in ("inputs_embeds", "labels", "output_attentions", "output_hidden_states"):
        if given.get(name) is not None and given[name] is not False:
            raise ConfigError(f"a request of a session takes token ids and gives logits; leave out {name}")
    ids, positions, keep = given["input_ids"], given.get("position_ids"), given.get("logits_to_keep", 0)
    if ids.shape[0] != 1:
        raise ConfigError(
            f"a request is one sequence, got a batch of {ids.shape[0]}; make one request per sequence, "
            "without beams and with num_return_sequences=1"
        )
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise ConfigError("a request of a session attends to all of its tokens; leave out padding, and what masks it")
    kv_len = cache.get_seq_length()
    first = kv_len if positions is None else int(positions.flatten()[0]) if positions.numel() else None
    if ids.shape[1] == 0 or first != kv_len:
        raise ConfigError(
            f"tokens at positions from {first} on do not follow a request of {kv_len}: it has been decoded "
            "already; ask again for a new one, or go on with all the tokens that it has"
        )
    first_wanted = max(0, ids.shape[1] - keep) if isinstance(keep, int) and keep else 0
    logits = cache.session.feed(cache, ids[0].tolist(), first_wanted)
    if not isinstance(keep, int):
        logits = logits[keep.cpu()]
    out = CausalLMOutputWithPast(logits=logits[None].to(ids.device), past_key_values=cache)
    return out.to_tuple() if given.get("return_dict") is False else out
