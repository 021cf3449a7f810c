"""The address on which the service listens."""

import errno
import socket

from csattn.errors import ConfigError
from workers.settings import ServerSettings


def listen(server: ServerSettings) -> socket.socket:
    """Return a socket bound to the configured address; port 0 stands for any free one.

    Raises ConfigError if the address is not available.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: else asyncio sets no TCP_NODELAY
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise ConfigError(_refusal(server, error)) from error
    listener.set_inheritable(True)
    return listener


def reserve_port(server: ServerSettings) -> socket.socket:
    """Return a socket that is bound to the address without listening: it reserves the port while Ray starts, whose
    Serve shares it. Raises ConfigError as `listen` does.
    """
    with listen(server) as free:  # without SO_REUSEPORT: fails if another program listens
        holder = socket.socket(free.family, socket.SOCK_STREAM)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(free.getsockname())
    return holder


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _refusal(server: ServerSettings, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {server.port} of {server.host} is in use; name another with --port, or 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"this user is not allowed to listen on port {server.port}; give one above 1023 with --port"
    return f"cannot listen on {server.host} ({error.strerror or error}); name an address of this machine with --host"
