"""Where the service listens."""

import asyncio
import socket

import pytest

from csattn.errors import ConfigError
from workers.service.addresses import listen, reserve_port, url_of
from workers.settings import Secret, ServerSettings


def test_port_zero_picks_a_free_port() -> None:
    with listen(ServerSettings(port=0)) as first, listen(ServerSettings(port=0)) as second:
        assert first.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1] > 0


def test_a_port_in_use_is_refused_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1 is in use; name another with --port"):
            listen(ServerSettings(port=port))


def test_a_reserved_port_can_be_bound_only_with_reuseport() -> None:
    with reserve_port(ServerSettings(port=0)) as holder, socket.socket() as serve, socket.socket() as other:
        address = holder.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as Ray's proxies open it
            serve.setsockopt(socket.SOL_SOCKET, option, 1)
        serve.bind(address)
        serve.listen()
        for _ in range(20):  # the holder takes none of the connections
            with socket.create_connection(address, timeout=5) as client, serve.accept()[0] as accepted:
                assert accepted.getpeername() == client.getsockname()
        with pytest.raises(ConfigError, match="is in use"):
            reserve_port(ServerSettings(port=address[1]))


def test_an_address_of_another_machine_is_refused_with_the_remedy() -> None:
    elsewhere = ServerSettings(host="203.0.113.7", port=0, api_keys=(Secret("key"),))
    with pytest.raises(ConfigError, match=r"cannot listen on 203.0.113.7 .*; name an address of this machine"):
        listen(elsewhere)


def test_accepted_connections_have_tcp_nodelay() -> None:
    """Without TCP_NODELAY, data waits for a delayed acknowledgement: 40 ms of each answer on a reused connection."""

    async def delays() -> bool:
        accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        listener = listen(ServerSettings(port=0))
        async with await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=listener):
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await accepted.get()
            is_delayed = not writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()
            writer.close()
        return is_delayed

    assert not asyncio.run(delays())


def test_url_of_ipv4_and_ipv6_hosts() -> None:
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url_of("::1", 8000) == "http://[::1]:8000"
