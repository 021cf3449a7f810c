"""The memory through which one worker is told what to do, and answers: a header of words, then the body.

A request is its kind and what the kind asks for: a step, whose records come in the body when the worker does not have
them yet; or a text, where it is rare. Queries, choices and flags lie in the memory of steps, which all workers map.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.posts import LINE
from workers.searchers.step_searches import STEP_SEARCH

# of the request; COUNT: records that come with it, or bytes of text; the rest is of a step: see `StepSearches`
KIND, COUNT, PLAN, LAYER, SINCE = range(4 * LINE, 4 * LINE + 5)
STATUS, REPLY_BYTES, WORKED_NS = range(5 * LINE, 5 * LINE + 3)  # of the answer; REPLY_BYTES: of its text
HEADER_WORDS = 6 * LINE
BODY = 8 * HEADER_WORDS  # where it begins, in bytes
LEAST_BYTES = 1 << 16  # room for any text

LOOK, STEPS = b"\0", b"\1"  # what goes through the socket: look at the memory; a descriptor comes with it of
# new memory of this kind, or, with STEPS, of new memory of steps
STEP, LOAD, UNLOAD, ATTACH = range(4)  # kinds of request
DONE, FAILED = range(2)  # status


class Mail:
    """A view of that memory, of either side."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.words: NDArray[np.int64] = memory[:BODY].view(np.int64)

    def write_records(self, records: NDArray[np.void]) -> None:
        """Put a step's records, of STEP_SEARCH, in the body, which has room for them; the request says how many."""
        self.memory[BODY : BODY + records.nbytes].view(STEP_SEARCH)[:] = records.reshape(-1)

    def read_records(self) -> NDArray[np.void]:
        """[count] of STEP_SEARCH."""
        return self.memory[BODY : BODY + int(self.words[COUNT]) * STEP_SEARCH.itemsize].view(STEP_SEARCH).copy()

    def write_text(self, text: str, count_at: int) -> None:
        """Put the text in the body, as much as is sure to have room, and its length into that word.

        Names of files are texts that are not always of whole characters.
        """
        data = text[: (LEAST_BYTES - BODY) // 4].encode(errors="surrogatepass")  # none has more bytes
        self.memory[BODY : BODY + len(data)] = np.frombuffer(data, np.uint8)
        self.words[count_at] = len(data)

    def read_text(self, count_at: int) -> str:
        data = self.memory[BODY : BODY + int(self.words[count_at])]
        return data.tobytes().decode(errors="surrogatepass")
