"""A request in flight: its parameters, its progress, and its answer as events."""

from collections import deque
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.config import SearchConfig
from csattn.selector_names import SelectorName
from workers.serving.answer_parser import AnswerParser
from workers.serving.drafts import Drafts
from workers.serving.grammar import Grammar
from workers.serving.kept_rows import KeptRows
from workers.serving.messages import Ask, Done, Finish, Piece, TokenScore, Usage
from workers.serving.outlet import Outlet
from workers.serving.sampling import TokenCounts, adjust_logits, allowed_without, draw, draw_spec, likelihood_of
from workers.serving.step_engine import Allowed, DrawSpec, Likelihood
from workers.serving.text import StopFinder, TextStream, token_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The running state of a request. Only the scheduler's thread changes its fields, except `is_cancelled`."""

    ask: Ask
    context_id: int  # the engine's id of the context
    context_len: int
    num_cached: int  # tokens of context and question that did not have to be computed
    question_ids: list[int]
    max_new_tokens: int
    config: SearchConfig
    selector: SelectorName
    seed: int
    arrived_at: float  # by the scheduler's clock, like all times here
    deadline: float
    outlet: Outlet
    writer: "Writer"
    grammar: Grammar | None = None
    in_prompt: NDArray[np.bool_] | None = None  # [vocab_size]: context or question has the token
    echo: str | None = None  # the prompt's text, if it is to come before the answer
    prompt_scores: list[TokenScore] = field(default_factory=list)
    kept: KeptRows | None = None  # None: no kept rows are used, and none are kept
    drafts: Drafts | None = None  # None: its next tokens are not guessed
    num_drafted: int = 0  # guessed tokens that steps had rows for
    num_accepted: int = 0  # and those of them that were right
    request_slot: int | None = None
    num_fed: int = 0  # tokens of the question that the engine has
    num_rows: int = 0  # rows of the request's own that the engine has
    token_ids: list[int] = field(default_factory=list)  # of the answer
    counted: TokenCounts = field(default_factory=TokenCounts)  # of `token_ids`, brought up to date by penalties
    first_token_at: float | None = None
    paused_at: float | None = None  # when its outlet became full; None: its reader reads
    is_cancelled: bool = False  # set by the inbox: nobody waits for its answer
    is_over: bool = False
    fault: Exception | None = None  # raised by the grammar at this token

    @property
    def needs_logits(self) -> bool:
        """Whether the next token is sampled, changed or scored; if not, the engine's argmax is taken."""
        return self._is_drawn(len(self.token_ids))

    @property
    def has_penalties(self) -> bool:
        """Whether the probability of a token depends on which tokens precede it in prompt and answer."""
        sampling = self.ask.sampling
        return bool(sampling.frequency_penalty or sampling.presence_penalty or self.in_prompt is not None)

    @property
    def scores_prompt(self) -> bool:
        return self.echo is not None and self.ask.sampling.top_logprobs is not None

    @property
    def question_left(self) -> int:
        return len(self.question_ids) - self.num_fed

    @property
    def can_step(self) -> bool:
        """Whether its reader reads, and all kept rows that were found for it are in the engine."""
        return self.paused_at is None and not (self.kept and self.kept.has_waiting)

    def next_inputs(self, num_rows: int) -> list[int]:
        """The tokens to feed next: up to num_rows of the question, or the answer's last one."""
        if self.question_left:
            return self.question_ids[self.num_fed : self.num_fed + num_rows]
        return [self.token_ids[-1]]

    def draft(self) -> list[int]:
        """Guess the tokens that follow the answer's last one."""
        if self.drafts is None:
            return []
        forced = [] if self.grammar is None else self.grammar.forced()
        draft = self.drafts.propose(self.token_ids, self.max_new_tokens - len(self.token_ids) - 1, forced)
        return draft if self.grammar is None else self.grammar.possible(draft)

    def draw_specs(self, stop_ids: Set[int], draft: Sequence[int] = ()) -> list[DrawSpec | None]:
        """Return how to sample the next token, and those that follow each token of a draft; None: take the argmax.

        stop_ids: the model's end-of-turn tokens; draft: of `draft`; empty for a request with penalties.
        """
        assert not draft or not self.has_penalties, "guessed tokens are not counted"
        specs, grammar = list[DrawSpec | None](), self.grammar
        for num_guessed in range(len(draft) + 1):
            if grammar is not None and num_guessed:
                grammar = grammar.after(draft[num_guessed - 1])
            specs.append(self._draw_spec_at(len(self.token_ids) + num_guessed, stop_ids, grammar))
        return specs

    def _draw_spec_at(self, position: int, stop_ids: Set[int], grammar: Grammar | None) -> DrawSpec | None:
        if not self._is_drawn(position):
            return None
        ends, allowed = self._early_ends(stop_ids, position), None
        if grammar is not None:
            ends, allowed = frozenset(), partial(self._allowed, grammar, ends)
        of_answer = self.token_ids, self.in_prompt
        return draw_spec(self.ask.sampling, self.seed, position, *of_answer, ends, allowed, self.counted)

    def choose(self, logits: NDArray[np.float32], spec: DrawSpec) -> tuple[int, TokenScore | None]:
        """Sample a token from logits [vocab_size] on the host, and `take` it."""
        token_id = draw(adjust_logits(logits, spec), spec)
        return self.take(token_id, None if spec.num_top is None else likelihood_of(logits, token_id, spec.num_top))

    def take(self, token_id: int, likelihood: Likelihood | None) -> tuple[int, TokenScore | None]:
        """Accept the answer's next token; returns it with its score, if a likelihood is given.

        Raises ValueError for -1, which means that the greatest logit is NaN or infinite, and what the grammar raises.
        """
        if self.fault is not None:
            raise self.fault
        if token_id < 0:
            raise ValueError("NaN or infinity is the greatest")
        if self.grammar is not None:
            self.grammar.accept(token_id)
        return token_id, None if likelihood is None else self.writer.score(token_id, likelihood)

    def _allowed(self, grammar: Grammar, ends: Set[int], vocab_size: int) -> Allowed:
        """As `DrawSpec.allowed`: raises nothing, as others share the step. `take` raises the grammar's error."""
        with suppress(Exception):  # `grammar.allowed` raises it again
            grammar.begin()

        def found() -> NDArray[np.bool_]:
            try:
                return allowed_without(grammar.allowed(vocab_size), ends)
            except Exception as error:
                self.fault = error
                return np.ones(vocab_size, np.bool_)

        return found

    def ends_with(self, token_id: int, stop_ids: Set[int]) -> bool:
        """Whether this token ends the answer; then it adds no text. With a grammar, an end-of-turn token ends it even
        under ignore_eos: `_early_ends` lets one come only if no other token may."""
        goes_on = self.ask.sampling.ignore_eos and self.grammar is None
        return token_id in self.ask.sampling.stop_token_ids or (token_id in stop_ids and not goes_on)

    def _is_drawn(self, position: int) -> bool:
        """Whether the answer's token at that position is sampled, changed or scored."""
        s = self.ask.sampling
        changes_logits = self.has_penalties or s.logit_bias or position < s.min_tokens
        return bool(s.temperature > 0 or s.top_logprobs is not None or self.grammar is not None or changes_logits)

    def _early_ends(self, stop_ids: Set[int], position: int) -> Set[int]:
        """Tokens that may not come at that position of the answer, if any other may."""
        if position < self.ask.sampling.min_tokens:
            return stop_ids | set(self.ask.sampling.stop_token_ids)
        return stop_ids if self.ask.sampling.ignore_eos and self.grammar is not None else frozenset()

    def add_prompt_scores(self, logits: NDArray[np.float32]) -> None:
        """Score the question's tokens that follow those being fed, whose logits are given: [num_rows, vocab_size]."""
        num_top = self.ask.sampling.top_logprobs
        assert num_top is not None
        if not self.num_fed:
            first = self.writer.score(self.question_ids[0], None)
            # the echo does not have a special token that the tokenizer has added to the prompt
            is_added = self.writer.is_special(first.token_id) and not (self.echo or "").startswith(first.text)
            self.prompt_scores.append(replace(first, is_visible=not is_added))
        for row, token_id in zip(logits, self.question_ids[self.num_fed + 1 :], strict=False):
            self.prompt_scores.append(self.writer.score(token_id, likelihood_of(row, token_id, num_top)))

    def take_echo(self) -> Piece | None:
        """The prompt's text and scores, once all of it has been fed; None before, or without echo."""
        if self.echo is None or self.question_left:
            return None
        scores, self.prompt_scores = tuple(self.prompt_scores), []
        return Piece(self.echo, scores)

    def with_usage(self, piece: Piece) -> Piece:
        """The piece, with the usage so far if the request wants it."""
        return replace(piece, usage=Usage(**self._usage())) if self.ask.reports_usage else piece

    def done(self, reason: Finish) -> Done:
        return Done(reason=reason, stop=self.writer.stop, **self._usage())

    def _usage(self) -> dict[str, Any]:
        guessed = self.num_accepted, self.num_drafted - self.num_accepted
        return {
            "guessed_tokens": None if self.ask.prediction is None else guessed,
            "context_tokens": self.context_len,
            "question_tokens": len(self.question_ids),
            "cached_tokens": self.num_cached,
            "new_tokens": len(self.token_ids),
        }


class Writer:
    """Turns tokens into pieces: text up to a stop string, and each token's score with the text that it begins."""

    def __init__(
        self,
        tokenizer: Any,
        stops: tuple[str, ...] = (),
        parser: AnswerParser | None = None,  # None: the text has no reasoning and no tool calls
        shown: dict[int, str] | None = None,  # special tokens that the text has to contain, such as call markers
        min_tokens: int = 0,  # no stop string is looked for in the text of this many first tokens
        before: Sequence[int] = (),  # tokens that the text continues
    ) -> None:
        self._num_early, self._is_early = min_tokens, False  # how many such tokens are to come; the last was one
        self._tokenizer, self._parser, self._shown = tokenizer, parser, shown or {}
        self._stream, self._stops = TextStream(tokenizer, before), StopFinder(stops)
        self._scores: deque[tuple[int, TokenScore]] = deque()  # with the offset in the text where the token begins
        self._num_decoded = self._num_emitted = 0  # characters, of all text and of that passed on

    @property
    def has_stopped(self) -> bool:
        return self.stop is not None or (self._parser is not None and self._parser.has_ended)

    @property
    def stop(self) -> str | None:
        """The stop string that the text ended at."""
        return self._stops.found

    @property
    def has_tool_call(self) -> bool:
        """Whether the answer has tool calls, all of them complete."""
        return self._parser is not None and self._parser.num_calls > 0 and not self._parser.is_cut_off

    def is_special(self, token_id: int) -> bool:
        """Whether an answer's text leaves the token out."""
        return token_id not in self._shown and self._stream.skips(token_id)

    def add(self, token_id: int, score: TokenScore | None) -> Piece | None:
        if score is not None:
            self._scores.append((self._num_decoded, replace(score, is_visible=not self.is_special(token_id))))
        self._is_early, self._num_early = self._num_early > 0, self._num_early - 1
        if (marker := self._shown.get(token_id)) is None:
            return self._emit(self._stream.add(token_id))
        text, self._stream = self._stream.finish() + marker, TextStream(self._tokenizer)
        return self._emit(text)

    def finish(self) -> Piece | None:
        """Return what was held back, when the answer ends."""
        if self.has_stopped:
            return self._piece("", (), is_last=True)
        text, scores = self._settled(self._stream.finish())
        text += self._stops.finish()
        scores += () if self.has_stopped else tuple(s for _, s in self._scores)
        self._scores.clear()
        return self._piece(text, scores, is_last=True)

    def score(self, token_id: int, likelihood: Likelihood | None) -> TokenScore:
        """The token's score. likelihood: None for a prompt's first token, which no logits precede."""
        text = token_bytes(self._tokenizer, token_id).decode(errors="surrogateescape")
        if likelihood is None:
            return TokenScore(token_id, text, None)
        total, top = likelihood.log_total, []
        for other_id, logit in likelihood.top:
            data = token_bytes(self._tokenizer, other_id)
            top.append((data.decode(errors="replace"), data, logit - total))
        return TokenScore(token_id, text, likelihood.logit - total, tuple(top))

    def _emit(self, decoded: str) -> Piece | None:
        return self._piece(*self._settled(decoded))

    def _settled(self, decoded: str) -> tuple[str, tuple[TokenScore, ...]]:
        """Return the text that no later token can change, and the scores of the tokens that begin in it."""
        self._num_decoded += len(decoded)
        text = decoded if self._is_early else self._stops.add(decoded)
        self._num_emitted += len(text)
        scores = []
        while self._scores and self._scores[0][0] < self._num_emitted:
            scores.append(self._scores.popleft()[1])
        return text, tuple(scores)

    def _piece(self, text: str, scores: tuple[TokenScore, ...], is_last: bool = False) -> Piece | None:
        piece = Piece(text) if self._parser is None else self._parser.add(text, is_last)
        return None if not scores and piece == Piece("") else replace(piece, scores=scores)
