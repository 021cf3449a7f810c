"""Drafts of an answer: guesses at its next tokens, which one step verifies together.

The guess is that text goes on as before: with the tokens that followed the last NGRAM ones where these last occurred,
in the answer, the question or the context (prompt lookup decoding). A step runs the answer's last token and the draft.
Each row's next token is chosen as without drafts, so the answer is the same, and rows after a wrong guess are dropped.
"""

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

NGRAM = 3  # tokens that have to be alike: with fewer, wrong guesses cost more than right ones save
MAX_DRAFT = 7  # tokens
MAX_ROWS = 16  # of a step with drafts: in larger ones a row takes about as long as the token that it may save
_FIRST_DRAFT = 2  # tokens
_ID_BITS = 21  # of a token id in a key


class Ngrams:
    """Finds where NGRAM tokens last occurred in a text."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        """token_ids: [num_tokens]. Takes 12 bytes of memory a token."""
        self._token_ids, num_ngrams = token_ids, max(0, len(token_ids) - NGRAM)  # those that a token follows
        keys = np.zeros(num_ngrams, np.int64)
        for offset in range(NGRAM):
            keys = keys << _ID_BITS | token_ids[offset : offset + num_ngrams]
        starts = np.argsort(keys, kind="stable")
        self._keys, self._starts = keys[starts], starts.astype(np.int32)

    def after(self, ngram: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens, at most num_tokens, that follow the last occurrence; none if there is none."""
        key = 0
        for token_id in ngram:
            key = key << _ID_BITS | token_id
        last = int(np.searchsorted(self._keys, key, side="right")) - 1
        if last < 0 or self._keys[last] != key:
            return []
        begin = int(self._starts[last]) + NGRAM
        found: list[int] = self._token_ids[begin : begin + num_tokens].tolist()
        return found


class Drafts:
    """Makes one request's drafts: longer ones after those that were right, shorter ones after wrong ones."""

    def __init__(self, prompt: Sequence[Ngrams], most: int = MAX_DRAFT) -> None:
        """prompt: its parts, the one to look in first first; most: tokens of a draft."""
        self._prompt, self._most = prompt, most
        self._num_tokens = min(_FIRST_DRAFT, most)  # of the next draft
        self._ends: dict[tuple[int, ...], int] = {}  # by NGRAM tokens of the answer: where their last occurrence ends
        self._num_seen = 0  # tokens of the answer

    def propose(self, answer_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return a draft of at most num_tokens tokens, often none. answer_ids: all of the answer so far."""
        for end in range(max(NGRAM, self._num_seen), len(answer_ids)):
            self._ends[tuple(answer_ids[end - NGRAM : end])] = end
        self._num_seen = len(answer_ids)
        num_tokens, last = min(num_tokens, self._num_tokens), tuple(answer_ids[-NGRAM:])
        if num_tokens < 1 or len(last) < NGRAM:
            return []
        if last in self._ends:  # where its tokens end, the answer may be going round in a circle
            return list(islice(cycle(answer_ids[self._ends[last] :]), num_tokens))
        return next((found for part in self._prompt if (found := part.after(last, num_tokens))), [])

    def learn(self, num_tokens: int, num_right: int) -> None:
        """Take note of how many of a draft's tokens were right."""
        if num_tokens == 0:
            return
        if num_right == num_tokens:
            self._num_tokens = min(self._most, self._num_tokens + 1)
        elif num_right == 0:
            self._num_tokens = max(1, self._num_tokens - 1)
