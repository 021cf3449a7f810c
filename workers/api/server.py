"""uvicorn with limits: by itself, it waits for a header for ever, and reads one of any length."""

import asyncio
import contextlib
import resource
import signal
import socket
import sys
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from workers.settings import Settings

KEEP_ALIVE_S = 10  # between two requests of a connection
_BACKLOG = 2048  # connections that wait to be accepted, as uvicorn's default
_MANY_FILES = 10240  # the most that macOS gives a process
SHUTDOWN_S = 30  # for requests that are being answered when the service is told to stop


class Server(uvicorn.Server):
    """Remembers which signal ended it."""

    ended_by = ""  # none

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ended_by = signal.Signals(sig).name
        super().handle_exit(sig, frame)


def server_of(app: Any, settings: Settings, **more: Any) -> Server:
    """Return a server of app at the configured address. more: uvicorn's own options."""
    stall_timeout_s, most = settings.limits.stall_timeout_s, _most_connections()

    class Protocol(PatientProtocol):
        header_timeout_s, most_connections = stall_timeout_s, most

    options: dict[str, Any] = {
        "host": settings.server.host,
        "port": settings.server.port,
        "http": Protocol,
        # asyncio accepts as many at once, counts them only some iterations later, and once there are no files left logs
        # a traceback for each of the others
        "backlog": min(_BACKLOG, max(1, most // 8)),
        "ws": "none",
        "lifespan": "off",
        "h11_max_incomplete_event_size": settings.limits.max_header_bytes,
        "timeout_keep_alive": min(KEEP_ALIVE_S, stall_timeout_s),  # also for a header that came with the last request
        "timeout_graceful_shutdown": SHUTDOWN_S,
        "server_header": False,
        "access_log": False,
    }
    return Server(uvicorn.Config(app, **{**options, **more}))


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with timeouts: a client has to complete a header in time, and to read what is sent in time."""

    header_timeout_s: float
    most_connections: int  # of the server; one more is closed at once
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
            return
        self._header_timer = self.loop.call_later(self.header_timeout_s, transport.abort)
        raw = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # not a TCP socket
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * self.header_timeout_s))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # a header is complete
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _most_connections() -> int:
    """Raise this process's limit of open files as far as possible, and return half of it.

    If connections took all of them, no file of the store could be opened, and requests would fail.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    for wanted, number in ((hard, limits[1]), (min(hard, _MANY_FILES), min(hard, _MANY_FILES))):
        if wanted > soft:
            with contextlib.suppress(OSError, ValueError):  # macOS has no hard limit, but gives only _MANY_FILES
                resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
                soft = wanted
    return soft // 2
