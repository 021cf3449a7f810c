"""Whose tokens the next step takes."""

from collections.abc import Sequence

from workers.serving.request import Request

# While others decode, questions make a step about so many times as long as it is without them, however long they are.
STRETCH = 2.0
_REMEMBERED = 256  # steps, at least
_FIRST_TRIED, _FEWEST = 8, 4  # rows: a CPU's products take four in little more time than one
_PATIENCE = 16  # steps


class QuestionRows:
    """How many rows of questions go beside those that decode.

    A quarter more after a step that was short enough, a quarter less, for a while, after one that was not: so what else
    the machine did is soon forgotten. What is short enough, the least tells that steps without questions took of late.
    """

    def __init__(self) -> None:
        self._alone_s: dict[int, float] = {}  # by rows that decode: of up to _REMEMBERED steps
        self._before: dict[int, float] = {}  # of as many before them
        self._num_steps = 0
        self._num_patient = 0  # steps in which no more rows are tried
        self.room = _FIRST_TRIED

    def add(self, num_decoding: int, num_asking: int, seconds: float) -> None:
        """What a step took."""
        if self._num_steps % _REMEMBERED == 0:
            self._alone_s, self._before = {}, self._alone_s
        self._num_steps += 1
        if not num_asking:
            self._alone_s[num_decoding] = min(seconds, self._alone_s.get(num_decoding, seconds))
        elif self.knows(num_decoding):
            alone_s = min(of[num_decoding] for of in (self._alone_s, self._before) if num_decoding in of)
            if seconds > STRETCH * alone_s:
                self.room = max(_FEWEST, self.room - max(1, self.room // 4))
                self._num_patient = _PATIENCE
            elif self._num_patient:
                self._num_patient -= 1
            elif num_asking >= self.room:
                self.room += max(1, self.room // 4)

    def knows(self, num_decoding: int) -> bool:
        """What these take alone."""
        return num_decoding in self._alone_s or num_decoding in self._before


def plan_step(requests: Sequence[Request], max_rows: int, beside: QuestionRows) -> list[tuple[Request, int]]:
    """Requests and how many tokens of each: one of every request that decodes, the rest of questions.

    requests: in the order of their admission, at most max_rows. Questions share alike; what one does not need goes to
    the oldest. They wait for one step where it is not known how long those that decode take alone.
    """
    assert len(requests) <= max_rows, f"{len(requests)} requests do not fit into steps of {max_rows} rows"
    decoding = [request for request in requests if not request.question_left]
    asking = [request for request in requests if request.question_left]
    room = max_rows - len(decoding)
    if decoding and asking:
        if not beside.knows(len(decoding)):
            return [(request, 1) for request in decoding]
        room = min(room, max(len(asking), beside.room))
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
