"""The client's end of the way to one worker: memory for what is said, a socket to wake it up and to hear it die."""

import contextlib
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from csattn.errors import SearchLostError
from offload.shared_memory import create_memory, map_memory
from workers.searchers.letters import Letter
from workers.searchers.mail import (
    BODY,
    COUNT,
    FAILED,
    KIND,
    LEAST_BYTES,
    LOOK,
    REPLY_BYTES,
    SEARCH,
    SINCE,
    STATUS,
    STEP,
    WORKED_NS,
    Mail,
)
from workers.searchers.rendezvous import peer_of
from workers.searchers.words import ANSWERED, ASKED, CLIENT_SLEEPS, WORKER_SLEEPS, await_word, post

if TYPE_CHECKING:  # the engine's package brings in all that decodes
    from workers.engine.searcher import RowSearch


END_S = 10.0  # for the system to end a process


class Channel:
    """One request at a time. Once lost, it stays lost: a late answer lies in memory that nobody reads any more."""

    mail: Mail

    def __init__(self, connection: socket.socket, spin_ns: int) -> None:
        self.connection, self.spin_ns = connection, spin_ns
        self.lost = False
        self._asked = 0
        self._plan = 0  # the number of the step's plan that the worker has
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

    def send(self, layer_idx: int, letter: Letter, searches: Sequence["RowSearch"]) -> bool:
        """Ask for the letter's searches; false if the worker is lost."""
        try:
            if letter.num_bytes > self.mail.num_bytes:
                self._send_memory(2 * letter.num_bytes)
            letter.write(self.mail, layer_idx, searches)
            self._ask(SEARCH)
        except OSError:
            self.lose()
        return not self.lost

    def step(self, plan: int, records: NDArray[np.void], since: int) -> bool:
        """Ask for a step's searches; false if the worker is lost. plan: the records' number, by which it knows them."""
        try:
            is_new = plan != self._plan
            if is_new:
                if BODY + records.nbytes > self.mail.num_bytes:
                    self._send_memory(2 * (BODY + records.nbytes))
                self.mail.kept.clear()
                self.mail.array(BODY, (records.size,), records.dtype)[:] = records.reshape(-1)
            self.mail.words[COUNT], self.mail.words[SINCE] = records.size * is_new, since
            self._plan = plan
            self._ask(STEP)
        except OSError:
            self.lose()
        return not self.lost

    def tell(self, kind: int, text: str, count_at: int) -> bool:
        """Ask for something else than a search; false if the worker is lost."""
        try:
            self.mail.kept.clear()
            self._plan = 0
            self.mail.write_text(text, count_at)
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
        try:
            fd = create_memory(num_bytes)
        except OSError as error:
            raise SearchLostError(
                f"no {num_bytes / 1e6:.1f} MB of shared memory for a search worker ({error.strerror}); free memory, or "
                "serve fewer requests at a time"
            ) from error
        try:
            self.mail = Mail(map_memory(fd))
            self.mail.words[ASKED] = self.mail.words[ANSWERED] = self._asked
            socket.send_fds(self.connection, [LOOK], [fd])
        finally:
            os.close(fd)


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
    waiting = [channel for channel in channels if not channel.lost and not channel.await_word(channel.spin_ns)]
    if not waiting:
        return
    poller = select.poll()
    for channel in waiting:
        poller.register(channel.connection, select.POLLIN)
    deadline = time.monotonic() + patience_s
    while waiting:
        ready = {fd for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1e3)}
        still = []
        for channel in waiting:
            alive = channel.connection.fileno() not in ready or channel.hear()
            if channel.await_word(0):
                poller.unregister(channel.connection)
            elif not alive or not ready:  # nothing came from anybody until the deadline
                poller.unregister(channel.connection)
                channel.lose()
            else:
                still.append(channel)
        waiting = still
