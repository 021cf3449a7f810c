"""Events as OpenAI's objects: whole answers and the chunks of a stream, for chats and text completions."""

import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from workers.api.parsing import ParsedRequest
from workers.serving.messages import CallPart, Done, Event, Piece, TokenScore, Usage

LOWEST_LOGPROB = -9999.0  # OpenAI's value for a token that cannot come; JSON has no infinity


class CompletionForm:
    """Makes the objects of a chat or of text completions, whose answers share an id, a time and a model."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._parsed, self._is_chat = parsed, parsed.kind == "chat"
        self._has_logprobs = parsed.asks[0].sampling.top_logprobs is not None
        self._num_chars = [0] * len(parsed.asks)  # of each answer's tokens so far, without an incomplete one
        self._decoders = [getincrementaldecoder("utf-8")("replace") for _ in parsed.asks]
        self._dones: dict[int, Done] = {}  # of the answers of a stream that have ended
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{parsed.asks[0].request_id}",
            "created": int(time.time()),
            "model": parsed.model,
        }

    def whole(self, pieces: list[list[Piece]], dones: list[Done]) -> dict[str, Any]:
        """Return all answers in one object. pieces, dones: of each answer."""
        name = "chat.completion" if self._is_chat else "text_completion"
        choices = [self._choice(index, *answer) for index, answer in enumerate(zip(pieces, dones, strict=True))]
        return {**self._head, "object": name, "choices": choices, "usage": self._usage(dones)}

    def first(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Return the chunks before that of an answer's first event."""
        if not self._is_chat:
            return []
        used = None if (so_far := used_by(event)) is None else replace(so_far, new_tokens=0)
        return [self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, used=used)]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        if not self._is_chat:
            return [self._chunk(index, piece.text, list(piece.scores), used=piece.usage)]
        delta: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.text or not (piece.reasoning or piece.calls):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call_delta(part) for part in piece.calls]
        return [self._chunk(index, delta, list(piece.scores), used=piece.usage)]

    def last(self, index: int, done: Done) -> list[dict[str, Any]]:
        """Return the chunk that says why an answer ended and, after the last answer's, one with the usage of all, if it
        was requested."""
        chunks = [self._chunk(index, {} if self._is_chat else "", reason=done.reason, used=done)]
        self._dones[index] = done
        if self._parsed.include_usage and len(self._dones) == len(self._parsed.asks):
            dones = [self._dones[index] for index in range(len(self._dones))]
            chunks.append({**self._stream_head(), "choices": [], "usage": self._usage(dones)})
        return chunks

    def _choice(self, index: int, pieces: list[Piece], done: Done) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            calls = gathered(pieces)
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            if reasoning := "".join(piece.reasoning for piece in pieces):
                message["reasoning_content"] = reasoning
            if calls:
                message["tool_calls"] = [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in calls
                ]
            content = {"message": message}
        scores = [score for piece in pieces for score in piece.scores]
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(index, scores, text),
            "finish_reason": done.reason,
        }

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._is_chat else "text_completion"}

    def _chunk(
        self,
        index: int,
        content: dict[str, Any] | str,
        scores: list[TokenScore] | None = None,
        reason: str | None = None,
        used: Usage | None = None,
    ) -> dict[str, Any]:
        """used: this answer's usage so far."""
        choice = {
            "index": index,
            "delta" if self._is_chat else "text": content,
            "logprobs": self._logprobs(index, scores, content) if scores else None,
            "finish_reason": reason,
        }
        so_far = usage([used], [used]) if used and self._parsed.asks[0].reports_usage else None
        with_usage = {"usage": so_far} if self._parsed.include_usage else {}
        return {**self._stream_head(), "choices": [choice], **with_usage}

    def _logprobs(self, index: int, scores: list[TokenScore], content: Any) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if self._is_chat:
            return {"content": [chat_score(score) for score in scores], "refusal": None}
        offsets = []
        for score in scores:
            decoder, data = self._decoders[index], _bytes_of(score) if score.is_visible else b""
            if not (self._num_chars[index] or decoder.getstate()[0] or content.startswith(" ")):
                data = data.removeprefix(b" ")  # decoders of some models strip the space at the start of a text
            first = decoder.decode(data[:1])
            is_whole = not decoder.getstate()[0]  # the token's first character; `first` may hold one before it too
            offsets.append(self._num_chars[index] + max(0, len(first) - is_whole))
            self._num_chars[index] += len(first) + len(decoder.decode(data[1:]))
        return {
            "tokens": [_named(_bytes_of(score)) for score in scores],
            "token_logprobs": [None if score.logprob is None else _finite(score.logprob) for score in scores],
            "top_logprobs": [
                None if score.logprob is None else {_named(raw): _finite(logprob) for _, raw, logprob in score.top}
                for score in scores
            ],
            "text_offset": offsets,
        }

    def _usage(self, dones: list[Done]) -> dict[str, Any]:
        """Return the usage of all answers; a prompt with several answers counts once."""
        return usage(dones[:: self._parsed.num_choices], dones)


def gathered(pieces: list[Piece]) -> list[CallPart]:
    """Join the parts of each call of an answer."""
    calls: list[CallPart] = []
    for part in (part for piece in pieces for part in piece.calls):
        if part.index == len(calls):
            calls.append(part)
        else:
            whole = calls[part.index]
            calls[part.index] = replace(whole, arguments=whole.arguments + part.arguments)
    return calls


def split_calls(piece: Piece) -> tuple[Sequence[CallPart], Sequence[CallPart]]:
    """Return the piece's parts of the call that is open, which come before its text, and those of calls after it."""
    of_open_call = list(takewhile(lambda part: not part.call_id, piece.calls))
    return of_open_call, piece.calls[len(of_open_call) :]


def used_by(event: Event) -> Usage | None:
    """Return the usage that an event reports, if any."""
    return event if isinstance(event, Done) else event.usage


def usage(prompts: Sequence[Usage], answers: Sequence[Usage]) -> dict[str, Any]:
    """Return OpenAI's usage object for these prompts, and all their answers."""
    new_tokens = sum(answer.new_tokens for answer in answers)
    cached = sum(done.cached_tokens for done in prompts)
    prompt_tokens = sum(done.context_tokens + done.question_tokens for done in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        **_of_predictions(answers),
    }


def _of_predictions(answers: Sequence[Usage]) -> dict[str, Any]:
    """Return what became of guessed tokens, if a prediction was sent."""
    guessed = [answer.guessed_tokens for answer in answers if answer.guessed_tokens is not None]
    if not guessed:
        return {}
    right, wrong = (sum(counts) for counts in zip(*guessed, strict=True))
    return {"completion_tokens_details": {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}}


def _call_delta(part: CallPart) -> dict[str, Any]:
    if not part.call_id:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.call_id, "type": "function", "function": function}


def chat_score(score: TokenScore) -> dict[str, Any]:
    top = [{"token": text, "logprob": _finite(logprob), "bytes": list(raw)} for text, raw, logprob in score.top]
    return {
        "token": _bytes_of(score).decode(errors="replace"),
        "logprob": _finite(LOWEST_LOGPROB if score.logprob is None else score.logprob),
        "bytes": list(_bytes_of(score)),
        "top_logprobs": top,
    }


def _bytes_of(score: TokenScore) -> bytes:
    return score.text.encode(errors="surrogateescape")


def _named(data: bytes) -> str:
    """Return a token's text or, for incomplete characters, its bytes in the notation of OpenAI's completions."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also for NaN
