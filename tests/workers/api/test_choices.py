"""OpenAI's own client: several answers, tool calls, reasoning, echoes, and tokens."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from tests.workers.api.fake_backend import CONTEXT_TOKENS, FakeBackend, Script
from tests.workers.api.running import KEY, Running, eventually, serving, settings_with
from workers.serving.messages import BadRequestError, CallPart, OverloadedError, Piece, TokenScore

MODEL = "smollm2-135m@handbook"
ASK: list[Any] = [{"role": "user", "content": "?"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = (
    Piece("", reasoning="Hm"),
    Piece("", reasoning="."),
    Piece("See: "),
    Piece("", calls=(CallPart(0, call_id="123456789", name="add"), CallPart(0, '{"a"'))),
    Piece("", calls=(CallPart(0, ": 1}"), CallPart(1, call_id="abcdefghi", name="add"), CallPart(1, "{}"))),
)


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(
        FakeBackend(max_requests=8), settings_with(max_concurrent_requests=8, max_queued_requests=4)
    ) as running:
        yield running


def test_a_chat_with_n_returns_n_choices_with_successive_seeds(service: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"The answer is 42."}
    assert [ask.sampling.seed for ask in service.backend.asks[-3:]] == [5, 6, 7]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (CONTEXT_TOKENS + 7, 12)


def test_a_stream_with_n_interleaves_complete_choices(client: openai.OpenAI) -> None:
    said, ended = {0: "", 1: "", 2: ""}, []
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, n=3, stream=True, stream_options={"include_usage": True}
    )
    usages = []
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            ended += [choice.index] if choice.finish_reason else []
    assert set(said.values()) == {"The answer is 42."} and sorted(ended) == [0, 1, 2]
    assert usages[-1] is not None and usages[-1].completion_tokens == 12 and not any(usages[:-1])


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_continuous_usage_stats_report_each_choices_tokens_so_far(client: openai.OpenAI, kind: str) -> None:
    options: Any = {"stream": True, "n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if kind == "chat":
        chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, **options))
    else:
        chunks = list(client.completions.create(model=MODEL, prompt="a", **options))
    told: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks[:-1]:
        assert chunk.usage is not None and chunk.usage.prompt_tokens == CONTEXT_TOKENS + 7
        told[chunk.choices[0].index].append(chunk.usage.completion_tokens)
    assert told[0] == told[1] == ([0] if kind == "chat" else []) + [1, 2, 3, 4, 4]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_several_prompts_with_n_return_choices_in_prompt_order(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"a": Script(("A",)), "b": Script(("B",))}
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "A"), (1, "A"), (2, "B"), (3, "B")]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2 * (CONTEXT_TOKENS + 7)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_choice_ends_the_requests_other_choices(service: Running, client: openai.OpenAI, stream: bool) -> None:
    slow = Script(("x",) * 100, pause_s=0.05)
    service.backend.scripts = {"a": slow, "b": Script(fail_at=0, error=OverloadedError("full"))}
    with pytest.raises(openai.APIError if stream else openai.RateLimitError, match="full"):
        list(client.completions.create(model=MODEL, prompt=["a", "a", "b"], stream=stream, max_tokens=100))
    assert eventually(lambda: not service.backend.running)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_cancelled_backend_answer_returns_503_without_waiting(
    service: Running, client: openai.OpenAI, prompt: str | list[str]
) -> None:
    service.backend.scripts = {"a": Script(fail_at=0, error=asyncio.CancelledError())}
    with pytest.raises(openai.InternalServerError, match="the answer was interrupted") as broken:
        client.completions.create(model=MODEL, prompt=prompt)
    assert broken.value.status_code == 503
    assert eventually(lambda: not service.backend.running)


def test_a_client_disconnect_ends_all_choices_of_its_request(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script(("x",) * 1000, pause_s=0.02)}
    stream = client.chat.completions.create(model=MODEL, messages=ASK, n=4, stream=True, max_tokens=1000)
    next(stream)
    assert eventually(lambda: len(service.backend.running) == 4)
    stream.close()
    assert eventually(lambda: not service.backend.running)


def test_a_chat_returns_tool_calls_and_reasoning_content(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script(CALLS, reason="tool_calls")}
    choice = client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "See: "
    assert choice.message.model_extra == {"reasoning_content": "Hm."}
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [("123456789", "add", '{"a": 1}'), ("abcdefghi", "add", "{}")]
    service.backend.scripts = {"?": Script(CALLS[3:], reason="tool_calls")}
    assert client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL]).choices[0].message.content is None


def test_the_clients_stream_helper_assembles_tool_calls(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script(CALLS, reason="tool_calls")}
    with client.chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL]) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    assert deltas and message.content == "See: "
    assert [(call.id, call.function.arguments) for call in message.tool_calls or []] == [
        ("123456789", '{"a": 1}'), ("abcdefghi", "{}"),
    ]  # fmt: skip


def test_an_answer_with_tool_calls_can_be_sent_back_as_a_message(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script(CALLS, reason="tool_calls")}
    message = client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL]).choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls or []
    ]
    client.chat.completions.create(model=MODEL, messages=[*ASK, message, *results], tools=[TOOL])  # type: ignore[list-item]
    turns = service.backend.asks[-1].turns
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "tool"]
    assert turns[1].reasoning == "Hm." and [call.arguments for call in turns[1].calls] == [{"a": 1}, {}]
    assert [turn.call_id for turn in turns[2:]] == ["123456789", "abcdefghi"]


def test_echo_returns_the_prompts_tokens_and_logprobs(service: Running, client: openai.OpenAI) -> None:
    scores = (TokenScore(1, "It", None), TokenScore(2, " is", -1.5, ((" was", b" was", -0.5),)))
    told = Piece("It is", scores), Piece(" 5", (TokenScore(3, " 5", -0.25, ((" 5", b" 5", -0.25),)),))
    service.backend.scripts = {"It is": Script(told), (1, 2): Script(told)}
    for prompt in ("It is", [[1, 2]]):
        answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=2, logprobs=1)
        choice = answer.choices[0]
        assert choice.text == "It is 5" and choice.logprobs is not None
        assert choice.logprobs.tokens == ["It", " is", " 5"] and choice.logprobs.text_offset == [0, 2, 5]
        assert choice.logprobs.token_logprobs == [None, -1.5, -0.25]
        assert choice.logprobs.top_logprobs == [None, {" was": -0.5}, {" 5": -0.25}]
        assert service.backend.asks[-1].echo
    assert service.backend.asks[-1].prompt == (1, 2)
    client.completions.create(model=MODEL, prompt="It is", echo=True, max_tokens=0)
    assert service.backend.asks[-1].sampling.max_new_tokens == 0


def test_logprobs_report_the_bytes_of_tokens_that_split_characters(service: Running, client: openai.OpenAI) -> None:
    parts = [b"a\xf0\x9f", b"\x98", b"\x80\xc3", b"\xa9", b"b"]
    scores = [TokenScore(i, part.decode(errors="surrogateescape"), -1.0) for i, part in enumerate(parts)]
    top = (("\ufffd", b"\xf0", -1.0), ("\ufffd", b"\xf1", -2.0))
    told = Piece("a\U0001f600\u00e9", (*scores[:3], replace(scores[3], top=top))), Piece("b", (scores[4],))
    service.backend.scripts = {"?": Script(told)}
    chat = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True).choices[0]
    assert chat.logprobs is not None and chat.logprobs.content is not None
    assert [bytes(score.bytes or ()) for score in chat.logprobs.content] == parts
    assert [score.token for score in chat.logprobs.content] == ["a\ufffd", "\ufffd", "\ufffd\ufffd", "\ufffd", "b"]
    plain = client.completions.create(model=MODEL, prompt="?", logprobs=2).choices[0]
    assert plain.logprobs is not None and plain.logprobs.top_logprobs is not None
    assert plain.logprobs.text_offset == [0, 1, 1, 2, 3], "of the character that the token begins in"
    assert (plain.logprobs.tokens or [])[1:] == [r"bytes:\x98", r"bytes:\x80\xc3", r"bytes:\xa9", "b"]
    assert plain.logprobs.top_logprobs[3] == {r"bytes:\xf0": -1.0, r"bytes:\xf1": -2.0}


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x80", b"\xbf", b"a"],
        [b"\xc3", b"b", b"", b"\xe0", b"\x80", b"\xc3\xa9"],
        [b"\xf0\x9f", b"\xc3", b"\xa9\x98z", b"\xff", b"c"],
    ],
)
def test_text_offsets_count_the_replacement_characters_of_invalid_bytes(
    service: Running, client: openai.OpenAI, parts: list[bytes]
) -> None:
    scores = tuple(TokenScore(i, part.decode(errors="surrogateescape"), -1.0) for i, part in enumerate(parts))
    text = b"".join(parts).decode(errors="replace")
    service.backend.scripts = {"?": Script((Piece(text, scores),))}
    told = client.completions.create(model=MODEL, prompt="?", logprobs=0).choices[0]
    # a token begins at the character that its first byte belongs to, which an earlier token may have begun
    before = [b"".join(parts[:i]).decode(errors="replace") for i in range(len(parts))]
    with_first = [(b"".join(parts[:i]) + part[:1]).decode(errors="replace") for i, part in enumerate(parts)]
    begins = [max(0, len(text) - 1) if parts[i] else len(before[i]) for i, text in enumerate(with_first)]
    assert told.logprobs is not None and told.text == text and told.logprobs.text_offset == begins


def test_text_offsets_skip_special_tokens_without_text(service: Running, client: openai.OpenAI) -> None:
    parts = [("\u4f60", True), ("<|im_end|>", False), ("\n", True), ("x", True)]
    scores = tuple(TokenScore(i, text, -1.0, is_visible=is_visible) for i, (text, is_visible) in enumerate(parts))
    service.backend.scripts = {"?": Script((Piece("\u4f60\nx", scores),))}
    told = client.completions.create(model=MODEL, prompt="?", logprobs=0).choices[0].logprobs
    assert told is not None and told.text_offset == [0, 1, 1, 2]


def test_text_offsets_do_not_count_a_space_that_is_stripped_from_the_text(
    service: Running, client: openai.OpenAI
) -> None:
    scores = (TokenScore(1, "<s>", None, is_visible=False), TokenScore(2, " It", -1.0), TokenScore(3, " is", -1.0))
    for start in ("", " "):
        service.backend.scripts = {"?": Script((Piece(f"{start}It", scores[:2]), Piece(" is", scores[2:])))}
        told = client.completions.create(model=MODEL, prompt="?", logprobs=0).choices[0].logprobs
        assert told is not None and told.text_offset == [0, 0, len(start) + 2]


def test_tokenize_and_detokenize_endpoints(service: Running) -> None:
    with httpx2.Client(base_url=service.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        told = http.post("/tokenize", json={"model": MODEL, "prompt": "ab", "return_token_strs": True}).json()
        assert told == {"count": 2, "max_model_len": 2048, "tokens": [97, 98], "token_strs": ["a", "b"]}
        chat = http.post("/tokenize", json={"messages": ASK, "tools": [TOOL], "add_generation_prompt": False}).json()
        assert chat["tokens"] == [63] and chat["token_strs"] is None
        assert http.post("/detokenize", json={"model": "smollm2-135m", "tokens": [97, 98]}).json() == {"prompt": "ab"}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}),
            ("/tokenize", {"messages": ASK, "add_special_tokens": 0}),
            ("/detokenize", {"tokens": "a"}),
            ("/detokenize", {"tokens": [-1]}),
        ):
            assert http.post(path, json=body).status_code == 400, body
        both = http.post("/tokenize", json={"prompt": "a", "messages": ASK}).json()["error"]
        assert both["message"] == "messages is a list: prompt is set, too; send one of them"
        assert http.post("/tokenize", json={"model": "gpt-4", "prompt": "a"}).status_code == 404


def test_a_request_that_the_backend_refuses_returns_400(service: Running, client: openai.OpenAI) -> None:
    service.backend.scripts = {"?": Script(fail_at=0, error=BadRequestError("no such schema", "response_format"))}
    with pytest.raises(openai.BadRequestError, match="no such schema") as refused:
        client.chat.completions.create(model=MODEL, messages=ASK, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    assert service.backend.asks[-1].schema == {"type": "object"}
