"""One request while it is answered: what was asked, how far it is, and its answer as events."""

from collections import deque
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.config import SearchConfig
from workers.serving.grammar import Grammar
from workers.serving.kept_rows import OwnRows
from workers.serving.messages import Done, Finish, Piece, Sampling, Selector, TokenScore, Usage
from workers.serving.outlet import Outlet
from workers.serving.sampling import TokenCounts, allowed_without, changed, draw, how_to_draw, likelihood_of
from workers.serving.speech import Parts, Speech
from workers.serving.step_engine import Allowed, Draw, Likelihood
from workers.serving.text import StopFinder, TextStream, token_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Its fields change on the scheduler's thread only."""

    request_id: str
    context: str  # name, for metrics
    context_id: int  # as the engine knows it
    context_len: int
    num_cached: int  # tokens of context and question that were there before the request
    question_ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    config: SearchConfig
    selector: Selector
    seed: int
    arrived_at: float  # by the scheduler's clock, as all times here
    deadline: float
    outlet: Outlet
    writer: "Writer"
    grammar: Grammar | None = None
    in_prompt: NDArray[np.bool_] | None = None  # [vocab_size]: context or question has the token
    tells_usage: bool = False
    echo: str | None = None  # the prompt, where it is told before the answer
    prompt_scores: list[TokenScore] = field(default_factory=list)
    own: OwnRows | None = None  # None: it begins with none of its own, and none are kept
    slot: int | None = None
    num_fed: int = 0  # tokens of the question that the engine has
    num_rows: int = 0  # of its own, that the engine has
    token_ids: list[int] = field(default_factory=list)
    counted: TokenCounts = field(default_factory=TokenCounts)  # of those, as far as draws have asked
    first_token_at: float | None = None
    paused_at: float | None = None  # since when its reader does not read
    is_over: bool = False
    fault: Exception | None = None  # of its grammar, at this token

    @property
    def needs_logits(self) -> bool:
        """To draw a token; else the engine's likeliest one is taken."""
        s = self.sampling
        asks = s.frequency_penalty or s.presence_penalty or s.logit_bias or self.in_prompt is not None
        asks = asks or len(self.token_ids) < s.min_tokens
        return bool(s.temperature > 0 or s.top_logprobs is not None or self.grammar is not None or asks)

    @property
    def scores_prompt(self) -> bool:
        return self.echo is not None and self.sampling.top_logprobs is not None

    @property
    def question_left(self) -> int:
        return len(self.question_ids) - self.num_fed

    @property
    def can_step(self) -> bool:
        """Somebody reads, and what was found for it is in the engine."""
        return self.paused_at is None and not (self.own and self.own.has_waiting)

    def next_inputs(self, num_rows: int) -> list[int]:
        """The tokens that the engine is fed next."""
        if self.question_left:
            return self.question_ids[self.num_fed : self.num_fed + num_rows]
        return [self.token_ids[-1]]

    def how_to_draw(self, stop_ids: Set[int]) -> Draw | None:
        """How the next token is drawn; None: the likeliest is taken. stop_ids: with which the model ends its turn."""
        if not self.needs_logits:
            return None
        ends, allowed = self._early_ends(stop_ids), None
        if self.grammar is not None:
            ends, allowed = frozenset(), partial(self._allowed, self.grammar, ends)
        told, position = self.token_ids, len(self.token_ids)
        return how_to_draw(self.sampling, self.seed, position, told, self.in_prompt, ends, allowed, self.counted)

    def choose(self, logits: NDArray[np.float32], how: Draw) -> tuple[int, TokenScore | None]:
        """`take` of what is drawn here. logits: [vocab_size]."""
        token_id = draw(changed(logits, how), how)
        return self.take(token_id, None if how.num_top is None else likelihood_of(logits, token_id, how.num_top))

    def take(self, token_id: int, likelihood: Likelihood | None) -> tuple[int, TokenScore | None]:
        """The next token of the answer, and how likely it was if that was asked for.

        Raises ValueError where there is none, -1: NaN or infinity is the greatest logit. And what the grammar raises.
        """
        if self.fault is not None:
            raise self.fault
        if token_id < 0:
            raise ValueError("NaN or infinity is the greatest")
        if self.grammar is not None:
            self.grammar.accept(token_id)
        return token_id, None if likelihood is None else self.writer.score(token_id, likelihood)

    def _allowed(self, grammar: Grammar, ends: Set[int], vocab_size: int) -> Allowed:
        """What it raises is raised when the token is taken: a step is not this request's alone."""
        with suppress(Exception):  # which it raises again
            grammar.begin()

        def found() -> NDArray[np.bool_]:
            try:
                return allowed_without(grammar.allowed(vocab_size), ends)
            except Exception as error:
                self.fault = error
                return np.ones(vocab_size, np.bool_)

        return found

    def ends_with(self, token_id: int, stop_ids: Set[int]) -> bool:
        """Whether this token, of which no text is told, is the end. Where there is a grammar, an end that is ignored
        comes only when nothing else may."""
        goes_on = self.sampling.ignore_eos and self.grammar is None
        return token_id in self.sampling.stop_token_ids or (token_id in stop_ids and not goes_on)

    def _early_ends(self, stop_ids: Set[int]) -> Set[int]:
        """Tokens that may not come now, if any other may."""
        if len(self.token_ids) < self.sampling.min_tokens:
            return stop_ids | set(self.sampling.stop_token_ids)
        return stop_ids if self.sampling.ignore_eos and self.grammar is not None else frozenset()

    def hear(self, logits: NDArray[np.float32]) -> None:
        """Score what of the question comes after what is being fed. logits: [num_rows, vocab_size] of what is fed."""
        num_top = self.sampling.top_logprobs
        assert num_top is not None
        if not self.num_fed:
            self.prompt_scores.append(self.writer.score(self.question_ids[0], None))
        for row, token_id in zip(logits, self.question_ids[self.num_fed + 1 :], strict=False):
            self.prompt_scores.append(self.writer.score(token_id, likelihood_of(row, token_id, num_top)))

    def take_echo(self) -> Piece | None:
        """The prompt, when all of it has just been fed."""
        if self.echo is None or self.question_left:
            return None
        scores, self.prompt_scores = tuple(self.prompt_scores), []
        return Piece(self.echo, scores)

    def told(self, piece: Piece) -> Piece:
        """With what was used so far, where that is asked for."""
        return replace(piece, usage=Usage(**self._usage())) if self.tells_usage else piece

    def done(self, reason: Finish) -> Done:
        return Done(reason=reason, **self._usage())

    def _usage(self) -> dict[str, int]:
        return {
            "context_tokens": self.context_len,
            "question_tokens": len(self.question_ids),
            "cached_tokens": self.num_cached,
            "new_tokens": len(self.token_ids),
        }


class Writer:
    """Tokens become pieces: text up to a stop string, and each token's score with the text that it began."""

    def __init__(
        self,
        tokenizer: Any,
        stops: tuple[str, ...] = (),
        speech: Speech | None = None,  # None: all of the text is said
        shown: dict[int, str] | None = None,  # special tokens that the text has
        min_tokens: int = 0,  # in whose text no stop string is looked for
    ) -> None:
        self._num_early, self._is_early = min_tokens, False  # such tokens that are still to come; the last was one
        self._tokenizer, self._speech, self._shown = tokenizer, speech, shown or {}
        self._stream, self._stops = TextStream(tokenizer), StopFinder(stops)
        self._scores: deque[tuple[int, TokenScore]] = deque()  # where in the text its token begins
        self._num_decoded = self._num_told = 0  # characters

    @property
    def has_stopped(self) -> bool:
        return self._stops.found or (self._speech is not None and self._speech.has_ended)

    @property
    def has_called(self) -> bool:
        """The answer is a call of a tool, or has one."""
        return self._speech is not None and self._speech.num_calls > 0

    def add(self, token_id: int, score: TokenScore | None) -> Piece | None:
        if score is not None:
            is_told = token_id in self._shown or not self._stream.skips(token_id)
            self._scores.append((self._num_decoded, replace(score, is_told=is_told)))
        self._is_early, self._num_early = self._num_early > 0, self._num_early - 1
        if (marker := self._shown.get(token_id)) is None:
            return self._tell(self._stream.add(token_id))
        text, self._stream = self._stream.finish() + marker, TextStream(self._tokenizer)
        return self._tell(text)

    def finish(self) -> Piece | None:
        """What is left when the answer ends."""
        if self.has_stopped:
            return self._piece("", (), is_last=True)
        text, scores = self._told(self._stream.finish())
        text += self._stops.finish()
        scores += () if self.has_stopped else tuple(s for _, s in self._scores)
        self._scores.clear()
        return self._piece(text, scores, is_last=True)

    def score(self, token_id: int, likelihood: Likelihood | None) -> TokenScore:
        """likelihood: None where nothing has foretold the token."""
        text = token_bytes(self._tokenizer, token_id).decode(errors="surrogateescape")
        if likelihood is None:
            return TokenScore(token_id, text, None)
        total, top = likelihood.log_total, []
        for other_id, logit in likelihood.top:
            data = token_bytes(self._tokenizer, other_id)
            top.append((data.decode(errors="replace"), data, logit - total))
        return TokenScore(token_id, text, likelihood.logit - total, tuple(top))

    def _tell(self, decoded: str) -> Piece | None:
        return self._piece(*self._told(decoded))

    def _told(self, decoded: str) -> tuple[str, tuple[TokenScore, ...]]:
        """What of the text is certain, and the scores of its tokens."""
        self._num_decoded += len(decoded)
        text = decoded if self._is_early else self._stops.add(decoded)
        self._num_told += len(text)
        scores = []
        while self._scores and self._scores[0][0] < self._num_told:
            scores.append(self._scores.popleft()[1])
        return text, tuple(scores)

    def _piece(self, text: str, scores: tuple[TokenScore, ...], is_last: bool = False) -> Piece | None:
        parts = Parts(text)
        if self._speech is not None:
            parts = self._speech.add(text)
            if is_last:
                rest = self._speech.finish()
                parts = Parts(parts.text + rest.text, parts.reasoning + rest.reasoning, parts.calls + rest.calls)
        if not (parts.text or parts.reasoning or parts.calls or scores):
            return None
        return Piece(parts.text, scores, parts.reasoning, tuple(parts.calls))
