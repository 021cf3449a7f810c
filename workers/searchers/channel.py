"""The client's end of the way to one worker: memory for what is said, a socket to wake it up and to hear it die."""

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

END_S = 10.0  # for the system to end a process


class Channel:
    """One request at a time. Once lost, it stays lost: a late answer lies in memory that nobody reads any more."""

    mail: Mail

    def __init__(self, connection: socket.socket, spin_ns: int) -> None:
        self.connection, self.spin_ns = connection, spin_ns
        self.lost = False
        self._asked = 0
        self._plans: set[int] = set()  # numbers of those that the worker has
        self._process = _peer_process(connection)
        if self._process is not None:
            weakref.finalize(self, os.close, self._process)
        self._send_memory(LEAST_BYTES)

    @property
    def failure(self) -> str | None:
        """What the worker says went wrong with the last request; None: nothing."""
        if int(self.mail.words[STATUS]) != FAILED:
            return None
        return self.mail.read_text(REPLY_BYTES)

    @property
    def worked_ns(self) -> int:
        """What the worker has spent on the last request."""
        return int(self.mail.words[WORKED_NS])

    def step(self, plan: int, records: NDArray[np.void], layer_idx: int, since: int) -> bool:
        """Ask for a step's searches; false if the worker is lost. plan: the records' number, by which it knows them."""
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
        """Ask for something else than a search; false if the worker is lost. memory: descriptor of that of steps."""
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
        """Whether the last request is answered. If not, the worker will wake this process up."""
        return bool(await_word(self.mail.words, ANSWERED, self._asked, CLIENT_SLEEPS, spin_ns))

    def hear(self) -> bool:
        """Take what has come through the socket; false if nothing will come any more."""
        try:
            return self.connection.recv(64, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def lose(self) -> None:
        """Give the worker up. Whoever watches the socket is told, and the worker, if it lives, ends."""
        self.lost = True
        with contextlib.suppress(OSError):  # it may have gone by itself
            self.connection.shutdown(socket.SHUT_RDWR)

    def end_process(self) -> None:
        """Give the worker up and end its process: when this returns, it writes nothing any more.

        Where the worker is a thread of this process, or the system cannot name processes for certain, nothing ends.
        """
        self.lose()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            poller = select.poll()  # `select.select` takes no descriptor from 1024 on
            poller.register(self._process, select.POLLIN)
            poller.poll(END_S * 1e3)

    def __del__(self) -> None:
        """Closed with its last user: a descriptor that one thread still waits at must not be given to another file."""
        self.connection.close()

    def _ask(self, kind: int) -> None:
        words = self.mail.words
        words[KIND] = kind
        self._asked += 1
        if post(words, ASKED, self._asked, WORKER_SLEEPS):
            self.connection.send(LOOK)

    def _send_memory(self, num_bytes: int) -> None:
        """Go on in new memory; nothing may be under way."""
        with told_of_room(num_bytes):
            fd = create_memory(num_bytes)
        try:
            self.mail = Mail(map_memory(fd))
            self.mail.words[ASKED] = self.mail.words[ANSWERED] = self._asked
            socket.send_fds(self.connection, [LOOK], [fd])
        finally:
            os.close(fd)


@contextlib.contextmanager
def told_of_room(num_bytes: int) -> Iterator[None]:
    """Memory is made that is shared with workers; where there is no room for it, say so."""
    try:
        yield
    except OSError as error:
        raise SearchLostError(
            f"no {num_bytes / 1e6:.1f} MB of memory to share with search workers ({error.strerror}); free memory, or "
            "serve fewer requests at a time"
        ) from error


def _peer_process(connection: socket.socket) -> int | None:
    """A descriptor of the process at the other end, which no later process can be taken for; None: there is none."""
    peer = peer_of(connection)
    if peer is None or peer[0] == os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(peer[0])
    except OSError:  # it has gone already
        return None


def await_answers(channels: Sequence[Channel], patience_s: float) -> None:
    """Return when every channel has its answer or is lost: dead, or silent for that long."""
    waiting, deadline = list(channels), time.monotonic() + patience_s
    while waiting:
        some = await_some(waiting, deadline - time.monotonic())
        if not some and time.monotonic() >= deadline:
            for channel in waiting:
                channel.lose()
        waiting = [channel for channel in waiting if channel not in some and not channel.lost]


def await_some(channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
    """Those that have their answers or are lost, as soon as there are any; none after that long."""
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
