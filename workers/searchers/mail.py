"""The shared memory of requests to one worker and its answers: a header of int64 words, then the body.

A request has a kind and its arguments: for a step, records in the body if the worker does not have them yet; for the
rare other kinds, a text. Queries, choices and flags are in the step memory, which all workers map.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.posts import LINE
from workers.searchers.step_searches import STEP_SEARCH
from workers.searchers.words import CLIENT_SLEEPS, LAST_ANSWER, LAST_REQUEST, WORKER_SLEEPS, await_word, post

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

    @property
    def failure(self) -> str | None:
        """The worker's error at the last request; None: it succeeded."""
        return self.read_text(REPLY_BYTES) if int(self.words[STATUS]) == FAILED else None

    @property
    def worked_ns(self) -> int:
        """The time that the worker spent on the last request."""
        return int(self.words[WORKED_NS])

    def begin(self, num_requests: int) -> None:
        """Begin in new memory, after so many requests and their answers."""
        self.words[LAST_REQUEST] = self.words[LAST_ANSWER] = num_requests

    def post_request(self, kind: int, number: int) -> bool:
        """Publish a request, whose arguments are written already. True if the worker sleeps and must be woken up."""
        self.words[KIND] = kind
        return bool(post(self.words, LAST_REQUEST, number, WORKER_SLEEPS))

    def await_request(self, number: int, spin_ns: int) -> bool:
        """Spin for a request for up to spin_ns. False: it has not come, and the client will wake this worker up."""
        return bool(await_word(self.words, LAST_REQUEST, number, WORKER_SLEEPS, spin_ns))

    def post_answer(self, number: int, status: int, worked_ns: int) -> bool:
        """Publish an answer. True if the client sleeps and must be woken up."""
        self.words[STATUS], self.words[WORKED_NS] = status, worked_ns
        return bool(post(self.words, LAST_ANSWER, number, CLIENT_SLEEPS))

    def await_answer(self, number: int, spin_ns: int) -> bool:
        """Spin for an answer for up to spin_ns. False: it has not come, and the worker will wake this client up."""
        return bool(await_word(self.words, LAST_ANSWER, number, CLIENT_SLEEPS, spin_ns))

    def write_step(self, plan: int, records: NDArray[np.void] | None, layer_idx: int, since: int) -> None:
        """Write the arguments of a step. records: of dtype STEP_SEARCH, for which the body must have room; None: the
        worker has them."""
        self.words[COUNT] = 0 if records is None else records.size
        self.words[PLAN], self.words[LAYER], self.words[SINCE] = plan, layer_idx, since
        if records is not None:
            self.memory[BODY : BODY + records.nbytes].view(STEP_SEARCH)[:] = records.reshape(-1)

    def read_step(self) -> tuple[int, NDArray[np.void] | None, int, int]:
        """Return the arguments of `write_step`; of the records [num_records] a copy."""
        plan, layer_idx, since, count = (int(self.words[word]) for word in (PLAN, LAYER, SINCE, COUNT))
        records = self.memory[BODY : BODY + count * STEP_SEARCH.itemsize].view(STEP_SEARCH)
        return plan, records.copy() if count else None, layer_idx, since

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
