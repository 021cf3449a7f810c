"""Continue a text without end in constant memory: text is passed on as tokens come, and not kept."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from csattn.checks import require_at_least, require_text
from csattn.models.prompt import text_ids
from workers.serving.text import TextStream
from workers.streaming.session import StreamSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Statistics of a finished stream. Its text went to the caller piece by piece."""

    policy: str
    prompt_len: int
    num_new_tokens: int
    ended: Literal["stop_token", "max_new_tokens"]
    max_rows: int  # the most that any token saw, in each KV head
    kv_bytes: int  # of all layers; constant during the stream
    first_token_s: float  # time to first token (TTFT): the prompt's prefill
    tokens_per_s: float  # after the first token

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def stream_text(
    session: StreamSession,
    prompt: str,
    max_new_tokens: int,  # the model may end its text earlier
    on_text: Callable[[str], None] = lambda text: None,
) -> Streamed:
    """Continue a prompt greedily. on_text gets the text in pieces as it comes.

    Raises ConfigError if the prompt holds no text or max_new_tokens is below 1, and ModelError if the greatest logit is
    NaN or infinite.
    """
    require_text("a prompt", prompt)
    require_at_least("max_new_tokens", max_new_tokens, 1)
    loaded, cache = session.loaded, session.cache()
    token_ids = np.asarray(text_ids(loaded.tokenizer, prompt), dtype=np.int32)
    text = TextStream(loaded.tokenizer)
    started = time.perf_counter()
    stream, num_new, stopped = session.tokens(token_ids, cache), 0, False
    while not stopped and num_new < max_new_tokens:
        token_id = next(stream)
        num_new += 1
        if num_new == 1:
            first_token_at = time.perf_counter()
        stopped = token_id in loaded.stop_ids
        if not stopped:
            on_text(text.add(token_id))
    on_text(text.finish())
    return Streamed(
        policy=session.config.policy,
        prompt_len=len(token_ids),
        num_new_tokens=num_new,
        ended="stop_token" if stopped else "max_new_tokens",
        max_rows=min(session.config.max_rows, len(token_ids) + num_new - 1),
        kv_bytes=cache.num_bytes,
        first_token_s=first_token_at - started,
        tokens_per_s=(num_new - 1) / max(time.perf_counter() - first_token_at, 1e-9),
    )
