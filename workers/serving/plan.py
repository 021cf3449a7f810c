"""Whose tokens the next step takes."""

import math
import sys
from collections.abc import Iterable, Sequence

from workers.serving.request import Request

# While others decode, questions make a step at most so many times as long as it is without them, however long they are.
STRETCH = 1.75
_REMEMBERED, _REMEMBERED_OF_QUESTIONS = 256, 32  # steps, at least
_TRIES = (
    2  # that took too long, before as many rows are not tried again: what took the time may have been something else
)


class StepTimes:
    """What rows cost: the least that steps of so many took of late, as the machine may have had other work, too.

    Rows of a question cost what its context and its place make them cost: what others' took tells of its first step.
    """

    def __init__(self) -> None:
        self._decoding, self._asking = _Times(_REMEMBERED), _Times(_REMEMBERED)
        self._of: dict[frozenset[int], _Times] = {}  # the questions of the last step that had any, by identity

    def add(self, num_rows: int, seconds: float, questions: frozenset[int] = frozenset()) -> None:
        """questions: of which the step had tokens."""
        if not questions:
            self._decoding.add(num_rows, seconds)
            return
        if questions not in self._of:
            self._of = {questions: _Times(_REMEMBERED_OF_QUESTIONS)}
        for times in (self._asking, self._of[questions]):
            times.add(num_rows, seconds)

    def knows(self, num_rows: int) -> bool:
        """Whether as many rows have decoded alone."""
        return num_rows in self._decoding.sizes()

    def rows_within(self, num_rows: int, stretch: float, questions: frozenset[int] = frozenset()) -> int:
        """Rows of a step with these questions that takes at most `stretch` times as long as num_rows that decode.

        As many are known. Rows that were not tried cost no more than in proportion; more are too many when they were
        each time.
        """
        tried, tries = self._of.get(questions, self._asking), _TRIES if questions in self._of else 1
        limit = stretch * self._decoding.least_s(num_rows)
        times = {n: tried.least_s(n) for n in tried.sizes() if n > num_rows}
        slow = [n for n, seconds in times.items() if seconds > limit and tried.count(n) >= tries]
        quick = {num_rows: limit / stretch} | {n: seconds for n, seconds in times.items() if seconds <= limit}
        enough = max(n * limit / seconds if seconds else math.inf for n, seconds in quick.items())
        return int(min(enough, min(slow, default=math.inf) - 1, sys.maxsize))


class _Times:
    """Least times and how often they were taken, by rows, of up to so many steps and as many before them."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._now: dict[int, tuple[float, int]] = {}
        self._before: dict[int, tuple[float, int]] = {}
        self._num_steps = 0

    def add(self, num_rows: int, seconds: float) -> None:
        if self._num_steps % self._remembered == 0:
            self._now, self._before = {}, self._now
        self._num_steps += 1
        least_s, count = self._now.get(num_rows, (seconds, 0))
        self._now[num_rows] = min(seconds, least_s), count + 1

    def sizes(self) -> set[int]:
        return self._now.keys() | self._before.keys()

    def least_s(self, num_rows: int) -> float:
        return min(of[num_rows][0] for of in (self._now, self._before) if num_rows in of)

    def count(self, num_rows: int) -> int:
        return sum(of[num_rows][1] for of in (self._now, self._before) if num_rows in of)


def plan_step(requests: Sequence[Request], max_rows: int, times: StepTimes) -> list[tuple[Request, int]]:
    """Requests and how many tokens of each: one of every request that decodes, the rest of questions.

    requests: in the order of their admission, at most max_rows. Questions share alike; what one does not need goes to
    the oldest. They wait for one step where it is not known how long those that decode take alone.
    """
    assert len(requests) <= max_rows, f"{len(requests)} requests do not fit into steps of {max_rows} rows"
    decoding = [request for request in requests if not request.question_left]
    asking = [request for request in requests if request.question_left]
    room = max_rows - len(decoding)
    if decoding and asking:
        if not times.knows(len(decoding)):
            return [(request, 1) for request in decoding]
        most = times.rows_within(len(decoding), STRETCH, identities(asking))
        room = min(room, max(len(asking), most - len(decoding)))
    shares = share_out(room, [request.question_left for request in asking])
    return [(request, 1) for request in decoding] + [pair for pair in zip(asking, shares, strict=True) if pair[1]]


def identities(questions: Iterable[Request]) -> frozenset[int]:
    """By what `StepTimes` tells them apart, as long as they run."""
    return frozenset(map(id, questions))


def share_out(room: int, wants: Sequence[int]) -> list[int]:
    """Equal parts of the room, none larger than what is wanted; what is left over goes to the first."""
    parts = [0] * len(wants)
    hungry = [i for i, want in enumerate(wants) if want]
    while room and hungry:
        equal = max(1, room // len(hungry))
        for i in hungry:
            part = min(equal, wants[i] - parts[i], room)
            parts[i] += part
            room -= part
        hungry = [i for i in hungry if parts[i] < wants[i]]
    return parts
