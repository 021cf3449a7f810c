"""The client's end of the connection to one worker: shared memory for messages, a socket for wake-ups and hang-ups."""

import contextlib
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from csattn.errors import SearchLostError
from offload.shared_memory import create_memory, map_memory
from workers.searchers.mail import (
    BODY,
    COUNT,
    FAILED,
    KIND,
    LAYER,
    LEAST_BYTES,
    LOOK,
    PLAN,
    REPLY_BYTES,
    SINCE,
    STATUS,
    STEP,
    STEPS,
    WORKED_NS,
    Mail,
)
from workers.searchers.rendezvous import peer_of
from workers.searchers.step_searches import MAX_PLANS
from workers.searchers.words import ANSWERED, ASKED, CLIENT_SLEEPS, WORKER_SLEEPS, await_word, post

END_S = 10.0  # how long to wait for a killed process to end


class Channel:
    """Sends a worker one request at a time. Once lost, it stays lost: nobody reads the memory of a late answer."""

    mail: Mail

    def __init__(self, connection: socket.socket, spin_ns: int) -> None:
        self.connection, self.spin_ns = connection, spin_ns
        self.lost = False
        self._asked = 0
        self._plans: set[int] = set()  # numbers of the plans whose records the worker has
        self._process = _peer_process(connection)
        if self._process is not None:
            weakref.finalize(self, os.close, self._process)
        self._send_memory(LEAST_BYTES)

    @property
    def failure(self) -> str | None:
        """The worker's error at the last request; None: it succeeded."""
        if int(self.mail.words[STATUS]) != FAILED:
            return None
        return self.mail.read_text(REPLY_BYTES)

    @property
    def worked_ns(self) -> int:
        """The time that the worker spent on the last request."""
        return int(self.mail.words[WORKED_NS])

    def step(self, plan: int, records: NDArray[np.void], layer_idx: int, since: int) -> bool:
        """Request a step's searches; false if the worker is lost.

        plan: number of the plan. Its records are sent only if the worker does not have them. since: see `StepSearches`.
        """
        try:
            is_new = plan not in self._plans
            if is_new:
                if BODY + records.nbytes > len(self.mail.memory):
                    self._send_memory(2 * (BODY + records.nbytes))
                if len(self._plans) >= MAX_PLANS:  # the worker forgets them, too
                    self._plans.clear()
                self._plans.add(plan)
                self.mail.write_records(records)
            words = self.mail.words
            words[COUNT], words[PLAN], words[LAYER], words[SINCE] = records.size * is_new, plan, layer_idx, since
            self._ask(STEP)
        except OSError:
            self.lose()
        return not self.lost

    def tell(self, kind: int, text: str, memory: int | None) -> bool:
        """Send a request other than a step; false if the worker is lost. memory: file descriptor of new step memory."""
        try:
            self._plans.clear()
            self.mail.write_text(text, COUNT)
            if memory is not None:
                socket.send_fds(self.connection, [STEPS], [memory])
            self._ask(kind)
        except OSError:
            self.lose()
        return not self.lost

    def await_word(self, spin_ns: int) -> bool:
        """Spin for up to spin_ns for the last answer. False: it has not come; the worker will wake this process."""
        return bool(await_word(self.mail.words, ANSWERED, self._asked, CLIENT_SLEEPS, spin_ns))

    def hear(self) -> bool:
        """Read what has come through the socket, without waiting; false if the connection is closed."""
        try:
            return self.connection.recv(64, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def lose(self) -> None:
        """Give the worker up. Closing the connection wakes whoever watches it, and ends the worker if it lives."""
        self.lost = True
        with contextlib.suppress(OSError):  # it may be closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def end_process(self) -> None:
        """Give the worker up and kill its process: when this returns, the worker writes nothing any more.

        If the worker is a thread of this process, or the system has no process file descriptors, nothing is killed.
        """
        self.lose()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            poller = select.poll()  # not `select.select`, which takes no descriptors from 1024 on
            poller.register(self._process, select.POLLIN)
            poller.poll(END_S * 1e3)

    def __del__(self) -> None:
        """Close the socket with its last user: no other file may get its number while a thread polls it."""
        self.connection.close()

    def _ask(self, kind: int) -> None:
        words = self.mail.words
        words[KIND] = kind
        self._asked += 1
        if post(words, ASKED, self._asked, WORKER_SLEEPS):
            self.connection.send(LOOK)

    def _send_memory(self, num_bytes: int) -> None:
        """Replace the memory of messages by a new one; no request may be under way."""
        with shared_memory_errors(num_bytes):
            fd = create_memory(num_bytes)
        try:
            self.mail = Mail(map_memory(fd))
            self.mail.words[ASKED] = self.mail.words[ANSWERED] = self._asked
            socket.send_fds(self.connection, [LOOK], [fd])
        finally:
            os.close(fd)


@contextlib.contextmanager
def shared_memory_errors(num_bytes: int) -> Iterator[None]:
    """Convert an OSError while shared memory is made into a SearchLostError that says how much was needed."""
    try:
        yield
    except OSError as error:
        raise SearchLostError(
            f"no {num_bytes / 1e6:.1f} MB of memory to share with search workers ({error.strerror}); free memory, or "
            "serve fewer requests at a time"
        ) from error


def _peer_process(connection: socket.socket) -> int | None:
    """A process file descriptor (pidfd) of the other end, safe against reuse of its id; None: it is this process, it
    has gone, or the system has none."""
    peer = peer_of(connection)
    if peer is None or peer[0] == os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(peer[0])
    except OSError:  # the process has gone already
        return None


def await_answers(channels: Sequence[Channel], patience_s: float) -> None:
    """Wait until every channel has its answer or is lost. Those without an answer after patience_s become lost."""
    waiting, deadline = list(channels), time.monotonic() + patience_s
    while waiting:
        some = await_some(waiting, deadline - time.monotonic())
        if not some and time.monotonic() >= deadline:
            for channel in waiting:
                channel.lose()
        waiting = [channel for channel in waiting if channel not in some and not channel.lost]


def await_some(channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
    """Wait until some channels have their answers or are lost, and return them; none after timeout_s."""
    ready = [channel for channel in channels if channel.lost or channel.await_word(channel.spin_ns)]
    if ready:
        return ready
    poller = select.poll()
    for channel in channels:
        poller.register(channel.connection, select.POLLIN)
    heard = {fd for fd, _ in poller.poll(max(0.0, timeout_s) * 1e3)}
    for channel in channels:
        if channel.connection.fileno() in heard and not channel.hear():
            channel.lose()
    return [channel for channel in channels if channel.lost or channel.await_word(0)]
