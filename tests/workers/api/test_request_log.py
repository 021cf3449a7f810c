"""What is logged about requests."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from tests.workers.api.fake_backend import FakeBackend, Script
from tests.workers.api.running import KEY, Running, eventually, serving, settings_with
from workers.api import answering
from workers.serving.messages import (
    BadRequestError,
    ContextNotReadyError,
    OverloadedError,
    ServingError,
    StorageUnavailableError,
    TimedOutError,
    WorkerLostError,
)

PROMPT, SALT = "what nobody else may read", "pepper"


def serve_with(access_log: bool) -> Any:
    settings = settings_with()
    settings = replace(settings, server=replace(settings.server, access_log=access_log))
    return serving(FakeBackend(), settings)


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serve_with(access_log=False) as running:
        yield running


@pytest.fixture(scope="module")
def service_with_access_log() -> Iterator[Running]:
    with serve_with(access_log=True) as running:
        yield running


def ask(service: Running, **more: Any) -> httpx2.Response:
    body = {"model": "smollm2-135m@handbook", "prompt": PROMPT, "cache_salt": SALT, **more}
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine"}
    return httpx2.post(f"{service.url}/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "in a stream"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OverloadedError("it is\nfull"), "429 overloaded, it is full"),
        (TimedOutError("it took too long"), "504 timeout, it took too long"),
        (WorkerLostError("it ended"), "503 worker_lost, it ended"),
        (StorageUnavailableError("it is full", detail="/srv is full"), "503 storage_unavailable, /srv is full"),
        (ContextNotReadyError("it is damaged", detail="/srv/x has"), "409 context_not_ready, /srv/x has"),
        (ServingError("it broke"), "500 internal_error, it broke"),
        (BadRequestError("it is wrong"), None),
    ],
)
def test_failures_other_than_client_errors_are_logged_with_their_reason(
    service: Running,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: ServingError,
    words: str | None,
    is_late: bool,
) -> None:
    monkeypatch.setattr(answering, "QUIET_S", 0.05)
    service.backend.scripts[PROMPT] = Script(fail_at=0, error=error, first_after_s=1.0 * is_late)
    assert ask(service, stream=is_late).status_code == (200 if is_late else error.status)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([f"POST /v1/completions: {words} (request mine)"] if words else [])


def test_an_internal_error_is_logged_with_a_traceback(service: Running, caplog: pytest.LogCaptureFixture) -> None:
    service.backend.scripts[PROMPT] = Script(fail_at=1, error=RuntimeError("of ours"))
    ask(service, stream=True)
    ask(service)
    assert [record.getMessage() for record in caplog.records] == ["POST /v1/completions failed"] * 2
    assert caplog.text.count("RuntimeError: of ours") == 2


def test_without_access_log_a_successful_request_is_not_logged(
    service: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service.backend.scripts.clear()
    assert ask(service).status_code == 200
    assert not [record for record in caplog.records if record.name == "csattn.api"]


@pytest.mark.parametrize("stream", [False, True])
def test_with_access_log_each_request_logs_one_line(
    service_with_access_log: Running, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    assert ask(service_with_access_log, stream=stream, n=2).status_code == 200
    told = r"POST /v1/completions: 200 in \d+ ms, 2014 prompt 2000 cached 8 new tokens \(request mine\)"
    [line] = lines(caplog, 1)
    assert re.fullmatch(told, line), line


def test_a_broken_streams_log_line_has_the_cause_and_the_tokens_used(
    service_with_access_log: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service_with_access_log.backend.scripts[PROMPT] = Script(fail_at=2, error=WorkerLostError("it ended"))
    try:
        assert ask(service_with_access_log, stream=True).status_code == 200
    finally:
        service_with_access_log.backend.scripts.clear()
    why, line = lines(caplog, 2)
    assert why == "POST /v1/completions: 503 worker_lost, it ended (request mine)"
    tokens = "1007 prompt 1000 cached 2 new tokens"
    told = rf"POST /v1/completions: 200, broken off: worker_lost, in \d+ ms, {tokens} \(request mine\)"
    assert re.fullmatch(told, line), line


def test_logged_paths_are_escaped_and_shortened(
    service_with_access_log: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    httpx2.get(f"{service_with_access_log.url}/no%0A2026%20INFO?key={KEY}", headers={"Authorization": "Bearer wrong"})
    httpx2.get(f"{service_with_access_log.url}/" + "x" * 1000)
    first, second = lines(caplog, 2)
    assert re.fullmatch(r"GET /no%0A2026%20INFO: 401 in \d+ ms \(request [0-9a-f]{32}\)", first)
    assert second.startswith("GET /x") and len(second) < 300


def lines(caplog: pytest.LogCaptureFixture, number: int) -> list[str]:
    """Return the messages of the service once there are `number`: it logs after it has replied."""

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "csattn.api"]

    assert eventually(lambda: len(told()) >= number)
    return told()
