"""A stream whose answer has not begun sends comments as signs of life, which OpenAI's own client skips."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.workers.api.fake_backend import Script
from tests.workers.api.running import KEY, Running, eventually, serving
from workers.api import answering
from workers.serving.messages import ServingError, TimedOutError, WorkerLostError

MODEL = "smollm2-135m@handbook"
ASK: list[Any] = [{"role": "user", "content": "go"}]
LATE = Script(first_after_s=1.0)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(answering, "QUIET_S", 0.1)
    with serving() as running:
        yield running


def text_of(service: Running) -> tuple[int, str]:
    body = {"model": MODEL, "prompt": "go", "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx2.post(f"{service.url}/v1/completions", json=body, headers=headers)
    return reply.status_code, reply.text


def test_a_stream_sends_comments_until_the_answer_begins(service: Running) -> None:
    service.backend.scripts["go"] = LATE
    status, text = text_of(service)
    events = text.split("\n\n")
    num_comments = sum(event == ": the answer has not begun yet" for event in events)
    assert status == 200 and num_comments >= 2
    assert all(event.startswith("data: ") for event in events[num_comments:-1]) and events[-2] == "data: [DONE]"


def test_a_stream_that_begins_soon_sends_no_comments(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "QUIET_S", 10.0)
    assert ": " not in text_of(service)[1].replace("data: ", "")


def test_openai_client_skips_the_comments(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts["go"] = LATE
    chat = client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "The answer is 42."
    text = client.completions.create(model=MODEL, prompt="go", stream=True)
    assert "".join(chunk.choices[0].text for chunk in text) == "The answer is 42."
    with client.responses.stream(model=MODEL, input="go") as response:
        assert response.get_final_response().output_text == "The answer is 42."


def test_anthropics_client_skips_the_comments(service: Running) -> None:
    service.backend.scripts["go"] = LATE
    with (
        anthropic.Anthropic(base_url=service.url, api_key=KEY, max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=9, messages=ASK) as stream,
    ):
        assert stream.get_final_text() == "The answer is 42."


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TimedOutError("late"), "timeout"),
        (WorkerLostError("gone"), "worker_lost"),
        (ServingError("broken"), "internal_error"),
        (RuntimeError("a secret of ours"), "internal_error"),
    ],
)
def test_a_failure_after_the_headers_is_sent_as_an_error_event(
    service: Running, client: openai.OpenAI, error: Exception, code: str
) -> None:
    service.backend.scripts["go"] = Script(first_after_s=1.0, fail_at=0, error=error)
    status, text = text_of(service)
    *comments, last, end = text.split("\n\n")
    assert status == 200 and comments and all(comment.startswith(": ") for comment in comments)
    assert last.startswith('data: {"error":') and f'"code": "{code}"'.replace(" ", "") in last.replace(" ", "")
    assert not end and "secret" not in text
    for stream in (
        client.chat.completions.create(model=MODEL, messages=ASK, stream=True),
        client.responses.create(model=MODEL, input="go", stream=True),
    ):
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code == code
    assert not service.backend.running


def test_a_response_that_fails_says_so_as_an_event_of_its_own_kind(service: Running) -> None:
    """Codex reads nothing else, and asks again until it knows that the response failed."""
    service.backend.scripts["go"] = Script(fail_at=1, error=WorkerLostError("gone"))
    body, headers = {"model": MODEL, "input": "go", "stream": True}, {"Authorization": f"Bearer {KEY}"}
    text = httpx2.post(f"{service.url}/v1/responses", json=body, headers=headers).text
    *_, before, last, end = text.split("\n\n")
    kind, _, data = last.partition("\ndata: ")
    told, number = json.loads(data), json.loads(before.partition("\ndata: ")[2])["sequence_number"]
    assert (kind, told["type"], told["sequence_number"], end) == ("event: response.failed", kind[7:], number + 1, "")
    assert told["response"]["status"] == "failed" and told["error"]["code"] == "worker_lost"
    assert told["response"]["error"] == {"code": "worker_lost", "message": told["error"]["message"]}


def test_a_client_disconnect_before_the_first_token_frees_its_slot(service: Running) -> None:
    service.backend.scripts["go"] = Script(first_after_s=30.0)
    body = {"model": MODEL, "prompt": "go", "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx2.stream("POST", f"{service.url}/v1/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()  # kept in a variable: a dropped iterator closes the reply
        assert next(lines).startswith(": ")
        assert len(service.backend.running) == 1
    assert eventually(lambda: not service.backend.running)
    assert service.backend.num_ended_early == 1
