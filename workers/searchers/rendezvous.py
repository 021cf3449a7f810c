"""How a client and one worker connect: through a Unix socket of this user that is used once."""

import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from csattn.errors import SearchLostError

POLL_S = 0.1  # interval at which `accept` calls give_up


class Rendezvous:
    """Listens for one worker. On Linux its address is abstract, so no file can be left behind; elsewhere it is a file
    in a private directory.

    Both processes have to be on one machine, in one network namespace.
    """

    def __init__(self) -> None:
        self._directory: str | None = None
        name = f"csattn-{os.getpid()}-{secrets.token_hex(12)}"
        if sys.platform == "linux":
            self.address = f"@{name}"
        else:
            # not in TMPDIR: a socket's path may have at most 103 bytes, and macOS's TMPDIR may be longer
            self._directory = tempfile.mkdtemp(prefix=f"csattn-{os.getpid()}-", dir="/tmp")
            self.address = str(Path(self._directory) / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(_socket_name(self.address))
            self._listener.listen(1)
            self._listener.settimeout(POLL_S)
        except BaseException:
            self.close()
            raise

    def accept(self, timeout_s: float, give_up: Callable[[], str | None]) -> socket.socket:
        """Wait for the worker's connection. Raises SearchLostError after timeout_s, or if give_up returns a reason."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if reason := give_up():
                    raise SearchLostError(reason) from None
                if time.monotonic() > deadline:
                    raise SearchLostError(
                        f"a search worker has not started within {timeout_s:.0f} s; look at its output, and check "
                        "that it runs on this machine and in this network namespace"
                    ) from None
                continue
            connection.setblocking(True)
            if _is_of_this_user(connection):
                return connection
            connection.close()

    def close(self) -> None:
        self._listener.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def connect(address: str) -> socket.socket:
    """Connect a worker to its client. Raises OSError if no process of this user listens at the address."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_socket_name(address))
        if not _is_of_this_user(connection):
            raise PermissionError(f"a process of another user listens at {address}")
    except BaseException:
        connection.close()
        raise
    return connection


def _socket_name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def peer_of(connection: socket.socket) -> tuple[int, int] | None:
    """Process id and user id of the other end; None if the system does not report them (SO_PEERCRED)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the other process belongs to this user. If the system does not report it, the private directory
    ensures it."""
    peer = peer_of(connection)
    return peer is None or peer[1] == os.getuid()
