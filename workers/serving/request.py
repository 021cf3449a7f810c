"""One request while it is answered: what was asked, how far it is, and its answer as events."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.config import SearchConfig
from workers.serving.messages import Done, Finish, Piece, Sampling, Selector, TokenScore
from workers.serving.outlet import Outlet
from workers.serving.sampling import draw, likeliest, log_probabilities
from workers.serving.text import StopFinder, TextStream, token_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Its fields change on the scheduler's thread only."""

    request_id: str
    context: str  # name, for metrics
    context_id: int  # as the engine knows it
    context_len: int
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
    slot: int | None = None
    num_fed: int = 0  # tokens of the question that the engine has
    token_ids: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    paused_at: float | None = None  # since when its reader does not read
    is_over: bool = False

    @property
    def needs_logits(self) -> bool:
        return self.sampling.temperature > 0 or self.sampling.top_logprobs is not None

    @property
    def question_left(self) -> int:
        return len(self.question_ids) - self.num_fed

    def next_inputs(self, num_rows: int) -> list[int]:
        """The tokens that the engine is fed next."""
        if self.question_left:
            return self.question_ids[self.num_fed : self.num_fed + num_rows]
        return [self.token_ids[-1]]

    def choose(self, likeliest_id: int, logits: NDArray[np.float32] | None) -> tuple[int, TokenScore | None]:
        """The next token of the answer, and how likely it was if that was asked for. logits: [vocab_size].

        Raises ValueError where there is none: NaN or infinity is the greatest logit.
        """
        if not self.needs_logits:
            if likeliest_id < 0:
                raise ValueError("NaN or infinity is the greatest")
            return likeliest_id, None
        assert logits is not None, "the step was asked for logits"
        sampling = self.sampling
        token_id = draw(logits, sampling.temperature, sampling.top_p, self.seed, len(self.token_ids))
        if sampling.top_logprobs is None:
            return token_id, None
        return token_id, self.writer.score(token_id, logits, sampling.top_logprobs)

    def done(self, reason: Finish) -> Done:
        return Done(
            reason=reason,
            context_tokens=self.context_len,
            question_tokens=len(self.question_ids),
            new_tokens=len(self.token_ids),
        )


class Writer:
    """Tokens become pieces: text up to a stop string, and each token's score with the text that it began."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream, self._stops = TextStream(tokenizer), StopFinder(stops)
        self._scores: deque[tuple[int, TokenScore]] = deque()  # where in the text its token begins
        self._num_decoded = self._num_told = 0  # characters

    @property
    def has_stopped(self) -> bool:
        return self._stops.found

    def add(self, token_id: int, score: TokenScore | None) -> Piece | None:
        if score is not None:
            self._scores.append((self._num_decoded, score))
        return self._tell(self._stream.add(token_id))

    def finish(self) -> Piece | None:
        """What is left when the answer ends."""
        if self.has_stopped:
            return None
        piece = self._tell(self._stream.finish())
        text = (piece.text if piece else "") + self._stops.finish()
        scores = (piece.scores if piece else ()) + (() if self.has_stopped else tuple(s for _, s in self._scores))
        self._scores.clear()
        return Piece(text, scores) if text or scores else None

    def score(self, token_id: int, logits: NDArray[np.float32], num_top: int) -> TokenScore:
        logprobs = log_probabilities(logits)
        top = []
        for other_id in likeliest(logprobs, num_top).tolist():
            data = token_bytes(self._tokenizer, other_id)
            top.append((data.decode(errors="replace"), data, float(logprobs[other_id])))
        text = token_bytes(self._tokenizer, token_id).decode(errors="replace")
        return TokenScore(token_id, text, float(logprobs[token_id]), tuple(top))

    def _tell(self, decoded: str) -> Piece | None:
        self._num_decoded += len(decoded)
        text = self._stops.add(decoded)
        self._num_told += len(text)
        scores = []
        while self._scores and self._scores[0][0] < self._num_told:
            scores.append(self._scores.popleft()[1])
        return Piece(text, tuple(scores)) if text or scores else None
