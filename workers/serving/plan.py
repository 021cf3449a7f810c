"""Compose the next step: a token of every request that decodes, and some tokens of new questions (prefill)."""

from collections.abc import Sequence

from workers.serving.drafts import draft_lens
from workers.serving.request import Request
from workers.serving.step_times import StepTimes

# Chunked prefill: beside decoding requests, questions of any length make a step about so many times as long.
STRETCH = 2.0
_FIRST_TRIED, _FEWEST = 8, 4  # rows of questions: on a CPU, products take four in little more time than one
_PATIENCE = 16  # steps


class QuestionRows:
    """Controls how many rows of questions (`limit`) go beside those that decode.

    A step is short enough if it takes at most STRETCH times the shortest recent step without questions in which as many
    requests decode, or more; with drafts, such a step may be longer, and one without is rare. `limit` grows by a
    quarter after a short step if it was used up. It shrinks by a quarter after a longer one, and may grow again
    _PATIENCE short steps later; so the effect of other load on the machine is soon forgotten.
    """

    def __init__(self) -> None:
        self._decoding = StepTimes()  # of steps without questions, by the number of requests
        self._num_patient = 0  # short steps still to come before `limit` may grow
        self.limit = _FIRST_TRIED

    def add(self, num_decoding: int, num_question_rows: int, seconds: float) -> None:
        """Record a step's time, and adjust `limit`. num_decoding: requests that decode."""
        self._decoding.count_step()
        if not num_question_rows:
            self._decoding.add(num_decoding, seconds)
        elif (decode_s := self._decoding.shortest_of_at_least(num_decoding)) is not None:
            if seconds > STRETCH * decode_s:
                self.limit = max(_FEWEST, self.limit - max(1, self.limit // 4))
                self._num_patient = _PATIENCE
            elif self._num_patient:
                self._num_patient -= 1
            elif num_question_rows >= self.limit:
                self.limit += max(1, self.limit // 4)

    def knows(self, num_decoding: int) -> bool:
        """Whether a step in which so many requests decode, without questions, has been timed."""
        return self._decoding.shortest(num_decoding) is not None


def plan_step(requests: Sequence[Request], max_rows: int, question_rows: QuestionRows) -> list[tuple[Request, int]]:
    """Return requests with their number of tokens: 1 for every request that decodes, the other rows for questions.

    requests: in the order of their admission, at most max_rows. Questions get equal shares; what is left over goes to
    the oldest. They wait for a step if the time of the decoding rows alone is not known yet.
    """
    assert len(requests) <= max_rows, f"{len(requests)} requests do not fit into steps of {max_rows} rows"
    decoding = [request for request in requests if not request.question_left]
    prefilling = [request for request in requests if request.question_left]
    room = max_rows - len(decoding)
    if decoding and prefilling:
        if not question_rows.knows(len(decoding)):
            return [(request, 1) for request in decoding]
        room = min(room, max(len(prefilling), question_rows.limit))
    shares = divide_rows(room, [request.question_left for request in prefilling])
    return [(request, 1) for request in decoding] + [pair for pair in zip(prefilling, shares, strict=True) if pair[1]]


def plan_drafts(requests: Sequence[Request], max_rows: int, draws: bool, times: StepTimes) -> dict[Request, list[int]]:
    """Return the drafts of a step in which each request has one row otherwise, for requests that have any.

    There are none while a question is left: it takes the time that they would save, and a step without drafts may have
    to be timed first. draws: the engine samples, for all rows of a step at the same time, so penalties cannot take
    guessed tokens into account. times: of steps without questions.
    """
    if any(request.question_left for request in requests):
        return {}
    drafts = [[] if draws and request.has_penalties else request.draft() for request in requests]
    if not any(drafts):
        return {}
    chances = [0.0 if request.drafts is None else request.drafts.chance for request in requests]
    lens = draft_lens([*zip(chances, map(len, drafts), strict=True)], len(requests), max_rows, times)
    return {request: draft[:num] for request, draft, num in zip(requests, drafts, lens, strict=True) if num}


def divide_rows(room: int, wants: Sequence[int]) -> list[int]:
    """Divide the room into equal parts, none larger than wanted; what is left over goes to the first."""
    parts = [0] * len(wants)
    unfilled = [i for i, want in enumerate(wants) if want]
    while room and unfilled:
        equal = max(1, room // len(unfilled))
        for i in unfilled:
            part = min(equal, wants[i] - parts[i], room)
            parts[i] += part
            room -= part
        unfilled = [i for i in unfilled if parts[i] < wants[i]]
    return parts
