"""How a process comes into a Ray cluster."""

import socket
from typing import Any

from csattn.signals import own_handlers

_CONNECT_S = 5.0


def join(
    ray: Any,
    address: str | None,  # None, "auto" and "local": nowhere in particular
    /,
    **options: Any,  # of `ray.init`
) -> None:
    """Raises OSError, RuntimeError or ValueError where there is none, and SystemExit with code 143 for a SIGTERM that
    comes meanwhile, which Ray takes for itself. Signals are handled afterwards as before."""
    if address not in (None, "auto", "local"):  # knock before Ray does, which would go on knocking for many minutes
        host, _, port = address.rpartition("://")[2].rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    with own_handlers(undo=ray.shutdown):
        ray.init(log_to_driver=False, configure_logging=False, **options)
