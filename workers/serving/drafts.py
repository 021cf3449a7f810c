"""Drafts of an answer: guesses at its next tokens, which one step verifies together.

The guess is that text goes on as before: with the tokens that followed the last NGRAM ones where these occurred, in
what the client predicts, the answer, the question or the context (prompt lookup decoding). Under a grammar, the text
that must come next is a better guess. A step runs the answer's last token and the draft. Each row's next token is
chosen as without drafts, so the answer is the same, and rows after a wrong guess are dropped.
"""

from collections.abc import Sequence, Set
from itertools import cycle, islice, takewhile

import numpy as np
from numpy.typing import NDArray

from workers.serving.step_times import StepTimes

NGRAM = 3  # tokens that have to be alike: with fewer, wrong guesses cost more than right ones save
MAX_ROWS = 16  # of a step with drafts
MAX_DRAFT = MAX_ROWS - 1  # tokens
_ID_BITS = 21  # of a token id in a key
_WORTH = 1.1  # times as many tokens a second as without drafts have to be expected: chances and times are estimates
_KEPT = 0.85  # what a token that was tried leaves of the weight of those before it


class Ngrams:
    """Finds where NGRAM tokens occur in a text."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        """token_ids: [num_tokens], copied: they may be mapped from a file. Takes 16 bytes of memory a token."""
        self._token_ids, num_ngrams = token_ids.copy(), max(0, len(token_ids) - NGRAM)  # those that a token follows
        keys = np.zeros(num_ngrams, np.int64)
        for offset in range(NGRAM):
            keys = keys << _ID_BITS | token_ids[offset : offset + num_ngrams]
        starts = np.argsort(keys, kind="stable")
        self._keys, self._starts = keys[starts], starts.astype(np.int32)

    def find(self, ngram: Sequence[int], start: int = 0) -> int | None:
        """Return where the first occurrence at `start` or later begins; the last one if there is none; else None."""
        key = 0
        for token_id in ngram:
            key = key << _ID_BITS | token_id
        first, end = (int(np.searchsorted(self._keys, key, side=side)) for side in ("left", "right"))
        if first == end:
            return None
        return int(self._starts[min(end - 1, first + int(np.searchsorted(self._starts[first:end], start)))])

    def after(self, place: int, num_tokens: int) -> list[int]:
        """Return the tokens, at most num_tokens, that follow the occurrence that begins at `place`."""
        begin = place + NGRAM
        found: list[int] = self._token_ids[begin : begin + num_tokens].tolist()
        return found


class _Chance:
    """How likely a guessed token is right, after right ones."""

    def __init__(self) -> None:
        self._num_right, self._num_tried = 0.8, 1.0  # guessed tokens, weighted: the last ones count most

    @property
    def value(self) -> float:
        return self._num_right / self._num_tried

    def add(self, is_right: bool) -> None:
        self._num_right = _KEPT * self._num_right + is_right
        self._num_tried = _KEPT * self._num_tried + 1


class Drafts:
    """Guesses one request's tokens, and learns how often it is right."""

    def __init__(
        self,
        prompt: Sequence[Ngrams],  # its parts, the one to look in first first
        most: int = MAX_DRAFT,  # tokens of a draft
        stop_ids: Set[int] = frozenset(),  # tokens that end the answer, which need no row
        predicted: Ngrams | None = None,  # by the client
    ) -> None:
        self._prompt, self._most, self._stop_ids = prompt, most, stop_ids
        self._predicted = [] if predicted is None else [predicted]
        self._next: dict[Ngrams, int] = {}  # where an occurrence may begin after the last one found, as texts go on
        self._ends: dict[tuple[int, ...], int] = {}  # by NGRAM tokens of the answer: where their last occurrence ends
        self._num_seen = 0  # tokens of the answer
        self._last: list[int] = []  # the last draft, whether or not it was run
        self._of_text, self._of_grammar = _Chance(), _Chance()
        self._chance = self._of_text  # of the last draft's kind

    @property
    def chance(self) -> float:
        """How likely the last draft's next token is right, after right ones."""
        return self._chance.value

    def propose(self, answer_ids: Sequence[int], num_tokens: int, forced: Sequence[int] = ()) -> list[int]:
        """Return a draft of at most num_tokens tokens, often none.

        answer_ids: all of the answer so far; forced: tokens of the text that a grammar has come next.
        """
        self._learn(answer_ids[self._num_seen :])
        for end in range(max(NGRAM, self._num_seen), len(answer_ids)):
            self._ends[tuple(answer_ids[end - NGRAM : end])] = end
        self._num_seen = len(answer_ids)
        num_tokens = min(num_tokens, self._most)
        found = [*forced[:num_tokens]] or self._found(answer_ids, num_tokens)
        self._last = list(takewhile(lambda token_id: token_id not in self._stop_ids, found))
        self._chance = self._of_grammar if forced else self._of_text
        return self._last

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Compare the last draft with the tokens that followed; after its first wrong token it tells nothing."""
        for guess, token_id in zip(self._last, token_ids, strict=False):
            self._chance.add(guess == token_id)
            if guess != token_id:
                return

    def _found(self, answer_ids: Sequence[int], num_tokens: int) -> list[int]:
        last = tuple(answer_ids[-NGRAM:])
        if num_tokens < 1 or len(last) < NGRAM:
            return []
        if found := self._found_in(self._predicted, last, num_tokens):
            return found
        if (end := self._ends.get(last)) is not None:  # where its tokens end, the answer may be going round in a circle
            return list(islice(cycle(answer_ids[end : end + num_tokens]), num_tokens))
        return self._found_in(self._prompt, last, num_tokens)

    def _found_in(self, parts: Sequence[Ngrams], last: tuple[int, ...], num_tokens: int) -> list[int]:
        for part in parts:
            if (place := part.find(last, self._next.get(part, 0))) is not None:
                self._next[part] = place + 1
                return part.after(place, num_tokens)
        return []


def draft_lens(drafts: Sequence[tuple[float, int]], num_rows: int, max_rows: int, times: StepTimes) -> list[int]:
    """Return how many tokens of each draft to run, so that most tokens of answers may be expected in a second.

    drafts: `chance` and length; num_rows: of the step without drafts, each of which gives a token.
    """
    lens, chances = [0] * len(drafts), [chance if length else 0.0 for chance, length in drafts]
    expected = float(num_rows)
    best, best_rate = lens.copy(), _WORTH * expected / times.estimate(num_rows)
    for more in range(1, min(max_rows, MAX_ROWS) - num_rows + 1):
        likeliest = int(np.argmax(chances))
        if not chances[likeliest]:
            break
        chance, length = drafts[likeliest]
        expected += chances[likeliest]
        lens[likeliest] += 1
        chances[likeliest] = chances[likeliest] * chance if lens[likeliest] < length else 0.0
        if (rate := expected / times.estimate(num_rows + more)) > best_rate:
            best, best_rate = lens.copy(), rate
    return best
