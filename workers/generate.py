"""Answer one request: run `model.generate` over a session and say what it read and how fast it was."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TextStreamer

from workers.decode import Observer
from workers.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said, and the price."""

    text: str
    token_ids: list[int]
    selector: str
    question_len: int
    first_token_s: float  # from the request to the first token: the question's own prefill
    tokens_per_s: float  # after the first
    rows_read_per_step: float  # rows of context and tail attended to, mean over layers
    rows_full_attention: float  # what full attention would have read
    search_ms_per_step: (
        float | None
    )  # all layers; a step that looks ahead does not wait for all of it; unknown on a GPU

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


@torch.inference_mode()
def answer(
    session: Session,
    question: str,
    max_new_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    observer: Observer | None = None,
) -> Answer:
    """Ask a question about the session's context, greedily. on_text gets the answer in pieces as it comes.

    Raises ContextError when the question does not fit into the model's positions.
    """
    arguments = session.ask(question, observer)
    tokenizer, request = session.loaded.tokenizer, arguments["past_key_values"]
    prompt_len = arguments["input_ids"].shape[1]
    streamer = _Streamer(tokenizer, on_text)
    started = time.perf_counter()
    whole = session.loaded.model.generate(
        **arguments, max_new_tokens=session.room_for(prompt_len, max_new_tokens), do_sample=False, streamer=streamer
    )
    ended = time.perf_counter()
    token_ids = whole[0, prompt_len:].tolist()
    # The last token is never fed back, so the request has seen all but it.
    num_seen = prompt_len - len(session.artifact.token_ids) + len(token_ids) - 1
    num_layers = len(request.decoders)
    context_len = session.view.context_len
    return Answer(
        text=tokenizer.decode(token_ids, skip_special_tokens=True).strip(),
        token_ids=token_ids,
        selector=session.selector,
        question_len=prompt_len - context_len,
        first_token_s=streamer.first_token_at - started,
        tokens_per_s=(len(token_ids) - 1) / max(ended - streamer.first_token_at, 1e-9),
        rows_read_per_step=(request.count.far_rows + request.count.near_rows) / (num_seen * num_layers),
        rows_full_attention=context_len + (num_seen + 1) / 2,
        search_ms_per_step=request.count.search_s * 1e3 / num_seen,
    )


class _Streamer(TextStreamer):  # type: ignore[misc]  # transformers is untyped
    """Passes finished words on, and notes when the first token came."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self.first_token_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt and not self.first_token_at:
            self.first_token_at = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)
