"""The shared memory of requests to one worker and its answers: a header of int64 words, then the body.

A request has a kind and its arguments: for a step, records in the body if the worker does not have them yet; for the
rare other kinds, a text. Queries, choices and flags are in the step memory, which all workers map.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.posts import LINE
from workers.searchers.step_searches import STEP_SEARCH

# Words of the request. COUNT: number of records in the body, or bytes of text; the last three: see `StepSearches.run`.
KIND, COUNT, PLAN, LAYER, SINCE = range(4 * LINE, 4 * LINE + 5)
STATUS, REPLY_BYTES, WORKED_NS = range(5 * LINE, 5 * LINE + 3)  # words of the answer; REPLY_BYTES: of its text
HEADER_WORDS = 6 * LINE
BODY = 8 * HEADER_WORDS  # where it begins, in bytes
LEAST_BYTES = 1 << 16  # room for any text

# Bytes sent through the socket. WAKE_UP: look at the memory; a file descriptor that comes with it is of new memory of
# this kind. STEPS: the file descriptor is of new step memory.
WAKE_UP, STEPS = b"\0", b"\1"
STEP, LOAD, UNLOAD, ATTACH = range(4)  # values of KIND
DONE, FAILED = range(2)  # values of STATUS


class Mail:
    """A view of this memory, for both sides."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.words: NDArray[np.int64] = memory[:BODY].view(np.int64)

    def write_records(self, records: NDArray[np.void]) -> None:
        """Write a step's records, of dtype STEP_SEARCH, to the body, which must have room; the caller sets COUNT."""
        self.memory[BODY : BODY + records.nbytes].view(STEP_SEARCH)[:] = records.reshape(-1)

    def read_records(self) -> NDArray[np.void]:
        """Return a copy of the records in the body: [count] of STEP_SEARCH."""
        return self.memory[BODY : BODY + int(self.words[COUNT]) * STEP_SEARCH.itemsize].view(STEP_SEARCH).copy()

    def write_text(self, text: str, count_at: int) -> None:
        """Write a text to the body, truncated to what certainly fits, and its length in bytes to the word `count_at`.

        Names of files may have lone surrogates.
        """
        data = text[: (LEAST_BYTES - BODY) // 4].encode(errors="surrogatepass")  # no character takes more than 4 bytes
        self.memory[BODY : BODY + len(data)] = np.frombuffer(data, np.uint8)
        self.words[count_at] = len(data)

    def read_text(self, count_at: int) -> str:
        data = self.memory[BODY : BODY + int(self.words[count_at])]
        return data.tobytes().decode(errors="surrogatepass")
