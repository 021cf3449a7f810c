"""Whose tokens the next step takes."""

import math
import sys
from collections.abc import Sequence

from workers.serving.request import Request

# While others decode, questions make a step at most so many times as long as it is without them, however long they are.
STRETCH = 1.75
_REMEMBERED = 256  # steps, at least


class StepTimes:
    """What rows cost: the least that steps of so many took of late, as the machine may have had other work, too."""

    def __init__(self) -> None:
        self._least_s: dict[int, float] = {}  # by rows: of up to _REMEMBERED steps
        self._before: dict[int, float] = {}  # of as many before them
        self._num_steps = 0

    def add(self, num_rows: int, seconds: float) -> None:
        if self._num_steps % _REMEMBERED == 0:
            self._least_s, self._before = {}, self._least_s
        self._num_steps += 1
        self._least_s[num_rows] = min(seconds, self._least_s.get(num_rows, seconds))

    def knows(self, num_rows: int) -> bool:
        return num_rows in self._least_s or num_rows in self._before

    def rows_within(self, num_rows: int, stretch: float) -> int:
        """Rows of a step that takes at most `stretch` times as long as one of num_rows, of which it knows.

        Rows that were not tried cost no more than in proportion.
        """
        least_s = {n: min(of.get(n, math.inf) for of in (self._least_s, self._before)) for n in self._known()}
        limit = stretch * least_s[num_rows]
        too_many = min((n for n, seconds in least_s.items() if n > num_rows and seconds > limit), default=math.inf)
        enough = max(n * limit / seconds if seconds else math.inf for n, seconds in least_s.items() if seconds <= limit)
        return int(min(enough, too_many - 1, sys.maxsize))

    def _known(self) -> set[int]:
        return self._least_s.keys() | self._before.keys()


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
        room = min(room, max(len(asking), times.rows_within(len(decoding), STRETCH) - len(decoding)))
    shares = share_out(room, [request.question_left for request in asking])
    return [(request, 1) for request in decoding] + [pair for pair in zip(asking, shares, strict=True) if pair[1]]


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
