"""OpenAI's own client against the service."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tests.workers.api.fake_backend import CONTEXT_TOKENS, FakeBackend, Script
from tests.workers.api.running import KEY, Running, eventually, serving, settings_with
from workers.serving.messages import Health, OverloadedError, ServingError, TimedOutError, WorkerLostError

MODEL = "smollm2-135m@handbook"
ASK: list[Any] = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(settings=settings_with(request_timeout_s=2.0)) as running:
        yield running


def get(service: Running, path: str, **more: Any) -> httpx2.Response:
    return httpx2.get(service.url + path, headers={"Authorization": f"Bearer {KEY}"}, **more)


def test_models_list_the_base_model_and_each_ready_context(service: Running, client: openai.OpenAI) -> None:
    service.backend.add("later", state="building")
    assert [model.id for model in client.models.list()] == ["smollm2-135m", MODEL]
    for name in ("smollm2-135m", MODEL):
        assert client.models.retrieve(name).id == name
        assert client.models.retrieve(name.upper().replace("HANDBOOK", "handbook")).id == name
        assert client.models.retrieve(f"HuggingFaceTB/{name}").id == name
        assert service.backend.looked_up[-1] == name.partition("@")[2], "all of a store's are not looked at for one"
    for name in ("smollm2-135m@later", "smollm2-135m@none", "gpt-4", "a/b"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


def test_models_report_max_model_len_and_creation_time(client: openai.OpenAI) -> None:
    alone, handbook = client.models.list().data
    assert 0 <= time.time() - alone.created < 600 and handbook.created == 1.7e9
    assert [model.to_dict()["max_model_len"] for model in (alone, handbook)] == [2048, 2048]


def test_chat_completion(service: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK)
    assert answer.choices[0].message.content == "The answer is 42."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == CONTEXT_TOKENS
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (CONTEXT_TOKENS + 7, 4)
    assert answer.usage.total_tokens == CONTEXT_TOKENS + 11
    shorter = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2)
    assert (shorter.choices[0].message.content, shorter.choices[0].finish_reason) == ("The answer ", "length")


def test_a_chat_stream_has_the_same_text_finish_reason_and_usage(service: Running, client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}, max_tokens=3
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "The answer is "
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_clients_stream_helper_reads_text_and_logprobs(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, logprobs=True) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "The answer is 42."
    assert final.choices[0].logprobs is not None and final.choices[0].logprobs.content is not None
    assert len(final.choices[0].logprobs.content) == 4


def test_text_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="It is")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("The answer is 42.", "stop")
    chunks = list(client.completions.create(model=MODEL, prompt="It is", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "The answer is 42."
    assert chunks[-1].choices[0].finish_reason == "stop" and chunks[0].id.startswith("cmpl-")


def test_chat_logprobs_report_bytes_and_top_alternatives(service: Running, client: openai.OpenAI) -> None:
    top = (("A", b"A", -0.5), ("\ufffd", b"\xc3", float("-inf")))
    service.backend.scripts["What is it?"] = Script(words=("\u00e9", "\ufffd"), top=top)
    answer = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("\u00e9", -0.5, [0xC3, 0xA9])
    assert [(item.token, item.logprob, item.bytes) for item in first.top_logprobs] == [
        ("A", -0.5, [65]), ("\ufffd", -9999.0, [0xC3]),
    ]  # fmt: skip
    assert second.bytes == [0xEF, 0xBF, 0xBD]  # the model has generated U+FFFD itself


def test_streamed_completion_logprobs_equal_unstreamed_ones(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts["x"] = Script(top=(("A", b"A", -0.25),))
    whole = client.completions.create(model=MODEL, prompt="x", logprobs=1).choices[0].logprobs
    assert whole is not None and whole.tokens == ["The ", "answer ", "is ", "42."]
    assert whole.text_offset == [0, 4, 11, 14] and whole.token_logprobs == [-0.5, -1.5, -2.5, -3.5]
    assert whole.top_logprobs == [{"A": -0.25}] * 4
    chunks = list(client.completions.create(model=MODEL, prompt="x", logprobs=1, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [token for part in parts for token in part.tokens or []] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset or []] == whole.text_offset


def test_extra_body_passes_keep_lookahead_and_selector(service: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=ASK, extra_body={"keep": 0.25, "lookahead": 1, "selector": "exact"}
    )
    ask = service.backend.asks[-1]
    assert (ask.keep, ask.lookahead, ask.selector) == (0.25, 1, "exact")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OverloadedError("full", retry_after_s=2.4), 429, "overloaded"),
        (WorkerLostError("gone"), 503, "worker_lost"),
        (TimedOutError("late"), 504, "timeout"),
        (ServingError("broken"), 500, "internal_error"),
        (RuntimeError("a secret of ours"), 500, "internal_error"),
    ],
)
def test_a_failure_before_the_first_token_sets_the_http_status(
    service: Running, client: openai.OpenAI, error: Exception, status: int, code: str
) -> None:
    service.backend.scripts["What is it?"] = Script(fail_at=0, error=error)
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as failed:
            client.chat.completions.create(model=MODEL, messages=ASK, stream=stream)
        assert failed.value.status_code == status and failed.value.code == code
        assert failed.value.response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
        assert "secret" not in failed.value.message
    assert not service.backend.running


@pytest.mark.parametrize("error", [WorkerLostError("the worker ended"), RuntimeError("a secret of ours")])
@pytest.mark.parametrize("api", ["chat", "text"])
def test_a_failure_in_mid_stream_is_sent_as_an_error_event(
    service: Running, client: openai.OpenAI, error: Exception, api: str
) -> None:
    service.backend.scripts["What is it?"] = Script(fail_at=2, error=error)
    create: Any = client.chat.completions.create if api == "chat" else client.completions.create
    asked: dict[str, Any] = {"messages": ASK} if api == "chat" else {"prompt": "What is it?"}
    said: list[Any] = []
    stream = create(model=MODEL, stream=True, **asked)
    with pytest.raises(openai.APIError) as failed:
        said.extend(stream)
    assert len(said) == (3 if api == "chat" else 2)
    assert failed.value.code == getattr(error, "code", "internal_error") and "secret" not in failed.value.message
    assert "csattn_http_stream_errors_total" in get(service, "/metrics").text


def test_a_failed_stream_ends_without_the_done_marker(service: Running) -> None:
    for script in (Script(fail_at=1, error=WorkerLostError("x")), Script(ends_without_done=True)):
        service.backend.scripts["x"] = script
        body = {"model": MODEL, "prompt": "x", "stream": True}
        reply = httpx2.post(f"{service.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
        events = reply.text.strip().split("\n\n")
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        assert events[-1].startswith('data: {"error":') and '"worker_lost"' in events[-1]
        assert "[DONE]" not in reply.text


def test_a_request_beyond_its_timeout_returns_504_or_ends_its_stream(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts["What is it?"] = Script(pause_s=1.2)
    with pytest.raises(openai.APIStatusError) as failed:
        client.chat.completions.create(model=MODEL, messages=ASK)
    assert failed.value.status_code == 504 and failed.value.code == "timeout"
    said: list[Any] = []
    stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="within 2 s"):
        said.extend(stream)
    assert len(said) == 4
    assert not service.backend.running


def test_contexts_are_created_listed_and_deleted_over_http(service: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=service.url, headers=headers) as http:
        made = http.post("/v1/contexts", json={"name": "novel", "text": "Once."})
        assert made.status_code == 202 and made.json()["state"] == "building"
        assert made.json()["model"] == "smollm2-135m@novel"
        assert http.post("/v1/contexts", json={"name": "novel", "text": "Once."}).status_code == 202
        other = http.post("/v1/contexts", json={"name": "novel", "text": "Twice."})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "context_exists")
        assert other.headers["x-should-retry"] == "false"
        asked = http.post("/v1/completions", json={"model": "smollm2-135m@novel", "prompt": "x"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (409, "context_not_ready")
        service.backend.add("novel", num_tokens=12)
        assert http.post("/v1/contexts", json={"name": "novel", "text": "Once."}).status_code == 200
        assert http.get("/v1/contexts/novel").json()["num_tokens"] == 12
        assert {"novel", "handbook"} <= {item["id"] for item in http.get("/v1/contexts").json()["data"]}
        assert http.delete("/v1/contexts/novel").json() == {"id": "novel", "object": "context.deleted", "deleted": True}
        for method in ("GET", "DELETE"):
            gone = http.request(method, "/v1/contexts/novel")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "context_not_found")
        for method, path, body in (
            ("GET", "/v1/models/smollm2-135m@novel", None),
            ("POST", "/v1/completions", {"model": "smollm2-135m@novel", "prompt": "x"}),
            ("POST", "/v1/completions", {"model": "gpt-4", "prompt": "x"}),
        ):
            gone = http.request(method, path, json=body)
            error = gone.json()["error"]
            assert (gone.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "there is no context" in http.get("/v1/models/smollm2-135m@novel").json()["error"]["message"]


def test_health_ready_and_version_endpoints(service: Running) -> None:
    assert httpx2.get(f"{service.url}/health").json() == {"status": "ok"}
    assert httpx2.get(f"{service.url}/ready").status_code == 200
    service.backend.health_now = Health(False, "the worker starts")
    try:
        reply = httpx2.get(f"{service.url}/ready")
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["message"] == "the worker starts"
        assert httpx2.get(f"{service.url}/health").status_code == 200
    finally:
        service.backend.health_now = Health(True)
    assert set(get(service, "/version").json()) == {"version"}


def test_overload_returns_429_with_retry_after_at_once() -> None:
    backend = FakeBackend(max_requests=1, max_queued=0, scripts={"slow": Script(first_after_s=1.0)})
    with (
        serving(backend) as service,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0) as client,
        ThreadPoolExecutor(1) as other,
    ):
        slow = other.submit(client.completions.create, model=MODEL, prompt="slow")
        assert eventually(lambda: backend.running)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="x")
        assert refused.value.response.headers["retry-after"] == "3"
        assert slow.result().choices[0].text == "The answer is 42."
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text
