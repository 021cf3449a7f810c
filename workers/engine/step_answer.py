"""Answer one request on a `StepEngine` that has nothing else to do: the steps that a service would make for it."""

import time
from collections.abc import Callable

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.errors import ContextError
from csattn.models import LoadedModel
from csattn.models.prompt import question_ids
from offload.codecs.formats import KvFormat
from workers.engine.cpu_engine import CpuEngine
from workers.engine.slots import require_token
from workers.generate import Answer
from workers.serving.step_engine import StepEngine, StepRow
from workers.serving.text import TextStream, decode

MAX_ROWS = 16  # tokens of the question that are fed at a time


def answer_on_cpu(
    loaded: LoadedModel,
    artifact: Artifact,
    config: SearchConfig,
    question: str,
    max_new_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    num_threads: int | None = None,
    kv_format: KvFormat | None = None,
) -> Answer:
    """Ask a question about an artifact, greedily. on_text gets the answer in pieces as it comes.

    kv_format: how the context's rows are kept. Raises ContextError when the question does not fit into the model's
    positions.
    """
    wrapping = artifact.manifest.build_notes.get("wrapping", "none")
    ids = question_ids(loaded.tokenizer, artifact.token_ids, question, wrapping).tolist()
    context_len, positions = artifact.spec.context_len, loaded.geometry.max_positions
    room = positions - context_len - len(ids)
    if room < 1:
        raise ContextError(
            f"context and question have {context_len + len(ids)} tokens together, the model has {positions} positions; "
            "ask a shorter question"
        )
    num_new = min(max_new_tokens, room)
    stream = TextStream(loaded.tokenizer)
    with CpuEngine(
        loaded,
        max_rows=MAX_ROWS,
        num_slots=1,
        tail_capacity=len(ids) + num_new,
        num_threads=num_threads,
        kv_format=kv_format,
    ) as engine:
        engine.add_context(0, artifact)
        engine.open(0, 0, config, "csattn")
        started = time.perf_counter()
        token_ids = [_feed(engine, ids)]
        first_token_s = time.perf_counter() - started
        on_text(stream.add(token_ids[0]))
        while len(token_ids) < num_new and token_ids[-1] not in loaded.stop_ids:
            token_ids.append(_feed(engine, token_ids[-1:]))
            on_text(stream.add(token_ids[-1]))
        ended = time.perf_counter()
        request, search_s = engine.request(0), engine.counts().search_s
    on_text(stream.finish())
    num_seen = len(ids) + len(token_ids) - 1  # the last token is never fed back
    mean_tail = (num_seen + 1) / 2
    return Answer(
        text=decode(loaded.tokenizer, token_ids).strip(),
        token_ids=token_ids,
        selector=request.selector,
        question_len=len(ids),
        first_token_s=first_token_s,
        tokens_per_s=(len(token_ids) - 1) / max(ended - started - first_token_s, 1e-9),
        rows_read_per_step=request.longest_list + mean_tail,
        rows_full_attention=context_len + mean_tail,
        search_ms_per_step=search_s * 1e3 / num_seen,
    )


def _feed(engine: StepEngine, token_ids: list[int]) -> int:
    """What follows the last of these tokens."""
    for start in range(0, len(token_ids), engine.max_rows):
        result = engine.step([StepRow(0, token_id) for token_id in token_ids[start : start + engine.max_rows]])
    return require_token(int(result.next_ids[-1]))
