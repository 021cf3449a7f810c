"""Answer one request on an engine: feed the question, then one step per token, text as it comes."""

import time
from collections.abc import Callable
from typing import Any

from csattn.errors import ContextError
from csattn.models.prompt import question_ids
from workers.engine.engine import Engine
from workers.generate import Answer


def answer(
    engine: Engine,
    question: str,
    max_new_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    context_id: int = 0,
    tail_id: int = 0,
) -> Answer:
    """Ask a question about one of the engine's contexts, greedily. on_text gets the answer in pieces as it comes.

    Raises ContextError when the question does not fit into the model's positions or the engine's tails.
    """
    artifact, tokenizer = engine.artifacts[context_id], engine.loaded.tokenizer
    wrapping = artifact.manifest.build_notes.get("wrapping", "none")
    ids = question_ids(tokenizer, artifact.token_ids, question, wrapping).tolist()
    context_len = artifact.spec.context_len
    max_new_tokens = min(max_new_tokens, _room(engine, context_len, len(ids)))
    stop_ids = _stop_ids(engine.loaded.model)
    text = _Text(tokenizer, on_text)
    started = time.perf_counter()
    output = engine.runner.prefill(ids, context_id, context_len, tail_id)
    token_id = int(output.next_ids[0])
    first_token_s = time.perf_counter() - started
    token_ids = [token_id]
    text.add(token_id)
    engine.runner.fill(1, [token_id], [context_len + len(ids)], [context_id], [tail_id], [len(ids) + 1])
    while len(token_ids) < max_new_tokens and token_ids[-1] not in stop_ids:
        token_id = int(engine.runner.step(1).next_ids[0])
        token_ids.append(token_id)
        text.add(token_id)
        if len(token_ids) < max_new_tokens:
            engine.runner.advance(1)
    ended = time.perf_counter()
    num_seen = len(ids) + len(token_ids) - 1
    mean_tail = (num_seen + 1) / 2
    return Answer(
        text=text.finish(),
        token_ids=token_ids,
        selector="csattn",
        question_len=len(ids),
        first_token_s=first_token_s,
        tokens_per_s=(len(token_ids) - 1) / max(ended - started - first_token_s, 1e-9),
        rows_read_per_step=_rows_read(engine, context_len) + mean_tail,
        rows_full_attention=context_len + mean_tail,
        search_ms_per_step=None,
    )


def _room(engine: Engine, context_len: int, question_len: int) -> int:
    """New tokens that positions and tails have room for; the last one is never fed back."""
    positions = engine.loaded.geometry.max_positions - context_len - question_len
    tail = engine.shape.tail_capacity - question_len + 1
    if min(positions, tail) < 1:
        raise ContextError(
            f"context and question have {context_len + question_len} tokens together, the model has "
            f"{engine.loaded.geometry.max_positions} positions and a request {engine.shape.tail_capacity} rows of its "
            "own; ask a shorter question"
        )
    return min(positions, tail)


def _rows_read(engine: Engine, context_len: int) -> int:
    """Rows of the context that a step attends to."""
    search = engine.shape.search
    resident = min(context_len, search.sink_len + search.window_len)
    return resident + min(search.top_k(context_len), context_len - resident)


def _stop_ids(model: Any) -> set[int]:
    """The tokens at which the model ends its turn."""
    ids = model.generation_config.eos_token_id
    return set(ids) if isinstance(ids, list) else {ids} - {None}


class _Text:
    """Token ids as text, passed on as soon as no further token can change it."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._token_ids: list[int] = []
        self._told = 0

    def add(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        text = self._decode()
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            self._on_text(text[self._told :])
            self._told = len(text)

    def finish(self) -> str:
        text = self._decode()
        self._on_text(text[self._told :])
        return text.strip()

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        return text
