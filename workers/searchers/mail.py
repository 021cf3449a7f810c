"""The memory through which one worker is asked and answers: a header of words, then the body.

A request is its kind and a number of records that say what to search, where queries lie and where selections go: in
the body for a layer, in the memory of steps for a step. Or it is a text, where it is rare. The worker writes selections
in place, then its status.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.posts import LINE
from offload.shared_memory import array_in
from workers.searchers.step_searches import STEP_SEARCH

# of the request; COUNT: records, or bytes of text; SINCE: what a step's flags count from
KIND, COUNT, SINCE = 4 * LINE, 4 * LINE + 1, 4 * LINE + 2
STATUS, REPLY_BYTES, WORKED_NS = 5 * LINE, 5 * LINE + 1, 5 * LINE + 2  # of the answer; REPLY_BYTES: of its text
HEADER_WORDS = 6 * LINE
BODY = 8 * HEADER_WORDS  # where it begins, in bytes
LEAST_BYTES = 1 << 16  # room for any text

LOOK = b"\0"  # what goes through the socket: look at the memory; new memory comes with it as a descriptor
SEARCH, LOAD, UNLOAD, ATTACH, STEP = range(5)  # kinds of request; STEP: see `step_searches`
DONE, FAILED = range(2)  # status


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

    def request(self) -> bytes:
        """What is to be searched: [count] of STEP_SEARCH."""
        return self.memory[BODY : BODY + int(self.words[COUNT]) * STEP_SEARCH.itemsize].tobytes()

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
