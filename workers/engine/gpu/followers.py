"""The first process's side of the followers: it starts them, calls them, receives their answers, and ends them."""

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
from workers.engine.gpu.follower import FollowerSpec

MODULE = "workers.engine.gpu.follower_process"
START_S = 180.0  # for a process to import what it needs
STEP_S = 120.0  # more than any step takes
GRACE_S = 60.0  # for all to report a failure, once one has
CLOSE_S = 5.0
_POLL_S = 1.0
_log = logging.getLogger(__name__)


class Followers:
    """Processes with a device each. If one is lost, this process exits too: its device may wait for the other in an
    all-reduce, and work on a device cannot be cancelled."""

    def __init__(self, specs: Sequence[FollowerSpec], module: str = MODULE) -> None:
        """module: whose `main` the processes run. Raises DevicesError if one does not start."""
        self._numbers, self._answers = count(1), dict[tuple[int, int], Future[Any]]()
        self._fault, self._is_up, self._is_closing = "", False, False
        self._deadline: float | None = None
        self._rendezvous = specs[0].rendezvous
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
        except BaseException:  # an interrupt: in a notebook this process lives on
            self.close()
            raise
        self._is_up = True

    def send(self, name: str, *arguments: Any) -> None:
        """Send all followers a call, and do not wait. If it fails in one, all processes end."""
        data = pickle.dumps((None, name, arguments))
        for connection in self._connections:
            connection.send_bytes(data)

    def send_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        for connection, own in zip(self._connections, arguments, strict=True):
            connection.send_bytes(pickle.dumps((None, name, own)))

    def call(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """Send all followers a call; return a future of each one's answer, which raises the error that it reports."""
        number = next(self._numbers)
        data = pickle.dumps((number, name, arguments))
        answers = [self._answer(rank, number) for rank in range(len(self._connections))]
        for connection in self._connections:
            connection.send_bytes(data)
        return answers

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """End all processes if the body takes longer than that."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def end_all(self, why: str) -> None:
        """End all processes at once, this one included: what runs on its device cannot be stopped in another way."""
        for child in self._children:
            child.kill()
        with suppress(OSError):
            self._rendezvous.unlink(missing_ok=True)  # a process group that ends regularly removes it
            self._rendezvous.parent.rmdir()  # if it was made for this file
        _log.critical("%s; this process ends, because its device may wait for the other: start it again", why)
        sys.stderr.flush()
        os._exit(1)

    def shut_down(self) -> None:
        """Have the followers close what they own, and exit."""
        self._is_closing = True
        self.send("close")

    def close(self) -> None:
        """Wait until the followers have exited; kill those that do not."""
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
        """Deliver answers and enforce deadlines, until all followers are gone."""
        ranks = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while ranks:
            for connection in wait(list(ranks), _POLL_S):
                assert isinstance(connection, Connection)
                try:
                    self._deliver(ranks[connection], *pickle.loads(connection.recv_bytes()))
                except (EOFError, OSError):
                    self._report_loss(ranks.pop(connection))
            if self._deadline is not None and time.monotonic() > self._deadline and not self._is_closing:
                self.end_all("the devices did not finish an operation together in time")

    def _deliver(self, rank: int, number: int | None, result: Any) -> None:
        if number is None:
            self._fault = str(result)
        elif isinstance(result, Exception):
            if self._deadline is None:  # if one has failed, all have to: others would wait for ever
                self._deadline = time.monotonic() + GRACE_S
            self._answers.pop((rank, number)).set_exception(result)
        else:
            self._answers.pop((rank, number)).set_result(result)

    def _report_loss(self, rank: int) -> None:
        why = f"the process of device {rank + 1} is lost" + (f" ({self._fault})" if self._fault else "")
        if self._is_up and not self._is_closing:
            self.end_all(why)
        for key in [key for key in self._answers if key[0] == rank]:
            self._answers.pop(key).set_exception(DevicesError(why))


def _start(module: str) -> tuple[Connection, "subprocess.Popen[bytes]"]:
    parent_end, child_end = socket.socketpair()
    with child_end:
        command, environment = module_command(module, str(child_end.fileno()), str(os.getpid()))
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()], env=environment)
    return Connection(parent_end.detach()), child
