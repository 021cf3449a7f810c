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
from workers.searchers.mail import BODY, COUNT, LEAST_BYTES, STEP, STEPS, WAKE_UP, Mail
from workers.searchers.rendezvous import peer_of
from workers.searchers.step_searches import MAX_PLANS

END_S = 10.0  # how long to wait for a killed process to end


class Channel:
    """Sends a worker one request at a time. Once lost, it stays lost: nobody reads the memory of a late answer."""

    mail: Mail

    def __init__(self, connection: socket.socket, spin_ns: int) -> None:
        self.connection, self.spin_ns = connection, spin_ns
        self.lost = False
        self._num_requests = 0
        self._plans: set[int] = set()  # numbers of the plans whose records the worker has
        self._process = _peer_process(connection)
        if self._process is not None:
            weakref.finalize(self, os.close, self._process)
        self._send_memory(LEAST_BYTES)

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
            self.mail.write_step(plan, records if is_new else None, layer_idx, since)
            self._post_request(STEP)
        except OSError:
            self.mark_lost()
        return not self.lost

    def send_request(self, kind: int, text: str, memory: int | None) -> bool:
        """Send a request other than a step; false if the worker is lost. memory: file descriptor of new step memory."""
        try:
            self._plans.clear()
            self.mail.write_text(text, COUNT)
            if memory is not None:
                socket.send_fds(self.connection, [STEPS], [memory])
            self._post_request(kind)
        except OSError:
            self.mark_lost()
        return not self.lost

    def await_answer(self, spin_ns: int) -> bool:
        """Spin for up to spin_ns for the last answer. False: it has not come; the worker will wake this process."""
        return self.mail.await_answer(self._num_requests, spin_ns)

    def read_wakeups(self) -> bool:
        """Read what has come through the socket, without waiting; false if the connection is closed."""
        try:
            return self.connection.recv(64, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def mark_lost(self) -> None:
        """Give the worker up. Closing the connection wakes whoever watches it, and ends the worker if it lives."""
        self.lost = True
        with contextlib.suppress(OSError):  # it may be closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def end_process(self) -> None:
        """Give the worker up and kill its process: when this returns, the worker writes nothing any more.

        If the worker is a thread of this process, or the system has no process file descriptors, nothing is killed.
        """
        self.mark_lost()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            poller = select.poll()  # not `select.select`, which takes no descriptors from 1024 on
            poller.register(self._process, select.POLLIN)
            poller.poll(END_S * 1e3)

    def __del__(self) -> None:
        """Close the socket with its last user: no other file may get its number while a thread polls it."""
        self.connection.close()

    def _post_request(self, kind: int) -> None:
        self._num_requests += 1
        if self.mail.post_request(kind, self._num_requests):
            self.connection.send(WAKE_UP)

    def _send_memory(self, num_bytes: int) -> None:
        """Replace the memory of messages by a new one; no request may be under way."""
        with memory_errors(num_bytes):
            fd = create_memory(num_bytes)
        try:
            self.mail = Mail(map_memory(fd))
            self.mail.begin(self._num_requests)
            socket.send_fds(self.connection, [WAKE_UP], [fd])
        finally:
            os.close(fd)


@contextlib.contextmanager
def memory_errors(num_bytes: int) -> Iterator[None]:
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
                channel.mark_lost()
        waiting = [channel for channel in waiting if channel not in some and not channel.lost]


def await_some(channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
    """Wait until some channels have their answers or are lost, and return them; none after timeout_s."""
    ready = [channel for channel in channels if channel.lost or channel.await_answer(channel.spin_ns)]
    if ready:
        return ready
    poller = select.poll()
    for channel in channels:
        poller.register(channel.connection, select.POLLIN)
    readable = {fd for fd, _ in poller.poll(max(0.0, timeout_s) * 1e3)}
    for channel in channels:
        if channel.connection.fileno() in readable and not channel.read_wakeups():
            channel.mark_lost()
    return [channel for channel in channels if channel.lost or channel.await_answer(0)]
