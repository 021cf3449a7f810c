"""Let a transformers model generate from an artifact: `model.generate(**session.ask("..."))`."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig
from csattn.cpus import available_cpus
from csattn.errors import ConfigError, ContextError
from csattn.index import LayerIndex
from csattn.models import LoadedModel
from csattn.models.attending_cache import AttendingCache
from csattn.models.attention_hook import attention_implementation
from csattn.models.prompt import question_ids
from csattn.models.query import queries_before_rope, rotate_for
from csattn.rest import Moments, moments_of
from csattn.search import SearchPool
from csattn.selectors import (
    ContextView,
    Prepared,
    PreparedCentroids,
    PreparedSketch,
    prepare,
    resolve_rest,
    selector_for,
)
from csattn.sketch import SketchIndex
from offload.codecs.formats import KvFormat
from workers.context_layers import context_layers
from workers.context_store import open_store
from workers.decode import LayerDecoder, Observer, StepCount


@contextmanager
def csattn_session(
    loaded: LoadedModel,
    artifact: Artifact | Path | str,
    config: SearchConfig | None = None,
    selector: str = "csattn",
    kv_format: KvFormat | None = None,
    host_budget_bytes: int | None = None,
) -> Iterator["Session"]:
    """Decode from an artifact with `loaded.model.generate` until the block ends.

        with csattn_session(loaded, "store/3f2a...") as session:
            loaded.model.generate(**session.ask("Who keeps the inn?"), max_new_tokens=60)

    artifact: an open one, or the directory or URL of one. Raises ArtifactError when it cannot be read or was made for
    another model. kv_format: how the context's rows are kept in memory; None: as the artifact maps them.
    host_budget_bytes: of the memory for them, for contexts that are larger than memory; None: all that they take.
    """
    opened = open_artifact(artifact) if isinstance(artifact, str | Path) else artifact
    try:
        with Session(
            loaded,
            opened,
            config or SearchConfig(),
            selector,
            kv_format=kv_format,
            host_budget_bytes=host_budget_bytes,
        ) as session:
            yield session
    finally:
        if opened is not artifact:
            opened.close()


class Session:
    """Owns what requests share: the open artifact, its KV, and the threads that search."""

    def __init__(
        self,
        loaded: LoadedModel,
        artifact: Artifact,
        config: SearchConfig,
        selector: str = "csattn",
        num_threads: int | None = None,  # that search; all cores unless said
        kv_format: KvFormat | None = None,  # of the context's rows; None: as the artifact maps them
        host_budget_bytes: int | None = None,  # of host memory for the context's rows; None: all that they take
    ):
        artifact.require_model(loaded.fingerprint)
        artifact.require_tokenizer(loaded.tokenizer_hash)
        self.loaded = loaded
        self.artifact = artifact
        geometry, spec = loaded.geometry, artifact.manifest.spec
        self.view = ContextView(spec.context_len, loaded.model.model.layers[0].self_attn.scaling, config)
        self.selector = selector_for(selector, self.view)
        self.rest = resolve_rest(config, self.selector, spec.index_config.layout)
        self.store = open_store(artifact, self.view, self.selector, kv_format, host_budget_bytes)
        self._indexes = [artifact.layer_index(layer_idx) for layer_idx in range(geometry.num_layers)]
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="csattn-ahead")
        self._pool = SearchPool(num_threads or available_cpus())
        self._attention = attention_implementation(loaded.model)
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._attention.__enter__()
        self._hooks.append(self.loaded.model.model.register_forward_pre_hook(self._require_next, with_kwargs=True))
        if self.view.config.lookahead:
            for layer_idx, layer in enumerate(self.loaded.model.model.layers[:-1]):
                hook = _LookAhead(self, layer_idx, self._indexes[layer_idx].next_query)
                self._hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._attention.__exit__(kind, error, trace)
        self._ahead.shutdown(wait=True)
        self._pool.close()
        self.store.close()

    def ask(self, question: str, observer: Observer | None = None) -> dict[str, Any]:
        """Arguments for `generate` that continue the context with a question, wrapped as the context was."""
        wrapping = self.artifact.manifest.build_notes.get("wrapping", "none")
        ids = question_ids(self.loaded.tokenizer, self.artifact.token_ids, question, wrapping)
        return self.continue_with(ids, observer)

    def room_for(self, prompt_len: int, max_new_tokens: int) -> int:
        """As many new tokens as were asked for, or as the model has positions left."""
        return min(max_new_tokens, self.loaded.geometry.max_positions - prompt_len)

    def continue_with(self, token_ids: NDArray[np.int32], observer: Observer | None = None) -> dict[str, Any]:
        """Arguments for `generate` that continue the context with given ids [num_tokens]: a request of its own."""
        whole = np.concatenate([self.artifact.token_ids, token_ids])
        positions = self.loaded.geometry.max_positions
        if len(whole) >= positions:
            raise ContextError(
                f"context and question have {len(whole)} tokens together, the model has {positions} positions; "
                "ask a shorter question"
            )
        ids = torch.from_numpy(whole).long()[None]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "past_key_values": self.request(observer),
        }

    def request(self, observer: Observer | None = None) -> "RequestCache":
        """An empty request: a transformers cache that holds the context and no question yet."""
        count = StepCount()
        decoders = [
            LayerDecoder(
                layer_idx,
                self.store,
                self.prepared[layer_idx].selector(self.view),
                self.view,
                self._ahead,
                count,
                time.perf_counter,
                observer,
                self.rests[layer_idx],
            )
            for layer_idx in range(self.loaded.geometry.num_layers)
        ]
        return RequestCache(self, decoders, count)

    def _require_next(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model runs: tokens of a request follow those that it has, or `generate` was given it again."""
        cache, positions = kwargs.get("past_key_values"), kwargs.get("position_ids")
        if not isinstance(cache, RequestCache) or cache.session is not self or positions is None:
            return
        first, kv_len = int(positions[0, 0]), cache.get_seq_length()
        if first != kv_len:
            raise ConfigError(
                f"tokens at positions from {first} on do not follow a request of {kv_len}: it has been decoded "
                "already; ask again for a new one, or go on with all the tokens that it has"
            )

    @cached_property
    def rests(self) -> list[SketchIndex | Moments | None]:
        """What tells of the rows that are not chosen, per layer: once for all requests. None: they count nothing."""
        layers = range(self.loaded.geometry.num_layers)
        if self.rest == "moments":
            return [moments_of(self.store.stream(layer_idx, self.view.middle)) for layer_idx in layers]
        if self.rest == "none":
            return [None for _ in layers]
        return [index for index in self._indexes if isinstance(index, SketchIndex)]

    @cached_property
    def prepared(self) -> list[Prepared]:
        """What the selector has made of each layer of the context, once for all requests."""
        if self.selector == "csattn":
            return [self._prepare_index(index) for index in self._indexes]
        return [prepare(self.selector, layer) for layer in context_layers(self.loaded, self.artifact)]

    def _prepare_index(self, index: LayerIndex | SketchIndex) -> Prepared:
        if isinstance(index, SketchIndex):
            return PreparedSketch(index, self._pool)
        return PreparedCentroids(index, self._pool, self.loaded.geometry.num_q_heads)

    @property
    def index_bytes(self) -> int:
        """What the selector and attention to the rest hold beside the KV, all layers."""
        held = sum(prepared.index_bytes for prepared in self.prepared)
        is_counted = self.selector == "csattn" and self.rest == "sketch"  # it chooses by the same sketch
        return held + sum(rest.num_bytes for rest in self.rests if rest is not None and not is_counted)


class RequestCache(AttendingCache):
    """One request as transformers sees it: the context, and what the request adds to it."""

    def __init__(self, session: Session, decoders: list[LayerDecoder], count: StepCount):
        super().__init__(decoders)
        self.session = session
        self.decoders = decoders
        self.count = count


class _LookAhead:
    """Before a layer runs: tell the next layer's queries from this layer's input, and start their search."""

    def __init__(self, session: Session, layer_idx: int, next_query: NDArray[np.float32] | None):
        assert next_query is not None, f"layer {layer_idx} has no next_query"
        self._session, model = session, session.loaded.model
        self._next_layer = model.model.layers[layer_idx + 1]
        self._next_idx = layer_idx + 1
        weights = torch.tensor(next_query, dtype=model.dtype)
        self._matrix, self._offset = weights[:, :-1], weights[:, -1:]

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, RequestCache) or cache.session is not self._session:
            return  # another session of this model has hooks of its own
        hidden = args[0] if args else kwargs["hidden_states"]
        cos, sin = kwargs["position_embeddings"]
        early = queries_before_rope(self._next_layer, hidden[0])
        q = rotate_for(self._next_layer, early @ self._matrix + self._offset, cos[0], sin[0])
        cache.decoders[self._next_idx].look_ahead(q)
