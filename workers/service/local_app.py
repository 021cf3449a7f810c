"""The service in one process, without Ray: the same application over the same backend."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping

from csattn.signals import ending_signals
from workers.api import make_app, server_of
from workers.api.server import Server
from workers.searchers.process import ChildProcess
from workers.service.addresses import url_of
from workers.service.log_lines import log_to_stderr
from workers.service.machine import describe_machine
from workers.service.making import make_backend
from workers.serving.local import LocalBackend
from workers.settings import Settings
from workers.words import counted

DRAIN_S = 10.0  # for requests that still run when a signal ends the service
_POLL_S = 0.05
_log = logging.getLogger(__name__)


def serve_locally(
    settings: Settings, named: Mapping[str, str], listener: socket.socket, on_ready: Callable[[str, str], None]
) -> str:
    """Serve until one of `ending_signals` arrives, and return its name.

    named: artifact ids by context name. on_ready: called with the URL and a description of the machine. Raises
    ContextNotReadyError for an artifact that another model has made.
    """
    log_to_stderr()
    backend = make_backend(settings, ChildProcess)
    server = server_of(make_app(backend, settings), settings, log_config=None)
    found = describe_machine(settings, backend.loaded)
    url = url_of(settings.server.host, listener.getsockname()[1])
    for number in ending_signals():
        # uvicorn installs the same handler for most of them while it runs, and then raises what it caught again
        signal.signal(number, server.handle_exit)
    asyncio.run(_serve(server, backend, named, listener, lambda: on_ready(url, found)))
    return server.ended_by


async def _serve(
    server: Server,
    backend: LocalBackend,
    named: Mapping[str, str],
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal has come and the requests that were running then have ended."""
    await backend.start()
    try:
        for name, artifact_id in named.items():
            await backend.name(name, artifact_id)
        if server.should_exit:  # a signal came before serving began
            return
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(_POLL_S)
        if server.started:
            on_ready()
        while not (server.should_exit or serving.done()):
            await asyncio.sleep(_POLL_S)
        _log.info("%s", _ending(server, backend))
    finally:
        await backend.close(DRAIN_S)
    await serving


def _ending(server: Server, backend: LocalBackend) -> str:
    """Return the line to log when the service begins to end."""
    builds = backend.context_counts().builds.values()
    num_builds = sum(of.num_waiting + of.num_building for of in builds)
    num_running = backend.status().num_running
    waited_for = f"{counted(num_running, 'request')} {'has' if num_running == 1 else 'have'} {DRAIN_S:.0f} s"
    stopped = f"; builds that stop, and continue after a restart: {num_builds}" if num_builds else ""
    return f"the service ends ({server.ended_by or 'no signal'}): {waited_for}{stopped}"
