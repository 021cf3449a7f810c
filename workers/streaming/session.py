"""Unbounded generation with a transformers model: `model.generate(**session.start(ids))` or `session.tokens(ids)`."""

from collections.abc import Iterator
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE, AttendingCache
from csattn.models.attention_hook import attention_implementation
from csattn.models.description import describe
from csattn.models.loader import require_loaded
from csattn.models.rope import model_frequencies
from csattn.models.spec import ModelSpec
from csattn.models.unrotated import unrotated
from workers.engine.checks import require_token
from workers.model.rows import ids_of, require_tokens
from workers.streaming.config import StreamConfig
from workers.streaming.heavy_hitters import HeavyRows
from workers.streaming.places import Places
from workers.streaming.window import WindowRows

# Prefill chunk: tokens of a prompt that pass through the model together, and that attend together.
_BLOCK_LEN = 256


def can_stream(spec: ModelSpec) -> bool:
    """Whether the rows of all of a model's layers can be moved to other positions."""
    each = [layer.attention for layer in spec.layers]
    kinds = {(x.rope, x.reach, x.sinks, x.logit_cap, x.norms_after_rope) for x in each}
    alike = kinds == {(0, None, False, None, False)} and len(spec.indexed_layers) == spec.num_layers
    return alike and not spec.kv_sources and spec.ropes[0].temper is None


class StreamSession:
    """Lets a model keep only the rows that a `StreamConfig` describes. Any number of streams share a session.

    with StreamSession(loaded, StreamConfig(window_len=1020)) as session:
        for token_id in session.tokens(prompt_ids): ...
    """

    def __init__(self, loaded: LoadedModel, config: StreamConfig):
        """Raises ConfigError if the model has fewer positions than the rows need, or layers whose rows cannot be given
        other places."""
        require_loaded(loaded)
        if not isinstance(config, StreamConfig):
            raise ConfigError(f"the config of a stream is a StreamConfig, got {config!r}; give one")
        geometry, spec = loaded.geometry, describe(loaded.model.config)
        if not can_stream(spec):
            raise ConfigError(
                f"{loaded.name} has layers whose rows cannot be moved to other positions: without RoPE or with "
                "separate RoPE, with sinks, capped logits or norms after RoPE, with a state, latents or compressed "
                "rows, or that do not attend to all rows; stream with another model"
            )
        config.require_positions(geometry.max_positions)
        self.loaded = loaded
        self.config = config
        # places in the window are slots of a buffer that is a block longer: they may not exceed the model's positions
        self._block_len = min(_BLOCK_LEN, geometry.max_positions - config.window_len + 1)
        frequencies, _ = model_frequencies(loaded.model.model.rotary_emb)
        num_places = max(config.max_rows, config.window_len - 1 + self._block_len)
        self._places = Places(frequencies, num_places, loaded.device, spec.ropes[0].interleaved)
        self._attention = attention_implementation(loaded.model)
        self._unrotated = unrotated(loaded.model, self._is_own)
        self.is_open = False

    def __enter__(self) -> Self:
        if self.is_open:
            raise ConfigError("this session is open already; make another `StreamSession`")
        self._attention.__enter__()
        self._unrotated.__enter__()
        self.is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._unrotated.__exit__(*exc)
        self._attention.__exit__(*exc)

    def cache(self) -> "StreamCache":
        """Make an empty stream, to be passed to the model as `cache` (before transformers 5.24 `past_key_values`)."""
        return StreamCache([self._layer_rows() for _ in range(self.loaded.geometry.num_layers)], self)

    def start(self, token_ids: NDArray[np.int32]) -> dict[str, Any]:
        """Return arguments for `generate`. It keeps all token ids, so its memory grows; that of `tokens` does not."""
        ids = self._ids(token_ids)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: self.cache()}

    @torch.inference_mode()
    def tokens(self, token_ids: NDArray[np.int32], cache: "StreamCache | None" = None) -> Iterator[int]:
        """Continue token_ids [num_tokens] greedily, without end and without growing memory; yields the new ids.

        Raises ConfigError if token_ids is empty or not one row of integers, ContextError for an id that is not in the
        vocabulary, and ModelError if the greatest logit is NaN or infinite.
        """
        cache, ids = self.cache() if cache is None else cache, self._ids(token_ids)
        if not self._is_own(cache):
            raise ConfigError(f"a stream is a cache that this session has made, got {cache!r}; give `session.cache()`")
        for start in range(0, ids.shape[1], _BLOCK_LEN):
            logits = self._step(ids[:, start : start + _BLOCK_LEN], cache)
        while True:
            largest, next_id = logits[:, -1:].max(-1)  # `max` returns NaN if there is any
            yield require_token(int(next_id) if largest.isfinite() else -1)
            logits = self._step(next_id, cache)

    def _ids(self, token_ids: NDArray[np.int32]) -> Tensor:
        """Check the ids, and return them as [1, num_tokens] int64 on the model's device."""
        ids = ids_of(token_ids)
        require_tokens(ids.tolist(), self.loaded.geometry.vocab_size)
        return torch.from_numpy(ids.astype(np.int64))[None].to(self.loaded.device)

    def _step(self, ids: Tensor, cache: "StreamCache") -> Tensor:
        return self.loaded.model(ids, logits_to_keep=1, **{CACHE: cache}).logits  # type: ignore[no-any-return]

    def _is_own(self, cache: Any) -> bool:
        return isinstance(cache, StreamCache) and cache.session is self

    def _layer_rows(self) -> WindowRows | HeavyRows:
        geometry, config = self.loaded.geometry, self.config
        like = torch.empty(
            geometry.num_kv_heads, 0, geometry.head_dim, dtype=self.loaded.dtype, device=self.loaded.device
        )
        if config.policy == "window":
            return WindowRows(config.sink_len, config.window_len, self._block_len, like, self._places)
        return HeavyRows(config.heavy_len, config.window_len, self._block_len, like, self._places)


class StreamCache(AttendingCache):
    """One stream as a cache of transformers. Its layers take keys before RoPE (see `unrotated`)."""

    def __init__(self, rows: list[WindowRows | HeavyRows], session: StreamSession):
        super().__init__(rows)
        self.rows, self.session = rows, session

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Raises ConfigError while the session is not open, because keys would then be rotated and the model would not
        attend to these rows; and if an earlier step stopped midway, so that layers have different tokens."""
        if not self.session.is_open:
            raise ConfigError("the session of this stream has ended, or has not begun; continue in an open one")
        if layer_idx == 0 and (
            any(rows.is_step_open for rows in self.rows) or len({rows.kv_len for rows in self.rows}) > 1
        ):
            raise ConfigError("a step of this stream was left before its end; begin a new stream")
        return super().update(k, v, layer_idx, *args, **kwargs)

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError("a stream cannot go back to fewer tokens: it has not kept all rows; begin a new one")

    reset = crop

    def reorder_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError("a stream is one sequence, without beams and batches; begin a stream for each")

    batch_repeat_interleave = batch_select_indices = reorder_cache

    @property
    def num_tokens(self) -> int:
        return self.rows[0].kv_len

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the rows of all layers; constant from the first token on."""
        return sum(layer.num_bytes for layer in self.rows)
