"""Answer one request on an engine that serves no other: the steps that a service would run for it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.errors import ContextError
from csattn.models import LoadedModel
from csattn.models.prompt import question_ids
from csattn.selector_names import SelectorName
from workers.engine.checks import require_token
from workers.engine.cpu.engine import CpuEngine
from workers.engine.fidelity import Observer
from workers.serving.drafts import MAX_DRAFT, Drafts, Ngrams, draft_lens
from workers.serving.step_engine import StepEngine, StepRow
from workers.serving.step_times import StepTimes
from workers.serving.text import TextStream, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A model's answer, and what it cost."""

    text: str
    token_ids: list[int]
    selector: str
    question_len: int
    first_token_s: float  # from the request to the first token: the question's own prefill
    tokens_per_s: float  # after the first
    num_steps: int  # that gave these; fewer than tokens if drafts were right
    rows_read_per_step: float  # rows of context and tail attended to, mean over layers
    rows_full_attention: float  # what full attention would have read
    search_ms_per_step: float | None  # sum over layers; with lookahead, steps do not wait for all of it; None on a GPU

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def question_tokens(loaded: LoadedModel, artifact: Artifact, question: str) -> list[int]:
    """Return the ids of the question as it follows the context.

    Raises ArtifactMismatchError if another model or tokenizer built it, and ContextError if the positions do not
    suffice.
    """
    # before another chat template refuses the messages, in its own words
    artifact.require_model(loaded.fingerprint, loaded.geometry, loaded.tokenizer_hash)
    wrapping = artifact.manifest.build_notes.get("wrapping", "none")
    ids: list[int] = question_ids(loaded.tokenizer, artifact.token_ids, question, wrapping).tolist()
    require_positions(loaded, artifact, len(ids))
    return ids


def require_positions(loaded: LoadedModel, artifact: Artifact, question_len: int) -> None:
    """Raise ContextError if the model's positions do not suffice for context, question and one token of an answer."""
    num_tokens, positions = artifact.spec.context_len + question_len, loaded.geometry.max_positions
    if num_tokens >= positions:
        raise ContextError(
            f"context and question have {num_tokens} tokens together, the model has {positions} positions; "
            "ask a shorter question"
        )


def answer(
    engine: StepEngine,
    loaded: LoadedModel,
    artifact: Artifact,
    config: SearchConfig,
    ids: list[int],  # of the question
    max_new_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    selector: SelectorName = "csattn",
    observer: Observer | None = None,  # on the CPU: sees the steps after the question
    on_read: Callable[[int, int], None] = lambda done, total: None,
    draft_tokens: int = MAX_DRAFT,  # most tokens that are guessed for one step, without an observer; 0: none
) -> Answer:
    """Answer a question about the artifact that the engine has loaded as context 0, greedily, while there is room.

    on_read gets how many of the question's tokens are processed, and of how many; then on_text gets the answer piece
    by piece. Raises ContextError if the engine has no room for the question, ModelError if logits are NaN or infinite.
    """
    engine.open(0, 0, config, selector)
    try:
        context_len, stream = artifact.spec.context_len, TextStream(loaded.tokenizer)
        room = min(engine.max_positions - context_len, engine.tail_capacity + 1)  # the last token is never fed back
        most, drafts = min(max_new_tokens, room - len(ids)), None
        if draft_tokens and observer is None and engine.takes_drafts(artifact, config, selector):
            prompt = Ngrams(np.asarray(ids, np.int32)), Ngrams(artifact.token_ids)
            drafts = Drafts(prompt, draft_tokens, loaded.stop_ids)
        searched_s = engine.counts().search_s
        started = time.perf_counter()
        token_ids = [_feed(engine, ids, on_read)]
        first_token_s = time.perf_counter() - started
        if observer is not None:
            assert isinstance(engine, CpuEngine), "what a step attends to is shown on the CPU"
            engine.observe(0, observer)
        on_text(stream.add(token_ids[0]))
        num_steps, times = 0, StepTimes()
        while len(token_ids) < most and token_ids[-1] not in loaded.stop_ids:
            num_steps += 1
            for token_id in _continued(engine, token_ids, drafts, most, times):
                token_ids.append(token_id)
                on_text(stream.add(token_id))
        ended = time.perf_counter()
        on_text(stream.finish())
        reading, counts = engine.reading(0), engine.counts()
        num_seen = len(ids) + len(token_ids) - 1
        search_ms = (counts.search_s - searched_s) * 1e3
        return Answer(
            text=decode(loaded.tokenizer, token_ids).strip(),
            token_ids=token_ids,
            selector=reading.selector,
            question_len=len(ids),
            first_token_s=first_token_s,
            tokens_per_s=(len(token_ids) - 1) / max(ended - started - first_token_s, 1e-9),
            num_steps=num_steps,
            rows_read_per_step=reading.rows,
            rows_full_attention=context_len + (num_seen + 1) / 2,
            search_ms_per_step=search_ms / num_seen if counts.attend_s else None,  # None: not timed separately
        )
    finally:
        engine.close_request(0)


def _continued(
    engine: StepEngine, token_ids: list[int], drafts: Drafts | None, most: int, times: StepTimes
) -> list[int]:
    """Run a step, and return the tokens that follow: one, and those of a draft that were right. most: of the answer."""
    if drafts is None:
        return [_feed(engine, token_ids[-1:])]
    draft = drafts.propose(token_ids, most - len(token_ids) - 1)
    (num_tokens,) = draft_lens([(drafts.chance, len(draft))], 1, engine.alike_rows, times)
    draft, started = draft[:num_tokens], time.perf_counter()
    rows = [StepRow(0, token_ids[-1]), *(StepRow(0, token_id, is_draft=True) for token_id in draft)]
    next_ids = engine.step(rows).next_ids.tolist()
    times.count_step()
    times.add(len(rows), time.perf_counter() - started)
    num_right = next((n for n, token_id in enumerate(draft) if token_id != next_ids[n]), len(draft))
    if num_right < len(draft):
        engine.drop_rows(0, len(draft) - num_right)
    return [require_token(token_id) for token_id in next_ids[: num_right + 1]]


def _feed(
    engine: StepEngine, token_ids: list[int], on_read: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Run these tokens and return the token that follows the last one."""
    *others, last = token_ids
    rows = [*(StepRow(0, token_id, wants_token=False) for token_id in others), StepRow(0, last)]
    for start in range(0, len(rows), engine.max_rows):
        on_read(start, len(rows))
        result = engine.step(rows[start : start + engine.max_rows])
    on_read(len(rows), len(rows))
    return require_token(int(result.next_ids[-1]))
