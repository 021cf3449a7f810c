"""The memory through which one worker is asked and answers: a header of words, then the body.

A request is its kind, a layer, and a number of records that say what to search and where in the body queries lie and
selections go (or a text, for requests that are rare). The worker writes selections in place, then its status.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.shared_memory import array_in
from workers.searchers.step_searches import STEP_SEARCH
from workers.searchers.words import LINE

# of the request; COUNT: records, or bytes of text; SINCE: what a step's flags count from
KIND, LAYER, COUNT, SINCE = 4 * LINE, 4 * LINE + 1, 4 * LINE + 2, 4 * LINE + 3
STATUS, REPLY_BYTES, WORKED_NS = 5 * LINE, 5 * LINE + 1, 5 * LINE + 2  # of the answer; REPLY_BYTES: of its text
HEADER_WORDS = 6 * LINE
BODY = 8 * HEADER_WORDS  # where it begins, in bytes
LEAST_BYTES = 1 << 16  # room for any text

LOOK = b"\0"  # what goes through the socket: look at the memory; new memory comes with it as a descriptor
SEARCH, LOAD, UNLOAD, ATTACH, STEP = range(5)  # kinds of request; STEP: see `step_searches`
DONE, FAILED = range(2)  # status

# words of a record
# SCALE: a float64's bits; REST_AT 0: the rest is not asked for
CONTEXT, ROWS, FIRST_HEAD, HEADS, TOP_K, SINK, WINDOW, SCALE, Q_AT, KV_AT, LEN_AT, REST_AT = range(12)
RECORD_WORDS = 12


class Mail:
    """A view of that memory, of either side."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.words: NDArray[np.int64] = memory[:BODY].view(np.int64)
        self.kept: dict[Any, Any] = {}  # what its user has made over this memory, and may use again

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    def array(self, at: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The array at that byte."""
        return array_in(self.memory, at, shape, dtype)

    def records(self) -> NDArray[np.int64]:
        """The records of the request, [count, RECORD_WORDS]."""
        return self.array(BODY, (int(self.words[COUNT]), RECORD_WORDS), np.int64)

    def step_records(self) -> NDArray[np.void]:
        """The records of a request to search a step, [count]."""
        return self.array(BODY, (int(self.words[COUNT]),), STEP_SEARCH)

    def write_text(self, text: str, count_at: int) -> None:
        """Put the text in the body, as much as is sure to have room, and its length into that word."""
        data = text.encode(errors="replace")[: LEAST_BYTES - BODY]
        self.memory[BODY : BODY + len(data)] = np.frombuffer(data, np.uint8)
        self.words[count_at] = len(data)

    def read_text(self, count_at: int) -> str:
        data = self.memory[BODY : BODY + int(self.words[count_at])]
        return data.tobytes().decode(errors="replace")


def private_mail(num_bytes: int) -> Mail:
    """Of this process alone."""
    return Mail(np.zeros(max(num_bytes, LEAST_BYTES), np.uint8))
