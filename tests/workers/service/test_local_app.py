"""What the service in one process logs when a signal ends it."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from workers.api.server import Server, server_of
from workers.service.local_app import _ending
from workers.serving.build_queue import BuildCounts
from workers.serving.metrics import ContextCounts
from workers.settings import Settings


def backend_with(num_running: int, **builds: BuildCounts) -> Any:
    counts = ContextCounts(builds=builds)
    return SimpleNamespace(status=lambda: SimpleNamespace(num_running=num_running), context_counts=lambda: counts)


def server() -> Server:
    return server_of(None, Settings(), log_config=None)


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (backend_with(0), "0 requests have 10 s"),
        (backend_with(2, prompt=BuildCounts(num_failed=3)), "2 requests have 10 s"),
        (
            backend_with(1, registered=BuildCounts(1, 1, 5), prompt=BuildCounts(0, 1)),
            "1 request has 10 s; builds that stop, and continue after a restart: 3",
        ),
    ],
)
def test_the_shutdown_log_names_the_signal_and_the_open_work(backend: Any, told: str) -> None:
    ending = server()
    assert _ending(ending, backend).startswith("the service ends (no signal): ")
    ending.handle_exit(signal.SIGTERM, None)
    assert ending.should_exit
    assert _ending(ending, backend) == f"the service ends (SIGTERM): {told}"
