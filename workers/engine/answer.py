"""Answer one request on an engine: feed the question, then one step per token, text as it comes."""

import time
from collections.abc import Callable

from csattn.errors import ContextError
from csattn.models.prompt import question_ids
from workers.engine.engine import Engine
from workers.engine.slots import require_token
from workers.generate import Answer
from workers.serving.text import TextStream, decode


def answer(
    engine: Engine,
    question: str,
    max_new_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    context_id: int = 0,
    tail_id: int = 0,
) -> Answer:
    """Ask a question about one of the engine's contexts, greedily. on_text gets the answer in pieces as it comes.

    Raises ContextError when the question does not fit into the model's positions or the engine's tails, ModelError when
    the model gives no numbers.
    """
    artifact, tokenizer = engine.artifacts[context_id], engine.loaded.tokenizer
    wrapping = artifact.manifest.build_notes.get("wrapping", "none")
    ids = question_ids(tokenizer, artifact.token_ids, question, wrapping).tolist()
    context_len = artifact.spec.context_len
    max_new_tokens = min(max_new_tokens, _room(engine, context_len, len(ids)))
    stop_ids = engine.loaded.stop_ids
    stream = TextStream(tokenizer)
    started = time.perf_counter()
    output = engine.runner.prefill(ids, context_id, context_len, tail_id)
    token_id = require_token(int(output.next_ids[0]))
    first_token_s = time.perf_counter() - started
    token_ids = [token_id]
    on_text(stream.add(token_id))
    engine.runner.fill(1, [token_id], [context_len + len(ids)], [context_id], [tail_id], [len(ids) + 1])
    while len(token_ids) < max_new_tokens and token_ids[-1] not in stop_ids:
        token_id = require_token(int(engine.runner.step(1).next_ids[0]))
        token_ids.append(token_id)
        on_text(stream.add(token_id))
        if len(token_ids) < max_new_tokens:
            engine.runner.advance(1)
    ended = time.perf_counter()
    on_text(stream.finish())
    num_seen = len(ids) + len(token_ids) - 1
    mean_tail = (num_seen + 1) / 2
    return Answer(
        text=decode(tokenizer, token_ids).strip(),
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
