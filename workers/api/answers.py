"""Events as OpenAI's objects: whole answers and the chunks of a stream, for chat and for plain text."""

import time
from typing import Any

from workers.api.asking import Asked
from workers.serving.messages import Done, Piece, TokenScore

LOWEST_LOGPROB = -9999.0  # as OpenAI has it where a token could not come; JSON has no infinity


class Form:
    """The objects of one answer: they share an id, a time and a model."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._has_logprobs = asked.ask.sampling.top_logprobs is not None
        self._num_chars = 0  # of the tokens told so far
        self._head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{asked.ask.request_id}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, text: str, scores: list[TokenScore], done: Done) -> dict[str, Any]:
        name = "chat.completion" if self._asked.is_chat else "text_completion"
        said: dict[str, Any] = {"text": text}
        if self._asked.is_chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **said, "logprobs": self._logprobs(scores), "finish_reason": done.reason}
        return {**self._head, "object": name, "choices": [choice], "usage": usage(done)}

    def first_chunk(self) -> dict[str, Any]:
        """What the stream of a chat begins with."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def piece_chunk(self, piece: Piece) -> dict[str, Any]:
        return self._chunk({"content": piece.text} if self._asked.is_chat else piece.text, list(piece.scores))

    def last_chunks(self, done: Done) -> list[dict[str, Any]]:
        """Why it ended, and what it took where that was asked for."""
        chunks = [self._chunk({} if self._asked.is_chat else "", reason=done.reason)]
        if self._asked.include_usage:
            chunks.append({**self._stream_head(), "choices": [], "usage": usage(done)})
        return chunks

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._asked.is_chat else "text_completion"}

    def _chunk(
        self, said: dict[str, Any] | str, scores: list[TokenScore] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta" if self._asked.is_chat else "text": said,
            "logprobs": self._logprobs(scores) if scores else None,
            "finish_reason": reason,
        }
        with_usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._stream_head(), "choices": [choice], **with_usage}

    def _logprobs(self, scores: list[TokenScore]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if self._asked.is_chat:
            return {"content": [_chat_score(score) for score in scores], "refusal": None}
        offsets = []
        for score in scores:
            offsets.append(self._num_chars)
            self._num_chars += len(score.text)
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [_finite(score.logprob) for score in scores],
            "top_logprobs": [{text: _finite(logprob) for text, _, logprob in score.top} for score in scores],
            "text_offset": offsets,
        }


def usage(done: Done) -> dict[str, Any]:
    """The context counts as read from a cache: no request computes it."""
    prompt_tokens = done.context_tokens + done.question_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": done.new_tokens,
        "total_tokens": prompt_tokens + done.new_tokens,
        "prompt_tokens_details": {"cached_tokens": done.context_tokens},
    }


def _chat_score(score: TokenScore) -> dict[str, Any]:
    top = [{"token": text, "logprob": _finite(logprob), "bytes": list(raw)} for text, raw, logprob in score.top]
    return {
        "token": score.text,
        "logprob": _finite(score.logprob),
        "bytes": _bytes_of(score),
        "top_logprobs": top,
    }


def _bytes_of(score: TokenScore) -> list[int] | None:
    """None where the token is a part of a character: its text does not tell which."""
    if "\ufffd" not in score.text:
        return list(score.text.encode())
    return next((list(raw) for text, raw, logprob in score.top if (text, logprob) == (score.text, score.logprob)), None)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN too
