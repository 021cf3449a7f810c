"""Connect this process to a Ray cluster."""

import socket
from typing import Any

from csattn.signals import own_handlers

_CONNECT_S = 5.0


def join(
    ray: Any,
    address: str | None,  # None, "auto" and "local" name no host to probe
    /,
    **options: Any,  # of `ray.init`
) -> None:
    """Call `ray.init`, and restore the signal handlers that it replaces.

    Raises OSError, RuntimeError or ValueError if no cluster can be reached, and SystemExit with code 143 for a SIGTERM
    that arrives meanwhile, which Ray's own handler takes.
    """
    if address not in (None, "auto", "local"):  # probe first: Ray itself would retry for many minutes
        host, _, port = address.rpartition("://")[2].rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    with own_handlers(undo=ray.shutdown):
        ray.init(log_to_driver=False, configure_logging=False, **options)
