"""The first process's way to those of the other devices: what is asked of them, what they say, and their end."""

import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

from csattn.errors import DevicesError
from workers.child import module_command
from workers.engine.follower import FollowerSpec

MODULE = "workers.engine.follower_process"
START_S = 180.0  # for a process to import what it needs
STEP_S = 120.0  # that no step takes
GRACE_S = 60.0  # for all to say that they have failed, where one has
CLOSE_S = 5.0
_LOOK_S = 1.0
_log = logging.getLogger(__name__)


class Followers:
    """Processes with a device each. One that is lost ends this process too: its device may wait for the other's sums,
    and what waits on a device cannot be called back."""

    def __init__(self, specs: Sequence[FollowerSpec], module: str = MODULE) -> None:
        """module: whose main the processes run. Raises DevicesError where one does not come up."""
        self._numbers, self._answers = count(1), dict[tuple[int, int], Future[Any]]()
        self._fault, self._is_up, self._is_closing = "", False, False
        self._must_end_by: float | None = None
        self._meeting = specs[0].meeting
        self._connections, self._children = list[Connection](), list[subprocess.Popen[bytes]]()
        ready = [self._answer(rank, 0) for rank in range(len(specs))]
        self._thread = Thread(target=self._watch, name="followers", daemon=True)
        try:
            for spec in specs:
                connection, child = _start(module)
                self._connections.append(connection)
                self._children.append(child)
                connection.send_bytes(pickle.dumps(spec))
            self._thread.start()
            for answer in ready:
                answer.result(START_S)
        except (DevicesError, OSError) as error:  # TimeoutError is one
            self.close()
            raise DevicesError(
                f"the process of another device did not start ({error or 'it did not answer'}); look at its output"
            ) from error
        self._is_up = True

    def __repr__(self) -> str:
        return f"<Followers {[child.pid for child in self._children]}>"

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def tell(self, name: str, *arguments: Any) -> None:
        """All of them the same, which they do sometime soon. A fault ends all processes."""
        data = pickle.dumps((None, name, arguments))
        for connection in self._connections:
            connection.send_bytes(data)

    def tell_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        for connection, own in zip(self._connections, arguments, strict=True):
            connection.send_bytes(pickle.dumps((None, name, own)))

    def ask(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """What each answers; an error that it was told is the answer's exception."""
        number = next(self._numbers)
        data = pickle.dumps((number, name, arguments))
        answers = [self._answer(rank, number) for rank in range(len(self._connections))]
        for connection in self._connections:
            connection.send_bytes(data)
        return answers

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What is done inside ends in that time, or all processes end."""
        self._must_end_by = time.monotonic() + seconds
        try:
            yield
        finally:
            self._must_end_by = None

    def end_all(self, why: str) -> None:
        """At once, and this process with them: for what runs on its device cannot be stopped in another way."""
        for child in self._children:
            child.kill()
        with suppress(OSError):
            self._meeting.unlink(missing_ok=True)  # a group that ends takes it with it
            self._meeting.parent.rmdir()  # if it was made for that
        _log.critical("%s; this process ends, because its device may wait for the other: start it again", why)
        sys.stderr.flush()
        os._exit(1)

    def let_go(self) -> None:
        """They close what they have, and end."""
        self._is_closing = True
        self.tell("close")

    def close(self) -> None:
        """Those that do not end by themselves are ended."""
        until = time.monotonic() + CLOSE_S * self._is_closing
        self._is_closing = True
        for child in self._children:
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in self._connections:
            connection.close()

    def _answer(self, rank: int, number: int) -> "Future[Any]":
        self._answers[rank, number] = answer = Future[Any]()
        return answer

    def _watch(self) -> None:
        """Hand answers over, until all are gone."""
        there = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while there:
            for connection in wait(list(there), _LOOK_S):
                assert isinstance(connection, Connection)
                try:
                    self._hand_over(there[connection], *pickle.loads(connection.recv_bytes()))
                except (EOFError, OSError):
                    self._lose(there.pop(connection))
            if self._must_end_by is not None and time.monotonic() > self._must_end_by and not self._is_closing:
                self.end_all("the devices did not finish an operation together in time")

    def _hand_over(self, rank: int, number: int | None, said: Any) -> None:
        if number is None:
            self._fault = str(said)
        elif isinstance(said, Exception):
            if self._must_end_by is None:  # where one has failed, all have, or those that have not wait for ever
                self._must_end_by = time.monotonic() + GRACE_S
            self._answers.pop((rank, number)).set_exception(said)
        else:
            self._answers.pop((rank, number)).set_result(said)

    def _lose(self, rank: int) -> None:
        why = f"the process of device {rank + 1} is lost" + (f" ({self._fault})" if self._fault else "")
        if self._is_up and not self._is_closing:
            self.end_all(why)
        for key in [key for key in self._answers if key[0] == rank]:
            self._answers.pop(key).set_exception(DevicesError(why))


def _start(module: str) -> tuple[Connection, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair()
    with theirs:
        command, environment = module_command(module, str(theirs.fileno()), str(os.getpid()))
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    return Connection(ours.detach()), child
